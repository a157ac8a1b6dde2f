"""Measures rounds of speculation at an assumed acceptance: `python -m benchmarks.text_drafts`.

A round is a draft's guesses and their verification in one forward of the model. Drafts have the published shapes of
DFlash and EAGLE-3 and random weights, which guess nothing right: `AssumedAcceptance` takes the place of comparing
guesses with the model's tokens. What is measured is the speed that such an acceptance would give, not whether a trained
draft reaches it. One user writes greedily through the engine, with each draft and without one, on a GPU each in a
process of its own. Times of the draft's graph and of the verification are means of consecutive calls, by the device.
`--device cpu --tiny` rehearses it.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import command, provenance, record
from benchmarks.harness.timing import sustained
from benchmarks.text_load import Load, LoadGenerator
from core.batching.engine import Engine
from core.batching.runner import Lane
from core.kernels.kv_cache import TokenBatch
from llm.cache.pages import PAGE
from llm.checkpoints.load import TextModel, load
from llm.checkpoints.quantized import quantize
from llm.drafts import dflash, draft_graphs, eagle
from llm.drafts.block_drafter import BlockDraft
from llm.drafts.draft_graphs import Verified
from llm.drafts.drafter import DrafterFactory
from llm.drafts.eagle_drafter import EagleDraft
from llm.drafts.speculate import NO_TOKEN, DraftLengths
from llm.families import tiny
from llm.lane import StreamLane
from llm.runner import TextRunner
from llm.sampling import choose

NONE, DFLASH, EAGLE = "none", "DFlash", "EAGLE-3"
_LOAD, _TINY_LOAD = Load(1, 128, 512, waves=3), Load(1, 16, 24, waves=1)
_REQUESTS, _CONTEXT, _ROWS = 4, 1024, 512  # a runner's most
_WARM_TOKENS, _REPEATS, _ROUNDS = 32, 50, 4096  # what is assumed repeats after so many rounds
_LAYERS, _BLOCK, _WORDS = 5, 16, 32_000  # DFlash's layers and block, and EAGLE-3's vocabulary, as published for Llama's
_FIRST_TOKEN = 3  # before it are control tokens


class AssumedAcceptance:
    """Stands in for `agreed` and `agreeing` of `llm.drafts.speculate`: so many guesses are right, whatever they are."""

    def __init__(self, device: torch.device) -> None:
        self._counts: Iterator[int] = cycle([0])
        self._right = torch.zeros(_ROUNDS, dtype=torch.int64, device=device)  # by round
        self._round = torch.zeros(1, dtype=torch.int64, device=device)

    def assume(self, counts: Sequence[int]) -> None:
        """Assume so many right guesses, in each round from the next one on, over and over."""
        self._counts = cycle(counts)
        self._right.copy_(torch.from_numpy(np.resize(counts, _ROUNDS)))
        self._round.zero_()

    def agreed(self, guesses: Sequence[int], best: Sequence[int]) -> list[int]:
        """The model's own tokens at the places of the right guesses, and behind them."""
        return [*best[: 1 + (min(next(self._counts), len(guesses)) if guesses else 0)]]

    def agreeing(self, guesses: Tensor, best: Tensor) -> Tensor:
        """How many of each answer's guesses [n, k] are right: int64 [n]."""
        right = torch.minimum(self._right.index_select(0, self._round), (guesses != NO_TOKEN).sum(1))
        self._round.add_(1).remainder_(_ROUNDS)
        return right


class Case(NamedTuple):
    """So many guesses a round, of which so many are assumed to be right, by round."""

    name: str = "without guesses"
    guesses: int = 0
    right: Sequence[int] = (0,)


def geometric(probability: float) -> list[int]:
    """How many guesses precede the first wrong one, by round, where each is right with this probability."""
    uniform = ((0.5 + i * (5**0.5 - 1) / 2) % 1.0 for i in range(_ROUNDS))  # spread evenly
    return [int(math.log(max(1e-9, u)) / math.log(probability)) for u in uniform]


CASES = {
    NONE: [Case()],
    DFLASH: [Case(), *(Case(f"{_BLOCK - 1}, {n} tokens a round", _BLOCK - 1, [n - 1]) for n in (5, 6, 7))],
    EAGLE: [Case(), *(Case(f"{k}, each right with 0.8", k, geometric(0.8)) for k in (3, 6, 7))],
}


def drawn(model: TextModel, draft: str) -> DrafterFactory:
    """A draft of the published shape for the model, with seeded random weights."""
    from transformers import LlamaConfig, Qwen3Config

    def layers(published: Iterable[int]) -> tuple[int, ...]:
        return tuple(layer if 0 <= layer < model.layers - 1 else 0 for layer in published)  # a tiny model lacks some

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    fields: dict[str, Any] = {name: getattr(model.config, name) for name in names} | {"head_dim": model.head_dim}
    qwen3 = Qwen3Config(**fields, num_hidden_layers=_LAYERS)
    llama = LlamaConfig(**fields, num_hidden_layers=1, draft_vocab_size=min(_WORDS, model.vocabulary))
    torch.manual_seed(0)
    with model.device:
        network: Any = eagle.EagleNetwork(llama, layers(eagle.sources_of({}, model.layers)))
        if draft == DFLASH:
            network = dflash.DFlashNetwork(qwen3, layers(dflash.target_layers(model.layers, _LAYERS)))
    network.to(model.device, model.dtype).eval().requires_grad_(False)
    block = dflash.Checkpoint(network, _BLOCK, _FIRST_TOKEN)
    return BlockDraft(draft, block) if draft == DFLASH else EagleDraft(draft, network)


