"""Runs a model on one iteration's tokens: guesses, one forward of all rows, and the choice of next tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from contract.errors import Invalid
from core.failures import NotFinite
from core.kernels.kv_cache import PAGE, TokenBatch
from llm.backends.backend import TextBackend
from llm.backends.forward import Forward
from llm.drafts.speculator import Speculator
from llm.grammars.constrain import GrammarMatcher
from llm.parts import ScheduledTokens, Step, gather_step
from llm.sampling.choose import choose, draw_on_device, greedy_tokens, prompt_logprobs
from llm.sampling.pending import PendingTokens
from llm.sampling.sample import likeliest
from llm.sampling.token_counts import TokenCounts


class Timing(NamedTuple):
    """Rows and seconds of a forward, and of these the seconds in which it had ended, but masks had not."""

    rows: int
    seconds: float
    masks_s: float


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

    def __init__(self, backend: TextBackend, guessing: Speculator, *, ahead: bool = False) -> None:
        """`ahead`: an iteration is submitted to the device before the tokens of the one before are known here, where
        the device itself can draw all of its tokens.
        """
        self.backend = backend
        self._guessing = guessing
        self._ahead = ahead
        model, rows = backend.model, len(backend.cache.table)
        self._counts = TokenCounts(model.vocabulary, model.device, rows=rows)
        self._submitted: list[tuple[PendingTokens, _Timer]] = []  # forwards whose tokens are to be collected
        least, most = _SCORE_ROWS
        self.score_rows = max(least, min(most, _SCORE_BYTES // (4 * model.vocabulary)))
        self._masks = ThreadPoolExecutor(1, "masks")  # of grammars: computed beside the forward
        # Starts its thread now, not when memory may be short.
        self._masks.submit(_compute, (), threading.Event()).result()

    def close(self) -> None:
        """End the thread that computes masks, and wait for what still runs: it writes to memory that is freed next."""
        self._masks.shutdown()
        self._collect(self._submitted)
        self._submitted = []

    @torch.inference_mode()
    def __call__(self, parts: Sequence[ScheduledTokens]) -> list[Timing]:
        """Submit an iteration's forwards, then collect the tokens of those that the iteration before submitted.

        Results are in the parts; returns the timings of the forwards that have ended.
        """
        self._guessing.make(parts)
        previous, self._submitted = self._submitted, []
        timings: list[Timing] = []
        try:
            for run in self._runs(parts):
                timings += self._forward(parts[run])
        finally:  # also of a failed one: what it submitted may have replaced the latest tokens on the device
            timings[:0] = self._collect(previous)
        for part in parts:
            if (pending := part.work.pending) is not None:
                self._prepend(part, pending)
        return timings

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

    def _forward(self, parts: Sequence[ScheduledTokens]) -> list[Timing]:
        """Compute these parts; returns the forward's timing, unless it is one to collect."""
        step = gather_step(parts)
        if not (rows := len(step.tokens.tokens)):  # last tokens alone are waited for
            return []
        timer = _Timer(self.backend.model.device, rows)
        forward = self._submit(step, timer)
        verified = None
        if ahead := self._runs_ahead(step):
            self._submitted.append((self._draw(step, forward), timer))
        elif (verified := self._guessing.verify(step, forward)) is None:
            self._guessing.fetch(step, forward)
            self._choose(step, forward)
        timer.stop()
        if verified is not None:
            tokens, guess = verified
            guess()  # from what the device knows, while the host takes in the tokens
            self._accept(step, tokens.wait())
        self._guessing.read(parts, forward)
        if forward.states is not None:
            self._pool(step, forward.states)
        return [] if ahead else [timer.timing()]

    def _submit(self, step: Step, timer: _Timer) -> Forward:
        """Submit the forward; the masks of its grammars are computed beside it, as far as time allows."""
        matchers = [matcher for part in step.sampled if (matcher := part.work.matcher) is not None]
        if not matchers:
            return self.backend.forward(step.tokens)
        enough = threading.Event()
        masks = self._masks.submit(_compute, matchers, enough)
        try:
            return self.backend.forward(step.tokens)
        finally:
            computed = timer.now()
            wait([masks], _MASKS_S)
            enough.set()
            masks.result()
            timer.waited(computed)

    def _runs_ahead(self, step: Step) -> bool:
        """Return whether the device alone can draw all tokens of the step, and the host need not know any to guess."""
        if not self._ahead or step.scored:
            return False
        return all(part.work.drawn_on_device and not part.work.guessable for part in step.sampled)

    def _draw(self, step: Step, forward: Forward) -> PendingTokens:
        """Draw the step's tokens on the device, for the next iteration to collect."""
        best = likeliest(forward.logits) if forward.best is None else forward.best
        pending = draw_on_device(forward.logits, step.sampled, best, self._counts)
        if forward.best is None or not all(part.work.plain for part in step.sampled):  # else these are the latest
            self.backend.keep(step.tokens, pending.on_device)
        for part in step.sampled:
            part.pending = pending
        return pending

    # -- collect: what the host waits for --------------------------------------------------------------------------

    def _collect(self, submitted: Sequence[tuple[PendingTokens, _Timer]]) -> list[Timing]:
        """Wait for forwards' tokens; returns their timings."""
        for tokens, _ in submitted:
            tokens.wait()
        return [timer.timing() for _, timer in submitted]

    def _prepend(self, part: ScheduledTokens, pending: PendingTokens) -> None:
        """Put the token that was pending before those of this iteration."""
        row = part.work.pending_row
        if (token := pending.at(row)) < 0:
            part.error = self._nan()
        part.tokens = (token,) if part.tokens is None else (token, *part.tokens)
        if logprobs := pending.logprobs(row):
            part.logprobs = (*logprobs, *part.logprobs)

    def _choose(self, step: Step, forward: Forward) -> None:
        """Wait for the logits, and choose the tokens after them; prompts are scored."""
        logits = forward.logits
        for part in step.sampled:
            if part.work.matcher is not None and not part.work.matcher.ready:
                part.tokens = ()
        sampled = [part for part in step.sampled if part.tokens is None]
        best = greedy_tokens(logits, sampled, forward.best)
        nan = {row for row, token in enumerate(best) if token < 0}
        for part, where in step.scored:  # before `choose`, which overwrites logits
            if nan.isdisjoint(range(*where.indices(len(best)))):
                part.scores = prompt_logprobs(logits[where], part)
            else:
                part.error = self._nan()
        if nan:
            for part in sampled:
                if part.first in nan:
                    part.error = self._nan()
            # Nobody uses rows behind a wrong guess; which these are is known once tokens are chosen.
            logits[sorted(nan)] = 0
            best = [max(0, token) for token in best]
        sampled = [part for part in sampled if part.error is None]
        for part, chosen in zip(sampled, choose(logits, sampled, best, self._counts), strict=True):
            if isinstance(chosen, Invalid):
                part.error = chosen
            elif not nan.isdisjoint(part.rows[: len(chosen.tokens)]):
                part.error = self._nan()
            else:
                part.tokens, part.logprobs = chosen

    def _accept(self, step: Step, known: Sequence[int]) -> None:
        """Take the tokens of greedy parts from the most likely ones, and the numbers of right guesses behind them."""
        counts = iter(known[len(step.tokens.output_rows) :])
        for part in step.sampled:
            right = next(counts) if part.guess.tokens else 0
            part.tokens = known[part.first : part.first + right + 1]
            if min(part.tokens) < 0:
                part.error = self._nan()

    def _pool(self, step: Step, states: Tensor) -> None:
        """Pool the forward's hidden states; prompts whose states are not finite get an error."""
        states = states.float().cpu()
        finite = states.isfinite().all(-1)
        for part, rows in step.pooled:
            if bool(finite[rows].all()):
                part.pooled = part.work.pooled.plus(states[rows])
            else:
                part.error = self._nan()

    def _nan(self) -> NotFinite:
        model = self.backend.model
        return NotFinite(f"{model.name} in {model.precision}")

    # -- before it serves ------------------------------------------------------------------------------------------

    def time_widths(self, widths: Sequence[int], *, sequences: int, until: float) -> Iterator[tuple[int, float]]:
        """Time forwards of so many rows, until a moment of `time.monotonic`; yields (rows, seconds), twice a width.

        Each has a row of as many sequences as there may be; beyond these the first ones read prompts.
        """
        longest = min(_PROMPT, self.backend.cache.table.shape[1] * PAGE)
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
                forward = self.backend.forward(step)
                greedy_tokens(forward.logits, [], forward.best)  # waits for the device
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
