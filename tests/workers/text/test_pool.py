"""Several text models behind one runner, on the real engine: answers as of each alone, within the memory they have."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from core.batching.request import Request
from core.batching.runner import Lane
from llm.cache.pages import PAGE
from llm.checkpoints.load import TextModel, load
from llm.families import tiny
from llm.parameters import GeneratedText, TextParameters
from llm.runner import TextRunner
from pipeline.extensions.asset_cache import ReadFile
from tests.llm import stage
from tests.pools import PoolStage, stages_of
from workers.text.pool import TextPool, size_bytes

SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)
MODELS: dict[str, Callable[[], TextModel]] = {
    "first": functools.cache(lambda: load(tiny.QWEN3_TINY)), "second": stage.small, "third": stage.other,
}  # fmt: skip
NAMES = tuple(MODELS)
OPTIONS: dict[str, Any] = {"max_requests": 3, "context": 96}


def parameters(name: str, seed: int, **fields: Any) -> TextParameters:
    return TextParameters(
        stage.chat(MODELS[name](), "a cat"), **{"max_tokens": 20, "temperature": 1.0, "seed": seed, **fields}
    )


class Stage(PoolStage):
    """An engine over a pool of `MODELS`, with room for so many at once."""

    def __init__(self, room: int, *, pages: int = 64, first: int = 1) -> None:
        """`first` is the size of the first; others are of 1."""
        self.lane, self.pages, self.first = Lane("text"), pages, first
        self.loads: Counter[str] = Counter()
        pool = TextPool([*NAMES], self._load, room)
        pool.start()
        super().__init__(self.lane, pool, NAMES[1:])

    def _load(self, name: str) -> ReadFile[TextRunner]:
        self.loads[name] += 1
        runner = TextRunner(MODELS[name](), lane=self.lane, pages=self.pages, **OPTIONS)
        assert size_bytes(runner) > runner.execution.cache.size_bytes
        return ReadFile(runner, name, self.first if name == "first" else 1)

    def submit(self, name: str, seed: int, tenant: str = "", **fields: Any) -> Future[GeneratedText]:
        return self.add(parameters(name, seed, **fields), name, tenant)


@pytest.fixture
def stages() -> Iterator[Callable[..., Stage]]:
    yield from stages_of(Stage)


def alone(name: str, *requests: TextParameters) -> list[GeneratedText]:
    with stage.serving(MODELS[name](), **OPTIONS) as (engine, _):
        return stage.answers(engine, list(requests))


@pytest.mark.parametrize("room", [3, 2])
def test_answers_of_three_models_are_those_that_each_gives_alone(stages: Callable[..., Stage], room: int) -> None:
    """Whether all of them fit, or the first and one more at a time."""
    three = stages(room)
    before = three.loads.total()
    futures = {(name, seed): three.submit(name, seed, f"{seed}") for seed in (1, 2) for name in NAMES}
    answers = {key: future.result(60) for key, future in futures.items()}
    for name in NAMES:
        expected = alone(name, *(parameters(name, seed) for seed in (1, 2)))
        assert [answers[name, seed].tokens for seed in (1, 2)] == [answer.tokens for answer in expected]
    assert three.loads["first"] == 1 and (three.loads.total() > before) == (room == 2)
    assert three.pool.held() == 0 and {tick.group.model for tick in three.ticks} == {*NAMES}
    assert {tick.group.phase for tick in three.ticks} == {"text"}


def test_models_that_fit_stay_however_large_the_first_is(stages: Callable[..., Stage]) -> None:
    three = stages(5, first=3)
    for name in (*NAMES, *NAMES):
        three.submit(name, 1, max_tokens=1).result(60)
    assert all(three.pool.resident(name) is not None for name in NAMES) and three.loads["third"] == 1


def test_models_take_turns_token_by_token(stages: Callable[..., Stage]) -> None:
    two = stages(3)
    hold = threading.Event()
    two.lane.start(hold.wait, lambda _: {})
    futures = [two.submit(name, 1, ignore_end=True, max_tokens=30) for name in ("second", "third")]
    hold.set()
    for future in futures:
        future.result(60)
    turns = [tick.group.model for tick in two.ticks]
    assert len(turns) == 60 and all(turn != after for turn, after in pairwise(turns[:56]))  # then who ends goes first


def test_a_model_whose_memory_is_full_holds_up_its_own_requests_alone(stages: Callable[..., Stage]) -> None:
    """Three answers of one tenant have all places of a model; another's model is free."""
    two = stages(3)
    long = [two.submit("second", seed, "many", max_tokens=60, ignore_end=True) for seed in range(4)]
    few = two.submit("third", 1, "few", max_tokens=2, ignore_end=True)
    few.result(60)
    assert not any(future.done() for future in long[3:])
    assert len(long[3].result(60).tokens) == 60


