"""A feature that the runner does not know takes part in every part of a request's life, for its own sequences alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from contract.errors import Invalid
from core.batching.request import Request
from llm import runner as runners
from llm.features.feature import RunnerParts, SequenceFeature
from llm.features.registry import FEATURES
from llm.parameters import TextParameters
from llm.sequence import SequenceState
from llm.step import StepResult
from tests.llm import stage

MOST = 3  # tokens of a prompt in a step


class SmallChunks(SequenceFeature):
    """Reads the prompts of requests with stop strings in small chunks, of one request at a time."""

    name = "small chunks"
    resource = "turn"
    calls: Counter[str]

    def __init__(self, parts: RunnerParts) -> None:
        super().__init__(parts)
        self._owner: SequenceState | None = None
        SmallChunks.calls = Counter()

    def is_requested(self, parameters: TextParameters) -> bool:
        return bool(parameters.stop)

    def check(self, request: Request) -> None:
        if "forbidden" in request.parameters.stop:
            raise Invalid("stop", "is forbidden")

    def options(self, request: Request) -> Mapping[str, Any]:
        self.calls["options"] += 1
        return {}

    def admit(self, sequence: SequenceState, *, wait: bool) -> bool:
        if self._owner not in (None, sequence):
            assert wait, "another sequence runs, and ends"
            return False
        self._owner = sequence
        return True

    def release(self, sequence: SequenceState) -> None:
        if self._owner is sequence:
            self._owner = None
            self.calls["released"] += 1

    def rows(self, sequence: SequenceState, rows: int) -> int:
        return min(rows, MOST)

    def deferred(self, requests: Sequence[Request], forward_s: float) -> Collection[str]:
        assert forward_s > 0
        self.calls["steps"] += 1
        mine = [request.id for request in requests if self.name in request.work.uses]
        return mine if len(mine) < len(requests) and self.calls["steps"] % 2 else ()

    def take(self, sequence: SequenceState, result: StepResult) -> None:
        assert sequence is self._owner
        self.calls["taken"] += 1

    def close(self) -> None:
        self.calls["closed"] += 1


def test_answers_are_the_same_and_only_its_own_sequences_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stage.small()
    requests = [
        stage.greedy(prompt, 12, stop=("never to be written",) if i % 2 else ())
        for i, prompt in enumerate(stage.prompts(model, 6))
    ]
    expected = stage.write(model, requests, max_requests=4)
    monkeypatch.setattr(runners, "FEATURES", (*FEATURES, SmallChunks))
    assert stage.write(model, requests, max_requests=4) == expected
    calls = SmallChunks.calls
    assert calls["closed"] == 1 and calls["released"] >= 3 <= calls["options"]
    chunks = sum(-(-len(request.prompt) // MOST) for request in requests[1::2])
    assert calls["taken"] >= chunks + 3 * 11, "each chunk and each token of three answers"


def test_what_it_refuses_is_refused_when_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "FEATURES", (*FEATURES, SmallChunks))
    with stage.serving(stage.small()) as (engine, _):
        with pytest.raises(Invalid, match="is forbidden"):
            stage.submit(engine, stage.greedy((1, 2, 3), 4, stop=("forbidden",)))
        assert stage.submit(engine, stage.greedy((1, 2, 3), 4), "b").result(60).tokens


class NoRoom(SmallChunks):
    """Fails where a sequence is admitted, once those before it have reserved what they need."""

    name = "no room"

    def is_requested(self, parameters: TextParameters) -> bool:
        return "fails" in parameters.stop

    def admit(self, sequence: SequenceState, *, wait: bool) -> bool:
        raise RuntimeError("no memory")


def test_what_was_reserved_before_one_failed_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "FEATURES", (*FEATURES, SmallChunks, NoRoom))
    with stage.serving(stage.small()) as (engine, _):
        with pytest.raises(RuntimeError, match="no memory"):
            stage.submit(engine, stage.greedy((1, 2, 3), 4, stop=("fails",))).result(60)
        answer = stage.submit(engine, stage.greedy((1, 2, 3), 4, stop=("never to be written",)), "b")
        assert answer.result(60).tokens, "the turn is free again"
