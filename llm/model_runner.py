"""Runs a model on one iteration's tokens: guesses, one forward of all rows, and the choice of next tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from core.kernels.kv_cache import TokenBatch
from llm.choose import SampledTokens, choose, greedy_tokens
from llm.constrain import GrammarMatcher
from llm.execution import TextExecution
from llm.parameters import Logprob
from llm.parts import ScheduledTokens, gather_step
from llm.speculate import DraftTokens
from llm.speculator import Speculator


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The results of an iteration, by part: next tokens, None where none was wanted, or an error.

    Tokens are empty where the mask of a grammar was too late: the part is to be run again.
    """

    outcomes: list[SampledTokens | BaseException | None]
    guesses: list[DraftTokens]
    scores: list[list[Logprob]]  # of prompts' tokens
    rows: int
    seconds: float  # without making guesses, which is timed separately
    masks_s: float  # of these, in which the forward had ended, and masks had not


_MASKS_S = 0.01  # after a forward, until no further mask is begun
_SCORE_BYTES = 64 * 2**20  # of the logits of prompts' tokens in one forward
_SCORE_ROWS = 16, 256  # at least and at most


class ModelRunner:
    """A model, and its draft if there is one. Called by one thread at a time.

    `score_rows` is how many tokens of prompts one forward gives log probabilities of: an iteration with more of them is
    several forwards, so that logits take bounded memory.
    """

    def __init__(self, execution: TextExecution, guessing: Speculator) -> None:
        self.execution = execution
        self.executions = [execution] if guessing.draft is None else [execution, guessing.draft.execution]
        self._guessing = guessing
        least, most = _SCORE_ROWS
        self.score_rows = max(least, min(most, _SCORE_BYTES // (4 * execution.model.vocabulary)))
        self._masks = ThreadPoolExecutor(1, "masks")  # of grammars: computed beside the forward
        # Starts its thread now, not when memory may be short.
        self._masks.submit(_compute, (), threading.Event()).result()
        self._waited_s = 0.0  # for masks after forwards, since the start

    def close(self) -> None:
        """End the thread that computes masks."""
        self._masks.shutdown()

    @torch.inference_mode()
    def __call__(self, parts: Sequence[ScheduledTokens]) -> StepResult:
        guesses = self._guessing.make(parts)
        started, waited_s = time.perf_counter(), self._waited_s
        outcomes: list[SampledTokens | BaseException | None] = []
        scores: list[list[Logprob]] = []
        rows = 0
        for run in self._runs(parts):
            run_outcomes, run_scores, run_rows = self._forward(parts[run], guesses[run])
            outcomes, scores, rows = outcomes + run_outcomes, scores + run_scores, rows + run_rows
        seconds = time.perf_counter() - started
        return StepResult(outcomes, guesses, scores, rows, seconds, self._waited_s - waited_s)

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
        self, parts: Sequence[ScheduledTokens], guesses: Sequence[DraftTokens]
    ) -> tuple[list[SampledTokens | BaseException | None], list[list[Logprob]], int]:
        step, sample_requests, score_requests = gather_step(parts, guesses)
        matchers = [request.work.matcher for request in sample_requests.values() if request.work.matcher is not None]
        enough = threading.Event()
        masks = self._masks.submit(_compute, matchers, enough) if matchers else None
        try:
            logits = self.execution(step)
        finally:
            if masks is not None:
                computed = time.perf_counter()
                wait([masks], _MASKS_S)
                enough.set()
                masks.result()
                self._waited_s += time.perf_counter() - computed
        self._guessing.read_along(parts)
        outcomes: list[SampledTokens | BaseException | None] = [None] * len(parts)
        for i, request in [*sample_requests.items()]:
            if request.work.matcher is not None and not request.work.matcher.ready:
                outcomes[i] = SampledTokens([], [])
                del sample_requests[i]
        best = greedy_tokens(logits, list(sample_requests.values()), self.execution.best)
        scores: list[list[Logprob]] = [[] for _ in parts]
        good = list(sample_requests)
        if min(best, default=0) < 0:
            model = self.execution.model
            rows = [(i, request.rows) for i, request in sample_requests.items()]
            rows += [(i, request.rows) for i, request in score_requests.items()]
            bad = {i for i, request_rows in rows if any(best[row] < 0 for row in request_rows)}
            good = [i for i in sample_requests if i not in bad]
            for i in bad:
                outcomes[i] = FloatingPointError(f"{model.name} in {model.precision} returned NaN")
        for i, score_request in score_requests.items():  # before `choose`, which overwrites logits
            if outcomes[i] is None:
                scores[i] = score_request.logprobs(logits)
        for i, result in zip(good, choose(logits, [sample_requests[i] for i in good], best), strict=True):
            outcomes[i] = result
        return outcomes, scores, len(step.tokens)

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


def _compute(matchers: Sequence[GrammarMatcher], enough: threading.Event) -> None:
    """Compute masks until it is enough, at least one of them.

    Never beside the commit of an iteration: an answer that advances would wait, holding the GIL, for the mask of
    another one with its grammar, since both share a lexer.
    """
    for matcher in matchers:
        matcher.compute()
        if enough.is_set():
            return