def test_preempted_answers_go_on_as_they_began_and_no_other_models_are_preempted(
    stages: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of its three answers do not fit one model's cache; another's, which is the least urgent, does."""
    preempted: Counter[str] = Counter()
    preempt = TextPool.preempt

    def count(self: TextPool, request: Request) -> None:
        preempted[request.model] += 1
        preempt(self, request)

    monkeypatch.setattr(TextPool, "preempt", count)
    tight = stages(3, pages=96 // PAGE + 1)
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_end": True}
    futures = [tight.submit("second", seed, **fields) for seed in range(3)]
    beside = tight.submit("third", 1, **fields)
    expected = alone("second", *(parameters("second", seed, **fields) for seed in range(3)))
    assert [future.result(60).tokens for future in futures] == [answer.tokens for answer in expected]
    assert beside.result(60).tokens == alone("third", parameters("third", 1, **fields))[0].tokens
    assert preempted["second"] and not preempted["third"] and tight.pool.held() == 0


def test_a_preempted_answer_goes_on_after_its_model_left_memory(stages: Callable[..., Stage]) -> None:
    two = stages(3)
    runner, tokens = two.pool.resident("second"), 0
    assert runner is not None
    request = Request("a", "text", parameters("second", 3, json_schema=SCHEMA), model="second")
    two.engine.close()  # this test is the scheduler
    two.pool.check(request)
    for _ in range(2):
        while two.pool.admit(request) is not None:
            time.sleep(0.002)
        for _ in range(4):
            assert two.pool.reserve([request])
            ticket = two.pool.launch([request])
            ended = threading.Event()
            ticket.notify(ended.set)
            assert ended.wait(30)
            outcome = ticket.outcome()["a"]
            tokens += 0 if outcome.token is None else len(outcome.token.tokens)
        two.pool.preempt(request)
        two.pool.evict(["second"])
        assert two.pool.resident("second") is None
    (expected,) = alone("second", request.parameters)
    made = request.work.tokens[request.work.prompt :]
    assert tuple(made) == expected.tokens[: len(made)] and 4 <= len(made) == tokens
    assert two.loads["second"] == 2


def test_what_one_tenant_has_checked_holds_up_no_others_model(
    stages: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither model is in memory, so that each checks its requests before it admits them; the checks of one hang.

    Each of these is submitted by a thread of its own, as workers do: once the model is loaded that thread checks it.
    """
    begun, end, check = threading.Event(), threading.Event(), TextRunner.check

    def hang(runner: TextRunner, request: Request) -> None:
        if request.tenant == "mallory":
            begun.set()
            assert end.wait(120)
        check(runner, request)

    three = stages(3)
    three.pool.evict(NAMES[1:])
    monkeypatch.setattr(TextRunner, "check", hang)
    with ThreadPoolExecutor(5) as threads:
        submit = functools.partial(three.submit, "second", tenant="mallory", max_tokens=1)
        hanging = [threads.submit(lambda seed=seed: submit(seed=seed).result(240)) for seed in range(5)]  # type: ignore[misc]
        assert begun.wait(60)
        assert len(three.submit("third", 1, "alice", max_tokens=2, ignore_end=True).result(60).tokens) == 2
        assert not any(future.done() for future in hanging)
        end.set()
        for future in hanging:
            future.result(60)
