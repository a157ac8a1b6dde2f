"""Speculative decoding for one runner: decides who gets how many guesses, has them made, and records the acceptance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from core.kernels.kv_cache import TokenBatch
from llm.backends.backend import TextBackend
from llm.backends.forward import Forward
from llm.drafts.draft_graphs import Verified
from llm.drafts.drafter import Drafter, DraftRequest
from llm.drafts.speculate import NO_GUESS, USUAL, AcceptanceRate, DraftLengths, DraftTokens, ForwardTimes
from llm.parts import ScheduledTokens, Step
from llm.sampling.pending import PendingTokens
from llm.sequence import SequenceState

_ROW = 0.03  # of a forward, for each guess, where measured times may not decide
_TIMED = 4  # guesses at a time, and times
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # of the forwards that are timed
_TIMED_S = 2.0
_AVERAGED, _FORGOTTEN = 0.02, 0.002  # weights of a guess in the average acceptance, and of a request that forgets it
_HELD = 64  # positions of a sequence whose features are kept until they are read


class Speculator:
    """A drafter, or off."""

    def __init__(self, drafter: Drafter | None = None) -> None:
        self.drafter = drafter
        self.guessed = self.accepted = 0  # tokens, since the start
        self._average = AcceptanceRate(rate=_AVERAGED)  # of all requests
        self._nominal = None if drafter is None else _nominal(drafter)
        self._times = ForwardTimes()
        self._lengths: dict[int, DraftLengths] = {}  # by the number of sequences
        self._draft_s = 0.0  # of a forward of the drafter for one sequence

    @property
    def active(self) -> bool:
        return self.drafter is not None

    @property
    def ahead(self) -> bool:
        """Return whether the device may begin guesses by itself."""
        return self.drafter is not None and self.drafter.graphs is not None

    @property
    def size_bytes(self) -> int:
        """Bytes of the drafter's weights and its cache."""
        return 0 if self.drafter is None else self.drafter.size_bytes

    def make(self, parts: Sequence[ScheduledTokens]) -> None:
        """Make the planned number of guesses for each part."""
        asking = []
        for part in parts:
            if part.work.guesses and part.work.guessed:
                part.guess = DraftTokens.on_device(min(part.work.guesses, part.work.guessed))
            elif part.work.guesses:
                asking.append(part)
        if self.drafter is None or not asking:
            return
        requests = [_request(part.work, part.start, part.work.guesses) for part in asking]
        started = time.perf_counter()
        for part, guess in zip(asking, self.drafter.guess(requests), strict=True):
            part.guess = guess
        if len(requests) == 1 and asking[0].guess.known:
            seconds = (time.perf_counter() - started) / (1 if self.drafter.at_once else requests[0].count)
            self._draft_s = min(self._draft_s or seconds, seconds)

    def verify(self, step: Step, forward: Forward) -> tuple[PendingTokens, Callable[[], object]] | None:
        """Submit the acceptance of the guesses of a step, behind its forward; returns its most likely tokens, with how
        many guesses of each part that has some were right, and what submits the next guesses.

        None: the host is to accept them. That is where tokens are not all the most likely ones.
        """
        guessed = [part for part in step.sampled if part.guess.tokens]
        graphs = None if self.drafter is None else self.drafter.graphs
        if graphs is None or not guessed or forward.best is None or not forward.recorded:
            return None
        if step.scored or not all(part.work.plain for part in step.sampled):
            return None
        rows, counts = step.tokens.output_rows.tolist(), [_next_guesses(part) for part in guessed]
        begun = graphs.begin([
            Verified(part.work.row, rows[part.first], part.first, part.start, len(part.guess.tokens), count)
            for part, count in zip(guessed, counts, strict=True)
        ])  # fmt: skip
        if begun is None:
            return None
        accepted, guess = begun
        pending = PendingTokens(torch.cat([forward.best, accepted]))
        if not any(counts):
            return pending, lambda: None
        for part, count in zip(guessed, counts, strict=True):
            part.next_guesses = count
        return pending, guess

    def fetch(self, step: Step, forward: Forward) -> None:
        """Let the host know guesses of a step which only the device knows."""
        if unknown := [part for part in step.sampled if not part.guess.known]:
            assert forward.tokens is not None
            tokens = forward.tokens.tolist()
            for part in unknown:
                first = int(step.tokens.output_rows[part.first]) + 1
                part.guess = DraftTokens(tokens[first : first + len(part.guess.tokens)])

    def read(self, parts: Sequence[ScheduledTokens], forward: Forward) -> None:
        """Have the drafter read the chunks of prompts that a forward has read. Parts get the features of their new
        positions that are yet to be read.
        """
        if self.drafter is None or not self.drafter.reads or all(part.next_guesses is not None for part in parts):
            return
        requests: list[DraftRequest] = []
        features = forward.features
        if features is not None and forward.recorded:  # the next forward's too
            features = features[: sum(part.count + len(part.guess.tokens) for part in parts)].clone()
        first = 0
        for part in parts:
            start, work, unread = part.start, part.work, part.count
            if self._reads(part):
                unread = min(self.drafter.lookahead, part.count)
                stop = start + part.count - unread
                new = None if features is None else _joined(work.features, features[first : first + stop - start])
                requests += [_request(work, stop, 0, new)]
            end = first + part.count
            if features is not None:
                accepted = len(part.tokens) - 1 if part.tokens and part.guess.tokens else 0
                part.features = features[end - unread : end + accepted]
            first = end + len(part.guess.tokens)
        if requests:
            self.drafter.guess(requests)

    def settle(self, part: ScheduledTokens, accepted: int) -> None:
        """Take in an iteration's result: the first `accepted` tokens of the guess were right."""
        assert self.drafter is not None
        work, features, count = part.work, part.features, len(part.guess.tokens)
        work.guessed = part.next_guesses or 0
        if part.next_guesses is not None:
            work.drafted, work.features = part.start + part.count + accepted, None
        elif not self.drafter.reads:
            work.drafted = part.start + part.count + accepted
        elif part.guess is not NO_GUESS:
            work.drafted, work.features = part.start + self.drafter.kept(count, accepted), features
        elif self._reads(part):
            work.drafted, work.features = part.start + part.count - min(self.drafter.lookahead, part.count), features
        elif features is not None:
            held = _joined(work.features, features)
            work.features = held if len(held) <= _HELD else None  # `plan` then leaves the sequence alone
        if count:
            assert work.pace is not None
            work.pace.learn(count, accepted)
            self._average.learn(count, accepted)
            self.guessed += count
            self.accepted += accepted

    def _reads(self, part: ScheduledTokens) -> bool:
        """Return whether the drafter reads a part of a prompt with the model; of each the last positions later, with
        the tokens that follow.
        """
        held = 0 if part.work.features is None else len(part.work.features)
        return part.count > 1 and part.work.drafted + held == part.start

    def time(self, backend: TextBackend) -> None:
        """Time forwards of this backend and of the drafter of its model on tokens of nobody, before requests come.

        The first ones, which compile what they need, do not count.
        """
        if self.drafter is None:
            return
        until = time.monotonic() + _TIMED_S
        for turn in range(_TIMED + 1):
            for rows in _ROWS if turn < 2 or time.monotonic() < until else ():
                started = time.perf_counter()
                step = TokenBatch.of([0] * rows, [*range(rows)], [0] * rows, [*range(rows)])
                backend.forward(step).logits[:, 0].tolist()  # waits for the device
                if turn:
                    self.observe(rows, time.perf_counter() - started)
        if not self.drafter.reads:
            return
        model, layers = backend.model, len(self.drafter.features)
        features = (
            torch.zeros(1, layers * int(model.config.hidden_size), dtype=backend.cache.dtype, device=model.device)
            if layers
            else None
        )
        timed = self.drafter.most if self.drafter.at_once else _TIMED
        for turn, count in enumerate((self.drafter.most, *[timed] * _TIMED)):
            started = time.perf_counter()
            self.drafter.guess([DraftRequest(0, [0, 0], 0, 1, count, None, features)])
            if backend.step_graphs is not None:
                backend.step_graphs.best.tolist()  # waits for the device
            seconds = (time.perf_counter() - started) / (1 if self.drafter.at_once else count)
            self._draft_s = min(self._draft_s, seconds) if turn > 1 else seconds
        self._lengths.clear()

    def observe(self, rows: int, seconds: float) -> None:
        """Record the time of a forward of the model alone."""
        if self._times.observe(rows, seconds):
            self._lengths.clear()

    def lengths(self, decoding: int) -> DraftLengths | None:
        """The model of how many guesses pay off with so many requests; None if speculation is off."""
        if self.drafter is None:
            return None
        if not len(self._times):
            return self._nominal
        n = max(1, decoding)
        if n not in self._lengths:
            # The cost over all that are decoding now: their rows in the model's forward, and the drafter's, whose rows
            # are taken to cost more in the same proportion.
            k, rows = np.arange(self.drafter.most + 1), self.drafter.most + 1 if self.drafter.at_once else 1
            one, all_ = self._times(np.array([rows, n * rows], np.float64))
            drafts = np.minimum(k, 1) if self.drafter.at_once else k
            self._lengths[n] = DraftLengths(self._times(n * (1.0 + k)) + drafts * self._draft_s * all_ / one)
        return self._lengths[n]

    def plan(self, work: SequenceState, lengths: DraftLengths | None = None) -> None:
        """Set the number of guesses of a decoding answer's next iteration."""
        work.guesses = 0
        # Penalties and grammars depend on each token in turn, and guesses ignore a bias.
        if work.modifies_logits or self.drafter is None or self._nominal is None:
            return
        held = 0 if work.features is None else len(work.features)
        if self.drafter.features and work.drafted + held < work.computed:
            return
        # With a seed the text must not depend on the load, which then must not decide the number of guesses.
        bound = work.settings is not None and work.parameters.seed is not None
        if work.pace is None:  # where guesses do not pay for what is usual, a little is forgotten: they are tried again
            self._average.acceptance += _FORGOTTEN * (USUAL - self._average.acceptance)
            work.pace = AcceptanceRate() if bound else AcceptanceRate(self._average.acceptance)
        pays = self._nominal if bound or lengths is None else lengths
        limit = work.most_guesses(pays(work.pace.acceptance))
        if limit > 0:
            work.guesses = self.drafter.limit(work, limit)


def _next_guesses(part: ScheduledTokens) -> int:
    """How many guesses may follow those of a part, all of which may be right: in the pages that its sequence has."""
    work, count = part.work, len(part.guess.tokens)
    room = work.holding.room - part.start - count - 2
    return max(0, min(work.guesses, work.most_guesses(work.guesses + 1) - 1, room))


def _nominal(drafter: Drafter) -> DraftLengths:
    """The numbers of guesses where measured times may not decide."""
    k = np.arange(drafter.most + 1)
    return DraftLengths(1 + np.minimum(k, 1) * drafter.cost + k * _ROW if drafter.at_once else 1 + k * drafter.cost)


def _request(work: SequenceState, stop: int, count: int, features: Tensor | None = None) -> DraftRequest:
    features = work.features if features is None else features
    return DraftRequest(work.row, work.tokens, work.drafted, stop, count, work.settings, features, work.own)


def _joined(held: Tensor | None, new: Tensor) -> Tensor:
    """The features of positions that were held before, and of new ones."""
    return new if held is None else torch.cat([held, new])
