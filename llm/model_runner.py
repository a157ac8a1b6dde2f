"""Runs a model on one iteration's tokens: guesses, one forward of all rows, and the choice of next tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.kernels.kv_cache import PAGE, TokenBatch
from llm.choose import SampledTokens, choose, draw_on_device, greedy_tokens
from llm.constrain import GrammarMatcher
from llm.execution import TextExecution
from llm.parameters import Logprob
from llm.parts import ScheduledTokens, Step, gather_step
from llm.pooling import PooledStates
from llm.sample import likeliest
from llm.sequence import PendingToken, PendingTokens
from llm.speculate import DraftTokens
from llm.speculator import Speculator


@dataclass(slots=True, eq=False)
class StepResult:
    """The results of an iteration, by part: next tokens, None where there are none, or an error. Tokens are empty where
    the mask of a grammar was too late: the part is to be run again.

    Of one that runs ahead these are pending tokens of the iterations before; its own are in `pending`.
    """

    guesses: list[DraftTokens]
    pending: list[PendingToken | None]
    outcomes: list[SampledTokens | BaseException | None] = field(default_factory=list)
    scores: list[list[Logprob]] = field(default_factory=list)  # of prompts' tokens
    pooled: list[PooledStates | None] = field(default_factory=list)  # of embedded prompts, with what was pooled before
    features: list[Tensor | None] = field(default_factory=list)  # for `Speculator.settle`
    # Of iterations that ended: rows, seconds, and of these those in which the forward had ended, and masks had not.
    timings: list[tuple[int, float, float]] = field(default_factory=list)


class _Timer:
    """Seconds of an iteration from its first forward on, by the device's clock on a GPU.

    `masks` are from when to when a forward had ended, and masks had not: nothing where the masks were first.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.masks: list[tuple[Any, Any]] = []
        self._start, self._end = self.now(), self.now()

    def now(self) -> Any:
        """The time now; on a GPU that at which it has done all that was submitted before."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        self._end = self.now()

    def seconds(self) -> tuple[float, float]:
        """The iteration's seconds, and those of them for masks. Waits for the end."""
        if self._cuda:
            self._end.synchronize()
        return self._between(self._start, self._end), sum(self._between(*span) for span in self.masks)

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self._cuda else float(end - start)


