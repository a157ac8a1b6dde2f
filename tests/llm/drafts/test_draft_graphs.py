"""Rounds whose guesses stay on the device: what a drafter is given of each sequence there, and what is written."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreted import CUDA

# isort: split
from core.batching.engine import Engine
from core.kernels.cuda import token_kernels
from core.kernels.kv_cache import PAGE, KVCache
from core.ops.cuda_tokens import FusedBatch
from llm import model_runner
from llm.backends import select
from llm.backends.backend import TextBackend
from llm.backends.fused import FusedBackend
from llm.checkpoints.load import TextModel, load
from llm.drafts.draft_forwards import FusedForwards
from llm.drafts.draft_graphs import DraftGraphs, Unread
from llm.drafts.drafter import DraftRequest
from llm.drafts.feature_drafter import FeatureDrafter
from llm.drafts.speculator import Speculator
from llm.families import tiny
from llm.parameters import TextParameters
from llm.runner import TextRunner
from tests.llm import stage

WORDS = 60
WRONG = 1  # a guess that is never right


def following(tokens: Tensor, positions: Tensor) -> Tensor:
    """The token that the model below writes after each of these."""
    return 3 + (7 * tokens.long() + 11 * positions.long()) % (WORDS - 3)


@dataclass
class Rule:
    """A `CudaDecoder` that writes by a rule; its features are the rows' tokens, positions and sequences.

    Behind tokens of `nan` its logits are NaN.
    """

    cache: KVCache
    vocabulary: int
    nan: tuple[int, ...] = ()
    group: int = 2
    feature_width: int = 3
    dtype: torch.dtype = torch.float32
    ranks: None = None
    ops: Any = field(default_factory=lambda: SimpleNamespace(branches=None, early=0))

    def __call__(
        self, rows: FusedBatch, out: Tensor | None = None, before: None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert rows.features is not None
        rows.features.copy_(torch.stack([rows.tokens, rows.positions, rows.sequences], 1))
        index = slice(None) if rows.output_rows is None else rows.output_rows.long()
        best = following(rows.tokens[index], rows.positions[index])
        logits = torch.zeros(len(best), self.vocabulary, device=best.device) if out is None else out.zero_()
        logits.scatter_(1, best[:, None], 9.0)
        for token in self.nan:
            logits.masked_fill_((rows.tokens[index] == token)[:, None], torch.nan)
        return logits, None

    def likeliest(self, logits: Tensor, owners: Tensor, latest: Tensor, out: Tensor) -> None:
        token_kernels.likeliest(logits, owners, latest, out)

    def whole(self, logits: Tensor) -> Tensor:
        return logits


class RuleDrafter(FeatureDrafter):
    """Guesses by the rule, in part wrongly; and checks that it has read every position, with what belongs to it."""

    at_once, most, cost = True, 7, 0.1

    def __init__(self, lookahead: int, execution: TextBackend, sequences: int) -> None:
        self.lookahead = lookahead
        forwards: Any = FusedForwards.__new__(FusedForwards)
        forwards.cache, forwards.device, forwards.release = execution.cache, execution.model.device, lambda: None
        forwards._bytes = 0
        self.state: dict[tuple[int, int], tuple[int, int]] = {}  # by page and position: its token and the next one
        super().__init__((0,), forwards, execution, counts=[self.most], reaches=(), sequences=sequences)

    def _read(self, requests: Sequence[DraftRequest]) -> None:
        for r in requests:
            self._eager([r])

    def _eager(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        for r in requests:
            assert r.features is not None
            for position, feature in zip(range(r.read, r.stop), r.features.tolist(), strict=True):
                behind = r.tokens[position + 1] if position + 1 < len(r.tokens) else -1
                self._take(feature, r.tokens[position], position, r.row, behind)
        return [[0] * r.count for r in requests]

    def _take(self, feature: Sequence[float], token: int, position: int, row: int, behind: int) -> None:
        assert [*feature] == [token, position, row]
        self.state[self._page(row, position), position] = token, behind

    def _page(self, row: int, position: int) -> int:
        return int(self._forwards.cache.table[row, position // PAGE])

    def _walk(self, features: Tensor, unread: Unread, count: int) -> Tensor:
        token, position = unread.token, unread.stop
        if not CUDA:  # where this is recorded
            self._check(features, unread)
        drafts = []
        for _ in range(count):
            token, position = following(token, position), position + 1
            drafts.append(
                torch.where(position % 5 == 0, WRONG, token)
            )  # wrong, and what follows builds on what is right
        return torch.stack(drafts)

    def _check(self, features: Tensor, unread: Unread) -> None:
        token, position = unread.token, unread.stop
        columns = zip(unread.tokens.tolist(), unread.positions.tolist(), unread.sequences.tolist(), strict=True)
        for feature, (behind, place, row) in zip(features.tolist(), columns, strict=True):
            if place >= 0:
                self._take(feature, int(feature[0]), place, row, behind)
        for row, stop, last in zip(
            unread.sequences.view(len(token), -1)[:, 0].tolist(), position.tolist(), token.tolist(), strict=True
        ):
            state = [self.state[self._page(row, p), p] for p in range(stop)]
            for (_, behind), (own, _) in zip(state, [*state[1:], (last, 0)], strict=False):
                assert behind in (own, -1)  # -1: not known when it was read


@functools.cache
def model() -> TextModel:
    return load(tiny.TINY, precision="bf16", device="cuda") if CUDA else stage.small()


def fuse(monkeypatch: pytest.MonkeyPatch, nan: Sequence[int] = ()) -> None:
    """Have the rule's decoder run models on a CPU, as fused kernels do on a GPU."""

    def fused(model: TextModel, cache: KVCache, *_: object, **size: int) -> FusedBackend:
        decoder: Any = Rule(cache, model.vocabulary, tuple(nan))
        return FusedBackend(model, cache, decoder, sequences=len(cache.table), context=128, rows=size.get("rows", 192))

    monkeypatch.setattr(select, "_fused" if CUDA else "_programs", fused)


