"""Runs a model on one iteration's tokens: guesses, one forward of all rows, and the choice of next tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from core.kernels.kv_cache import PAGE, TokenBatch
from llm.choose import SampledTokens, choose, draw_on_device, greedy_tokens
from llm.constrain import GrammarMatcher
from llm.execution import TextExecution
from llm.parameters import Logprob
from llm.parts import ScheduledTokens, gather_step
from llm.sample import likeliest
from llm.sequence import PendingToken, PendingTokens
from llm.speculate import DraftTokens
from llm.speculator import Speculator


@dataclass(slots=True, eq=False)
class StepResult:
    """The results of an iteration, by part: next tokens, None where there are none, or an error.

    Of one that runs ahead these are pending tokens of the iterations before; its own are in `pending`.
    """

    outcomes: list[SampledTokens | BaseException | None]
    guesses: list[DraftTokens]
    scores: list[list[Logprob]]  # of prompts' tokens
    pending: list[PendingToken | None]
    timings: list[tuple[int, float]]  # rows and seconds of iterations that ended, without making guesses


_SCORE_BYTES = 64 * 2**20  # of the logits of prompts' tokens in one forward
_SCORE_ROWS = 16, 256  # at least and at most
_PROMPT = 128  # tokens, in forwards that are timed


class ModelRunner:
    """A model, and its draft if there is one. Called by one thread at a time.

    `score_rows` is how many tokens of prompts one forward gives log probabilities of: an iteration with more of them is
    several forwards, so that logits take bounded memory.
    """

    def __init__(self, execution: TextExecution, guessing: Speculator, *, ahead: bool = False) -> None:
        """`ahead`: an iteration is submitted to the device before the tokens of the one before are known here, where
        the device itself can draw all of its tokens.
        """
        self.execution = execution
        self.executions = [execution] if guessing.draft is None else [execution, guessing.draft.execution]
        self._guessing = guessing
        self._ahead = ahead
        self._landed_at = 0.0  # when the last iteration ended
        least, most = _SCORE_ROWS
        self.score_rows = max(least, min(most, _SCORE_BYTES // (4 * execution.model.vocabulary)))
        self._masks = ThreadPoolExecutor(1, "masks")  # of grammars: computed beside the forward
        self._masks.submit(_compute, ()).result()  # starts its thread now, not when memory may be short

    def close(self) -> None:
        """End the thread that computes masks."""
        self._masks.shutdown()

    @torch.inference_mode()
    def __call__(self, parts: Sequence[ScheduledTokens]) -> StepResult:
        guesses = self._guessing.make(parts)
        started = time.perf_counter()
        result = StepResult([], guesses, [], [None] * len(parts), [])
        rows = 0
        try:
            for run in self._runs(parts):
                outcomes, scores, run_rows = self._forward(parts[run], guesses[run], result, run.start, started)
                result.outcomes += outcomes
                result.scores += scores
                rows += run_rows
        finally:  # also of a failed one: what it submitted may have replaced the latest tokens on the device
            self._land(parts, result)
        if rows and not any(result.pending):
            landed_at = time.perf_counter()
            result.timings.append((rows, landed_at - max(started, self._landed_at)))
            self._landed_at = landed_at
        for i, part in enumerate(parts):
            if (pending := part.work.pending) is not None:
                token, outcome = pending.known, result.outcomes[i]
                result.outcomes[i] = (
                    SampledTokens([token], []) if outcome is None and token >= 0 else self._joined(token, outcome)
                )
        return result

    def _land(self, parts: Sequence[ScheduledTokens], result: StepResult) -> None:
        """Wait for the parts' pending tokens."""
        for step in {token.step: None for part in parts if (token := part.work.pending) is not None}:
            if step.known is None:
                step.wait()
                landed_at = time.perf_counter()
                result.timings.append((step.rows, landed_at - max(step.launched_at, self._landed_at)))
                self._landed_at = landed_at

    def _joined(
        self, token: int, outcome: SampledTokens | BaseException | None
    ) -> SampledTokens | BaseException | None:
        """A pending token, and the tokens after it."""
        if token < 0:
            return self._not_finite()
        if isinstance(outcome, SampledTokens):
            outcome.tokens.insert(0, token)
        return outcome

    def _runs(self, parts: Sequence[ScheduledTokens]) -> Iterator[slice]:
        """The parts of each forward, of which there is one unless prompts are scored."""
        first = scored = 0
        for i, part in enumerate(parts):
            count = len(part.scored) if part.work.parameters.prompt_logprobs else 0
            if scored and scored + count > self.score_rows:
                yield slice(first, i)
                first, scored = i, 0
            scored += count
        yield slice(first, len(parts))

    def _forward(
        self,
        parts: Sequence[ScheduledTokens],
        guesses: Sequence[DraftTokens],
        result: StepResult,
        first: int,
        started: float,
    ) -> tuple[list[SampledTokens | BaseException | None], list[list[Logprob]], int]:
        """Compute these parts, the first of which is the iteration's `first`. Returns their outcomes, scores and rows,
        and puts tokens that are not waited for into `result.pending`.
        """
        outcomes: list[SampledTokens | BaseException | None] = [None] * len(parts)
        scores: list[list[Logprob]] = [[] for _ in parts]
        step, sample_requests, score_requests = gather_step(parts, guesses)
        if not len(step.tokens):
            return outcomes, scores, 0
        matchers = [request.work.matcher for request in sample_requests.values() if request.work.matcher is not None]
        masks = self._masks.submit(_compute, matchers) if matchers else None
        try:
            logits = self.execution(step)
        finally:
            if masks is not None:
                masks.result()
        self._guessing.read_along(parts)
        requests = list(sample_requests.values())
        if self._ahead and not score_requests and all(r.work.drawn_on_device and not r.guess.tokens for r in requests):
            best = self.execution.best
            tokens = draw_on_device(logits, requests, likeliest(logits) if best is None else best)
            if tokens is not best:
                self.execution.keep(step, tokens)
            pending = PendingTokens(tokens, len(step.tokens), started)
            for i, request in sample_requests.items():
                result.pending[first + i] = PendingToken(pending, request.first)
            return outcomes, scores, len(step.tokens)
        self._land(parts, result)  # or the wait below would be timed as theirs
        best_tokens = greedy_tokens(logits, requests, self.execution.best)
        good = list(sample_requests)
        if min(best_tokens, default=0) < 0:
            rows = [(i, request.rows) for i, request in sample_requests.items()]
            rows += [(i, request.rows) for i, request in score_requests.items()]
            bad = {i for i, request_rows in rows if any(best_tokens[row] < 0 for row in request_rows)}
            good = [i for i in sample_requests if i not in bad]
            for i in bad:
                outcomes[i] = self._not_finite()
        for i, score_request in score_requests.items():  # before `choose`, which overwrites logits
            if outcomes[i] is None:
                scores[i] = score_request.logprobs(logits)
        for i, chosen in zip(good, choose(logits, [sample_requests[i] for i in good], best_tokens), strict=True):
            outcomes[i] = chosen
        return outcomes, scores, len(step.tokens)

    def _not_finite(self) -> FloatingPointError:
        model = self.execution.model
        return FloatingPointError(f"{model.name} in {model.precision} returned NaN")

    def time_widths(self, widths: Sequence[int], *, sequences: int, until: float) -> Iterator[tuple[int, float]]:
        """Time forwards of so many rows, until a moment of `time.monotonic`; yields (rows, seconds), twice a width.

        Each has a row of as many sequences as there may be; beyond these the first ones read prompts.
        """
        longest = min(_PROMPT, self.execution.cache.table.shape[1] * PAGE)
        for width in widths:
            counts = [1] * min(width, sequences)
            for i in range(len(counts)):
                counts[i] += min(longest - 1, width - sum(counts))
            if sum(counts) < width:
                return
            rows = [i for i, count in enumerate(counts) for _ in range(count)]
            positions = [position for count in counts for position in range(count)]
            step = TokenBatch.of([0] * width, positions, rows, (np.cumsum(counts) - 1).tolist())
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
