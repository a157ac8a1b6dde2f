"""Runs a model on one iteration's tokens: guesses, one forward of all rows, and the choice of next tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
class PartResult:
    """What an iteration computed for a part: its next tokens, None where there are none, or an error.

    Tokens are empty where the mask of a grammar was late: the part is to be run again. Of an answer that runs ahead,
    tokens are those of the iteration before, and this one's is `pending`.
    """

    guess: DraftTokens
    outcome: SampledTokens | BaseException | None = None
    pending: PendingToken | None = None
    scores: list[Logprob] = field(default_factory=list)  # of the prompt's tokens
    pooled: PooledStates | None = None  # of an embedded prompt, with what was pooled before
    features: Tensor | None = None  # for `Speculator.settle`


class Timing(NamedTuple):
    """Rows and seconds of a forward, and of these the seconds in which it had ended, but masks had not."""

    rows: int
    seconds: float
    masks_s: float


class StepResult(NamedTuple):
    """An iteration's results by part, and the timings of the forwards that have ended."""

    parts: list[PartResult]
    timings: list[Timing]


class _Timer:
    """The time that a forward of so many rows takes, from now on; by the device's clock on a GPU."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self._cuda = device.type == "cuda"
        self._rows = rows
        self._waits: list[tuple[Any, Any]] = []  # for masks
        self._start = self._end = self.now()

    def now(self) -> Any:
        """The time now; on a GPU that at which it has done all that was submitted before."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def waited(self, since: Any) -> None:
        """Count the time since then as that of masks."""
        self._waits.append((since, self.now()))

    def stop(self) -> None:
        self._end = self.now()

    def timing(self) -> Timing:
        """Wait for the forward's end."""
        if self._cuda:
            self._end.synchronize()
        masks_s = sum(self._between(*span) for span in self._waits)
        return Timing(self._rows, self._between(self._start, self._end), masks_s)

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
        self._submitted: list[tuple[PendingTokens, _Timer]] = []  # forwards whose tokens are to be collected
        least, most = _SCORE_ROWS
        self.score_rows = max(least, min(most, _SCORE_BYTES // (4 * execution.model.vocabulary)))
        self._masks = ThreadPoolExecutor(1, "masks")  # of grammars: computed beside the forward
        # Starts its thread now, not when memory may be short.
        self._masks.submit(_compute, (), threading.Event()).result()

    def close(self) -> None:
        """End the thread that computes masks, and wait for what still runs: it writes to memory that is freed next."""
        self._masks.shutdown()
        self._collect(self._submitted)
        self._submitted = []

    @torch.inference_mode()
    def __call__(self, parts: Sequence[ScheduledTokens]) -> StepResult:
        """Submit an iteration's forwards, then collect the tokens of those that the iteration before submitted."""
        results = [PartResult(guess) for guess in self._guessing.make(parts)]
        previous, self._submitted = self._submitted, []
        timings: list[Timing] = []
        try:
            for run in self._runs(parts):
                timings += self._forward(parts[run], results[run])
        finally:  # also of a failed one: what it submitted may have replaced the latest tokens on the device
            timings[:0] = self._collect(previous)
        for part, result in zip(parts, results, strict=True):
            if part.work.pending is not None:
                self._prepend(part.work.pending.known, result)
        return StepResult(results, timings)

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

    # -- submit: a forward, and tokens that the device draws -------------------------------------------------------

    def _forward(self, parts: Sequence[ScheduledTokens], results: Sequence[PartResult]) -> list[Timing]:
        """Compute these parts; returns the forward's timing, unless it is one to collect."""
        step = gather_step(parts, [result.guess for result in results])
        if not (rows := len(step.tokens.tokens)):  # last tokens alone are waited for
            return []
        timer = _Timer(self.execution.model.device, rows)
        logits = self._logits(step, timer)
        if ahead := self._runs_ahead(step):
            self._submitted.append((self._draw(step, logits, results), timer))
        else:
            self._choose(step, logits, results)
        timer.stop()
        outcomes = [result.outcome for result in results]
        guesses = [result.guess for result in results]
        for result, features in zip(
            results, self._guessing.read(parts, guesses, outcomes, self.execution.features), strict=True
        ):
            result.features = features
        if step.pooled:
            self._pool(step, parts, results)
        return [] if ahead else [timer.timing()]

    def _logits(self, step: Step, timer: _Timer) -> Tensor:
        """The forward's logits [L, V]; the masks of its grammars are computed beside it, as far as time allows."""
        works = (request.work for request in step.sampled.values())
        matchers = [work.matcher for work in works if work.matcher is not None]
        if not matchers:
            return self.execution(step.tokens)
        enough = threading.Event()
        masks = self._masks.submit(_compute, matchers, enough)
        try:
            return self.execution(step.tokens)
        finally:
            computed = timer.now()
            wait([masks], _MASKS_S)
            enough.set()
            masks.result()
            timer.waited(computed)

    def _runs_ahead(self, step: Step) -> bool:
        """Return whether the device alone can draw all tokens of the step."""
        return self._ahead and not step.scored and all(r.work.drawn_on_device for r in step.sampled.values())

    def _draw(self, step: Step, logits: Tensor, results: Sequence[PartResult]) -> PendingTokens:
        """Draw the step's tokens on the device, for the next iteration to collect."""
        best = self.execution.best
        tokens = draw_on_device(logits, [*step.sampled.values()], likeliest(logits) if best is None else best)
        if tokens is not best:
            self.execution.keep(step.tokens, tokens)
        pending = PendingTokens(tokens)
        for i, request in step.sampled.items():
            results[i].pending = PendingToken(pending, request.first)
        return pending

    # -- collect: what the host waits for --------------------------------------------------------------------------

    def _collect(self, submitted: Sequence[tuple[PendingTokens, _Timer]]) -> list[Timing]:
        """Wait for forwards' tokens; returns their timings."""
        for tokens, _ in submitted:
            tokens.wait()
        return [timer.timing() for _, timer in submitted]

    def _prepend(self, token: int, result: PartResult) -> None:
        """Put a token that was pending before those of this iteration."""
        if token < 0:
            result.outcome = self._nan()
        elif result.outcome is None:
            result.outcome = SampledTokens([token], [])
        elif isinstance(result.outcome, SampledTokens):
            result.outcome.tokens.insert(0, token)

    def _choose(self, step: Step, logits: Tensor, results: Sequence[PartResult]) -> None:
        """Wait for the logits, and choose the tokens after them; prompts are scored."""
        for i, request in step.sampled.items():
            if request.work.matcher is not None and not request.work.matcher.ready:
                results[i].outcome = SampledTokens([], [])
        sampled = {i: request for i, request in step.sampled.items() if results[i].outcome is None}
        best = greedy_tokens(logits, [*sampled.values()], self.execution.best)
        if min(best, default=0) < 0:
            rows = [(i, request.rows) for i, request in sampled.items()]
            for i, its_rows in rows + [(i, request.rows) for i, request in step.scored.items()]:
                if any(best[row] < 0 for row in its_rows):
                    results[i].outcome = self._nan()
            sampled = {i: request for i, request in sampled.items() if results[i].outcome is None}
        for i, score_request in step.scored.items():  # before `choose`, which overwrites logits
            if results[i].outcome is None:
                results[i].scores = score_request.logprobs(logits)
        for i, outcome in zip(sampled, choose(logits, [*sampled.values()], best), strict=True):
            results[i].outcome = outcome

    def _pool(self, step: Step, parts: Sequence[ScheduledTokens], results: Sequence[PartResult]) -> None:
        """Pool the forward's hidden states; prompts whose states are not finite get an error."""
        assert self.execution.states is not None
        states = self.execution.states.float().cpu()
        finite = states.isfinite().all(-1)
        for i, rows in step.pooled.items():
            if bool(finite[rows].all()):
                results[i].pooled = parts[i].work.pooled.plus(states[rows])
            else:
                results[i].outcome = self._nan()

    def _nan(self) -> FloatingPointError:
        model = self.execution.model
        return FloatingPointError(f"{model.name} in {model.precision} returned NaN")

    # -- before it serves ------------------------------------------------------------------------------------------

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