def _most(guesses: int, acceptance: float) -> int:
    return guesses


@contextmanager
def ruled(
    monkeypatch: pytest.MonkeyPatch, lookahead: int, nan: Sequence[int] = (WRONG,), **options: Any
) -> Iterator[tuple[Engine, TextRunner]]:
    """A runner of the rule's model on a CPU, as on a GPU."""

    class Draft:
        name, features = "rule", (0,)

        def __init__(self) -> None:
            self.lookahead = lookahead

        def __call__(self, execution: TextBackend, *, sequences: int, **size: Any) -> RuleDrafter:
            return RuleDrafter(lookahead, execution, sequences)

    fuse(monkeypatch, nan)
    load = itertools.cycle([6, 6, 0, 7, 0, 0, 0, 3, 6])  # guesses that pay off: where none do, steps run ahead
    monkeypatch.setattr(Speculator, "lengths", lambda *_: functools.partial(_most, next(load)))
    with stage.serving(model(), draft=Draft(), context=128, **options) as served:
        yield served


def by_rule(parameters: TextParameters) -> tuple[int, ...]:
    tokens = [*parameters.prompt]
    for _ in range(parameters.max_tokens):
        tokens.append(int(following(torch.tensor(tokens[-1]), torch.tensor(len(tokens) - 1))))
    return tuple(tokens[len(parameters.prompt) :])


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{"max_requests": 1}, {"max_requests": 4}, {"max_requests": 6, "pages": 20, "chunk": 7}],
    ids=["alone", "several", "preempted"],
)
def test_texts_are_the_models(monkeypatch: pytest.MonkeyPatch, lookahead: int, options: dict[str, Any]) -> None:
    """With requests that sample among them, whose guesses the host accepts; behind wrong guesses logits are NaN."""
    seen = Counter[str]()
    begin, draw = DraftGraphs.begin, model_runner.draw_on_device
    monkeypatch.setattr(DraftGraphs, "begin", lambda *given: seen.update(["on device"]) or begin(*given))
    monkeypatch.setattr(model_runner, "draw_on_device", lambda *given: seen.update(["ahead"]) or draw(*given))
    wanted = [TextParameters(tuple(range(5, 9 + i)), 30 + i, temperature=0, ignore_end=True) for i in range(8)]
    sampled = [replace(wanted[3], temperature=0.01, seed=5), replace(wanted[6], temperature=0.01)]
    with ruled(monkeypatch, lookahead, **options) as (engine, runner):
        made = stage.answers(engine, [*wanted, *sampled])
        assert runner.guessing.accepted > 100 and (drafter := runner.guessing.drafter) and drafter.graphs
        assert drafter.size_bytes > drafter.graphs.size_bytes > drafter.graphs.captured.shape[1]
    assert [text.tokens for text in made] == [by_rule(each) for each in [*wanted, *sampled]]
    assert min(seen["on device"], seen["ahead"]) > 3, seen


@pytest.mark.parametrize("sampled", [False, True], ids=["on the device", "on the host"])
def test_nan_behind_a_right_guess_fails_the_request_alone(monkeypatch: pytest.MonkeyPatch, sampled: bool) -> None:
    settings = {"temperature": 0.01, "seed": 5} if sampled else {"temperature": 0}
    wanted = [TextParameters(tuple(range(5, 9 + i)), 30, ignore_end=True, **settings) for i in range(3)]
    texts = [by_rule(each) for each in wanted]
    token = next(token for token in texts[1][12:] if token not in (*wanted[2].prompt, *texts[0], *texts[2]))
    with ruled(monkeypatch, 0, (WRONG, token), max_requests=4) as (engine, runner):
        futures = [stage.submit(engine, each, f"{i}") for i, each in enumerate(wanted)]
        with pytest.raises(FloatingPointError, match="returned NaN"):
            futures[1].result(timeout=300)
        assert [futures[i].result(timeout=300).tokens for i in (0, 2)] == [texts[0], texts[2]]
        assert runner.guessing.accepted > 10
