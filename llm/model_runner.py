"""Runs a model on the shares of one step: guesses, one forward of all rows, and the choice of next tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
from llm.sampling.choose import choose, draw_on_device, greedy_tokens
from llm.sampling.pending import PendingToken, PendingTokens
from llm.sampling.sample import likeliest
from llm.sampling.token_counts import TokenCounts
from llm.step import Reader, Share, Step, StepResult


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


class _UnderWay(NamedTuple):
    """A forward that was submitted, as far as the host is yet to wait for it or to choose its tokens."""

    shares: Sequence[Share]
    results: Sequence[StepResult]
    step: Step
    forward: Forward
    timer: _Timer
    ahead: bool  # the device draws its tokens, and the next step collects them
    verified: PendingTokens | None  # its most likely tokens and the numbers of right guesses


class StepHandle:
    """A step that was submitted. `shares` have the guesses that were made for them."""

    def __init__(self, runner: ModelRunner, shares: Sequence[Share], results: Sequence[StepResult]) -> None:
        self.shares, self.results = shares, results
        self.timings: list[Timing] = []  # of forwards that have ended
        self._runner = runner
        self.last: _UnderWay | None = None
        self.previous: Sequence[tuple[PendingTokens, _Timer]] = ()  # forwards of the step before

    @torch.inference_mode()
    def collect(self) -> Sequence[StepResult]:
        """Wait for the step's results, those of each share; of answers that run ahead for the tokens of the step
        before.
        """
        try:
            if (last := self.last) is not None:
                self.last = None
                self.timings += self._runner.finish(last)
        finally:  # also of a failed one: what it submitted may have replaced the latest tokens on the device
            self.wait()
        for share, result in zip(self.shares, self.results, strict=True):
            if (pending := share.sequence.pending) is not None:
                self._runner.prepend(result, pending)
        return self.results

    def wait(self) -> None:
        """Wait for the forwards of the step before."""
        self.timings[:0] = collected(self.previous)


class ModelRunner:
    """A model, and its draft if there is one. Called by one thread at a time.

    `score_rows` is how many tokens of prompts one forward gives log probabilities of: a step with more of them is
    several forwards, so that logits take bounded memory.
    """

    def __init__(self, backend: TextBackend, guessing: Speculator, *, ahead: bool = False) -> None:
        """`ahead`: a step is submitted to the device before the tokens of the one before are known here, where the
        device itself can draw all of its tokens.
        """
        self.backend = backend
        self.readers: Mapping[str, Reader] = {}  # of forwards, by the names that sequences use
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
        collected(self._submitted)
        self._submitted = []

    @torch.inference_mode()
    def __call__(self, shares: Sequence[Share]) -> StepHandle:
        """Submit a step's forwards. Waits for the device only between several of them."""
        shares = self._guessing.make(shares)
        handle = StepHandle(self, shares, [StepResult() for _ in shares])
        handle.previous, self._submitted = self._submitted, []
        try:
            *others, last = self._runs(shares)
            for run in others:
                if (under_way := self._submit(shares[run], handle.results[run])) is not None:
                    handle.timings += self.finish(under_way)
                    del under_way  # its logits are freed before the next forward's are there
            handle.last = self._submit(shares[last], handle.results[last])
        except BaseException:
            handle.wait()
            raise
        return handle

    def _runs(self, shares: Sequence[Share]) -> Iterator[slice]:
        """The shares of each forward, of which there is one unless many logits are read."""
        first = scored = 0
        for i, share in enumerate(shares):
            count = 0
            for name in share.sequence.uses:
                if (reader := self.readers.get(name)) is not None and not reader.reads_states:
                    count += len(reader.places(share))
            if scored and scored + count > self.score_rows:
                yield slice(first, i)
                first, scored = i, 0
            scored += count
        yield slice(first, len(shares))

    # -- submit: a forward, and what the device does behind it without the host -----------------------------------

    def _submit(self, shares: Sequence[Share], results: Sequence[StepResult]) -> _UnderWay | None:
        """Submit the forward of these shares; None where last tokens alone are waited for."""
        step = Step.of(shares, results, self.readers)
        if not (rows := len(step.tokens.tokens)):
            return None
        timer = _Timer(self.backend.model.device, rows)
        forward, verified = self._forward(step, timer), None
        if ahead := self._runs_ahead(step):
            self._submitted.append((self._draw(step, forward), timer))
            timer.stop()
            self._guessing.read(shares, results, forward)
        elif (verification := self._guessing.verify(step, forward)) is not None:
            verified, guess = verification
            timer.stop()
            guess()  # from what the device knows, while the host takes in the tokens
        return _UnderWay(shares, results, step, forward, timer, ahead, verified)

    def _forward(self, step: Step, timer: _Timer) -> Forward:
        """Submit the forward; the masks of its grammars are computed beside it, as far as time allows."""
        matchers = [matcher for part in step.sampled if (matcher := part.sequence.matcher) is not None]
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
        if not self._ahead or step.logits:
            return False
        return all(part.sequence.drawn_on_device and not part.sequence.guessable for part in step.sampled)

    def _draw(self, step: Step, forward: Forward) -> PendingTokens:
        """Draw the step's tokens on the device, for the next step to collect."""
        best = likeliest(forward.logits) if forward.best is None else forward.best
        pending = draw_on_device(forward.logits, step.sampled, best, self._counts)
        if step.tokens.logits or forward.best is None:  # else the device itself has kept the most likely ones
            self.backend.keep(step.tokens, pending.on_device)
        for part in step.sampled:
            part.result.pending = PendingToken(pending, part.first)
        return pending

    # -- finish: what the host waits for ---------------------------------------------------------------------------

    def finish(self, under_way: _UnderWay) -> list[Timing]:
        """Fill in the results of a forward; returns its timing, unless the next step collects it."""
        shares, results, step, forward, timer, ahead, verified = under_way
        if verified is not None:
            self._accept(step, verified.wait())
        elif not ahead:
            self._choose(step, forward)
            timer.stop()
        if not ahead:
            self._guessing.read(shares, results, forward)
        if forward.states is not None:
            self._read_states(step, forward.states)
        return [] if ahead else [timer.timing()]

    def prepend(self, result: StepResult, pending: PendingToken) -> None:
        """Put a share's token that was pending before those of this step."""
        if (token := pending.token) < 0:
            result.error = self._nan()
        result.tokens = (token,) if result.tokens is None else (token, *result.tokens)
        if logprobs := pending.step.logprobs(pending.row):
            result.logprobs = (*logprobs, *result.logprobs)

    def _choose(self, step: Step, forward: Forward) -> None:
        """Wait for the logits, have them read, and choose the tokens after them."""
        logits, sampled = forward.logits, []
        for part in self._guessing.fetch(step, forward):
            if part.sequence.matcher is not None and not part.sequence.matcher.ready:
                part.result.tokens = ()
            else:
                sampled.append(part)
        best = greedy_tokens(logits, sampled, forward.best)
        nan = {row for row, token in enumerate(best) if token < 0}
        for reader, share, result, rows in step.logits:  # before `choose`, which overwrites logits
            if nan.isdisjoint(range(*rows.indices(len(best)))):
                reader.fill(share, result, logits[rows])
            else:
                result.error = self._nan()
        if nan:
            for part in sampled:
                if part.first in nan:
                    part.result.error = self._nan()
            # Nobody uses rows behind a wrong guess; which these are is known once tokens are chosen.
            logits[sorted(nan)] = 0
            best = [max(0, token) for token in best]
        sampled = [part for part in sampled if part.result.error is None]
        for part, chosen in zip(sampled, choose(logits, sampled, best, self._counts), strict=True):
            result = part.result
            if isinstance(chosen, Invalid):
                result.error = chosen
            elif not nan.isdisjoint(part.rows[: len(chosen.tokens)]):
                result.error = self._nan()
            else:
                result.tokens, result.logprobs = chosen
                result.accepted = len(chosen.tokens) - 1

    def _accept(self, step: Step, known: Sequence[int]) -> None:
        """Take the tokens of greedy shares from the most likely ones, and the numbers of right guesses behind them."""
        counts = iter(known[len(step.tokens.output_rows) :])
        for part in step.sampled:
            result, right = part.result, next(counts) if part.guess.tokens else 0
            result.tokens, result.accepted = known[part.first : part.first + right + 1], right
            if min(result.tokens) < 0:
                result.error = self._nan()

    def _read_states(self, step: Step, states: Tensor) -> None:
        """Have the forward's hidden states read; shares whose states are not finite get an error."""
        states = states.float().cpu()
        finite = states.isfinite().all(-1)
        for reader, share, result, rows in step.states:
            if bool(finite[rows].all()):
                reader.fill(share, result, states[rows])
            else:
                result.error = self._nan()

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


def collected(submitted: Sequence[tuple[PendingTokens, _Timer]]) -> list[Timing]:
    """Wait for forwards' tokens; returns their timings."""
    for tokens, _ in submitted:
        tokens.wait()
    return [timer.timing() for _, timer in submitted]


def _compute(matchers: Sequence[GrammarMatcher], enough: threading.Event) -> None:
    """Compute masks until it is enough, at least one of them.

    Never beside the commit of an iteration: an answer that advances would wait, holding the GIL, for the mask of
    another one with its grammar, since both share a lexer.
    """
    for matcher in matchers:
        matcher.compute()
        if enough.is_set():
            return