def graphs_ms(runner: TextRunner, guesses: int, position: int) -> tuple[float | None, float]:
    """Milliseconds of the draft's graph, if there is one, and of verifying so many guesses behind a position."""
    execution, drafter = runner.execution, runner.guessing.drafter
    execution.cache.place(0, [*range(1, 2 + (position + 2 * guesses + 2) // PAGE)])
    rows = [*range(guesses + 1)]
    step = TokenBatch.of([_FIRST_TOKEN] * len(rows), [position + row for row in rows], [0] * len(rows), rows)
    with torch.inference_mode():
        verify_ms = sustained(partial(execution.forward, step), _REPEATS)
        if not guesses or drafter is None or drafter.graphs is None:
            return None, verify_ms
        begun = drafter.graphs.begin([Verified(0, 0, 0, position, guesses, guesses)])
        return begun and sustained(begun[1], _REPEATS), verify_ms


def measure(runner: TextRunner, lane: Lane, load: Load, assumed: AssumedAcceptance, case: Case) -> dict[str, Any]:
    """One case's figures, of the requests of a load, one after another."""
    guessing = runner.guessing
    only = DraftLengths(np.where(np.arange(case.guesses + 2) == case.guesses, 1.0, np.inf))  # no other number pays off
    guessing.lengths = lambda decoding: only  # type: ignore[method-assign]
    with Engine([runner]) as engine:
        generator = LoadGenerator(engine, runner.model.vocabulary, 0.0)
        generator.run(load, 1, min(_WARM_TOKENS, load.written))
        lane.call(lambda: assumed.assume(case.right))
        accepted = guessing.accepted
        times = generator.run(load, load.waves, load.written)
    later = load.waves * (load.written - 1)  # tokens, all but each answer's first
    rounds = later - (guessing.accepted - accepted)
    draft_ms, verify_ms = lane.call(lambda: graphs_ms(runner, case.guesses, load.given + load.written // 2))
    return {
        "guesses": case.name, "tokens_s": round(load.waves * load.written / times.seconds, 1),
        "tokens_a_round": round(later / rounds, 3),
        "round_ms": round(1e3 * (times.seconds - sum(times.first_s)) / rounds, 3),
        "draft_ms": draft_ms and round(draft_ms, 3), "verify_ms": round(verify_ms, 3),
    }  # fmt: skip


def run(options: Any, draft: str) -> tuple[dict[str, Any], set[str]]:
    """A draft's figures, and the files that this process has imported."""
    device, cuda = torch.device(options.device), options.device == "cuda"
    name, load_ = (tiny.TINY, _TINY_LOAD) if options.tiny else (tiny.LLAMA_8B, _LOAD)
    lane = StreamLane("text", device) if cuda else Lane("text")

    def ready() -> tuple[TextRunner, AssumedAcceptance]:
        model = load(name, precision="bf16" if cuda else "fp32", device=options.device)
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(_FIRST_TOKEN, model.vocabulary, (4, 256), generator=draw).tolist()
        model = quantize(model, prompts) if cuda else model
        own = None if draft == NONE else drawn(model, draft)
        runner = TextRunner(model, lane=lane, draft=own, max_requests=_REQUESTS, context=_CONTEXT, max_rows=_ROWS)
        return runner, AssumedAcceptance(device)

    runner, assumed = lane.call(ready)
    rows = []
    try:
        with patch.object(choose, "agreed", assumed.agreed), patch.object(draft_graphs, "agreeing", assumed.agreeing):
            runner.prepare()
            for case in CASES[draft]:
                rows.append({"draft": draft, **measure(runner, lane, load_, assumed, case)})
                record.progress(f"{rows[-1]}")
    finally:
        runner.close()
        lane.close()
    figures = {"model": runner.model.name, "precision": runner.model.precision, "load": load_.name, "drafts": rows}
    return figures, provenance.loaded()


def main(arguments: Sequence[str] | None = None) -> int:
    options = command.parser("text_drafts", __doc__).parse_args(arguments)
    rows, imported = list[dict[str, Any]](), set[str]()
    own = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with record.alone(), own:
        for figures, files in (own.map if options.device == "cuda" else map)(partial(run, options), CASES):
            rows, imported = rows + figures["drafts"], imported | files
            last = len(rows) == sum(map(len, CASES.values()))
            record.publish("text-drafts", {**figures, "drafts": rows}, options.results, imported=imported, verbose=last)
    record.table("one user, random drafts, acceptance assumed", [*rows[0]], [[*row.values()] for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