_MASKS_S = 0.01  # after a forward, until no further mask is begun
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
        self._guessing = guessing
        self._ahead = ahead
        self._flying: list[tuple[PendingTokens, int, _Timer]] = []  # an iteration that may still run, and its rows
        least, most = _SCORE_ROWS
        self.score_rows = max(least, min(most, _SCORE_BYTES // (4 * execution.model.vocabulary)))
        self._masks = ThreadPoolExecutor(1, "masks")  # of grammars: computed beside the forward
        # Starts its thread now, not when memory may be short.
        self._masks.submit(_compute, (), threading.Event()).result()

    def close(self) -> None:
        """End the thread that computes masks, and wait for what still runs: it writes to memory that is freed next."""
        self._masks.shutdown()
        for tokens, _, _ in self._flying:
            tokens.wait()
        self._flying = []

    @torch.inference_mode()
    def __call__(self, parts: Sequence[ScheduledTokens]) -> StepResult:
        guesses = self._guessing.make(parts)
        result = StepResult(guesses, [None] * len(parts))
        previous, self._flying = self._flying, []
        timer, rows = _Timer(self.execution.model.device), 0
        try:
            for run in self._runs(parts):
                step = gather_step(parts[run], guesses[run])
                outcomes, scores = self._forward(parts[run], step, run.start, result, timer)
                result.features += self._guessing.read(parts[run], guesses[run], outcomes, self.execution.features)
                result.pooled += self._pool(parts[run], step, outcomes)
                result.outcomes += outcomes
                result.scores += scores
                rows += len(step.tokens.tokens)
        finally:  # also of a failed one: what it submitted may have replaced the latest tokens on the device
            for tokens, count, ended in previous:
                tokens.wait()
                result.timings.append((count, *ended.seconds()))
        if rows and not self._flying:
            timer.stop()
            result.timings.append((rows, *timer.seconds()))
        for i, part in enumerate(parts):
            if (pending := part.work.pending) is not None:
                token, outcome = pending.known, result.outcomes[i]
                result.outcomes[i] = (
                    SampledTokens([token], []) if outcome is None and token >= 0 else self._joined(token, outcome)
                )
        return result

    def _joined(
        self, token: int, outcome: SampledTokens | BaseException | None
    ) -> SampledTokens | BaseException | None:
        """A pending token, and the tokens after it."""
        if token < 0:
            return self._nan()
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
        self, parts: Sequence[ScheduledTokens], step: Step, first: int, result: StepResult, timer: _Timer
    ) -> tuple[list[SampledTokens | BaseException | None], list[list[Logprob]]]:
        """Compute these parts, the first of which is the iteration's `first`. Returns their outcomes and scores, and
        puts tokens that are not waited for into `result.pending`.
        """
        outcomes: list[SampledTokens | BaseException | None] = [None] * len(parts)
        scores: list[list[Logprob]] = [[] for _ in parts]
        sample_requests, score_requests, rows = step.sampled, step.scored, len(step.tokens.tokens)
        if not rows:
            return outcomes, scores
        matchers = [request.work.matcher for request in sample_requests.values() if request.work.matcher is not None]
        enough = threading.Event()
        masks = self._masks.submit(_compute, matchers, enough) if matchers else None
        try:
            logits = self.execution(step.tokens)
        finally:
            if masks is not None:
                computed = timer.now()
                wait([masks], _MASKS_S)
                enough.set()
                masks.result()
                timer.masks.append((computed, timer.now()))
        requests = list(sample_requests.values())
        if self._ahead and not score_requests and all(request.work.drawn_on_device for request in requests):
            best = self.execution.best
            tokens = draw_on_device(logits, requests, likeliest(logits) if best is None else best)
            if tokens is not best:
                self.execution.keep(step.tokens, tokens)
            pending = PendingTokens(tokens)
            timer.stop()
            self._flying.append((pending, rows, timer))
            for i, request in sample_requests.items():
                result.pending[first + i] = PendingToken(pending, request.first)
            return outcomes, scores
        for i, request in [*sample_requests.items()]:
            if request.work.matcher is not None and not request.work.matcher.ready:
                outcomes[i] = SampledTokens([], [])
                del sample_requests[i]
        best_tokens = greedy_tokens(logits, list(sample_requests.values()), self.execution.best)
        good = list(sample_requests)
        if min(best_tokens, default=0) < 0:
            asked = [(i, request.rows) for i, request in sample_requests.items()]
            asked += [(i, request.rows) for i, request in score_requests.items()]
            bad = {i for i, request_rows in asked if any(best_tokens[row] < 0 for row in request_rows)}
            good = [i for i in sample_requests if i not in bad]
            for i in bad:
                outcomes[i] = self._nan()
        for i, score_request in score_requests.items():  # before `choose`, which overwrites logits
            if outcomes[i] is None:
                scores[i] = score_request.logprobs(logits)
        for i, chosen in zip(good, choose(logits, [sample_requests[i] for i in good], best_tokens), strict=True):
            outcomes[i] = chosen
        return outcomes, scores

    def _pool(
        self, parts: Sequence[ScheduledTokens], step: Step, outcomes: list[SampledTokens | BaseException | None]
    ) -> list[PooledStates | None]:
        """Pool the last forward's hidden states; prompts whose states are not finite get an error as outcome."""
        pooled: list[PooledStates | None] = [None] * len(parts)
        if not step.pooled:
            return pooled
        assert self.execution.states is not None
        states = self.execution.states.float().cpu()
        finite = states.isfinite().all(-1)
        for i, rows in step.pooled.items():
            if bool(finite[rows].all()):
                pooled[i] = parts[i].work.pooled.plus(states[rows])
            else:
                outcomes[i] = self._nan()
        return pooled

    def _nan(self) -> FloatingPointError:
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


def _compute(matchers: Sequence[GrammarMatcher], enough: threading.Event) -> None:
    """Compute masks until it is enough, at least one of them.

    Never beside the commit of an iteration: an answer that advances would wait, holding the GIL, for the mask of
    another one with its grammar, since both share a lexer.
    """
    for matcher in matchers:
        matcher.compute()
        if enough.is_set():
            return
