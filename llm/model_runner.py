"""Runs a model on one iteration's tokens: guesses, one forward of all rows, and the choice of next tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from core.kernels.kv_cache import TokenBatch
from llm.choose import SampledTokens, choose, greedy_tokens
from llm.constrain import GrammarMatcher
from llm.execution import TextExecution
from llm.parts import ScheduledTokens, gather_step
from llm.speculate import DraftTokens
from llm.speculator import Speculator


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The results of an iteration, by part: next tokens, None where none was wanted, or an error."""

    outcomes: list[SampledTokens | BaseException | None]
    guesses: list[DraftTokens]
    rows: int
    seconds: float  # without making guesses, which is timed separately


class ModelRunner:
    """A model, and its draft if there is one. Called by one thread at a time."""

    def __init__(self, execution: TextExecution, guessing: Speculator) -> None:
        self.execution = execution
        self.executions = [execution] if guessing.draft is None else [execution, guessing.draft.execution]
        self._guessing = guessing
        self._masks = ThreadPoolExecutor(1, "masks")  # of grammars: computed beside the forward
        self._masks.submit(_compute, ()).result()  # starts its thread now, not when memory may be short

    def close(self) -> None:
        """End the thread that computes masks."""
        self._masks.shutdown()

    @torch.inference_mode()
    def __call__(self, parts: Sequence[ScheduledTokens]) -> StepResult:
        guesses = self._guessing.make(parts)
        started = time.perf_counter()
        outcomes, rows = self._forward(parts, guesses)
        return StepResult(outcomes, guesses, rows, time.perf_counter() - started)

    def _forward(
        self, parts: Sequence[ScheduledTokens], guesses: Sequence[DraftTokens]
    ) -> tuple[list[SampledTokens | BaseException | None], int]:
        step, sample_requests = gather_step(parts, guesses)
        matchers = [request.work.matcher for request in sample_requests.values() if request.work.matcher is not None]
        masks = self._masks.submit(_compute, matchers) if matchers else None
        try:
            logits = self.execution(step)
        finally:
            if masks is not None:
                masks.result()
        self._guessing.read_along(parts)
        outcomes: list[SampledTokens | BaseException | None] = [None] * len(parts)
        best = greedy_tokens(logits, list(sample_requests.values()), self.execution.best)
        good = list(sample_requests)
        if min(best, default=0) < 0:
            model = self.execution.model
            good = [i for i, request in sample_requests.items() if all(best[row] >= 0 for row in request.rows)]
            for i in sample_requests.keys() - good:
                outcomes[i] = FloatingPointError(f"{model.name} in {model.precision} returned NaN")
        for i, result in zip(good, choose(logits, [sample_requests[i] for i in good], best), strict=True):
            outcomes[i] = result
        return outcomes, len(step.tokens)

    def time_widths(self, widths: Sequence[int], *, sequences: int, until: float) -> Iterator[tuple[int, float]]:
        """Time forwards of so many rows, until a moment of `time.monotonic`; yields (rows, seconds), twice a width."""
        for width in widths:
            rows = [i % sequences for i in range(width)]
            step = TokenBatch.of([0] * width, [0] * width, rows, list(range(min(width, sequences))))
            for run in range(3):
                if time.monotonic() >= until:
                    return
                started = time.perf_counter()
                greedy_tokens(self.execution(step), [], self.execution.best)  # waits for the device
                if run:  # the first run is warm-up
                    yield width, time.perf_counter() - started


def _compute(matchers: Sequence[GrammarMatcher]) -> None:
    for matcher in matchers:
        matcher.compute()
