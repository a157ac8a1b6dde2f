"""Speculative decoding for one runner: decides who gets how many guesses, has them made, and records the acceptance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from core.kernels.kv_cache import TokenBatch
from llm.backends.backend import TextBackend
from llm.backends.forward import Forward
from llm.drafts.draft_graphs import Verified
from llm.drafts.drafter import Drafter, DraftRequest
from llm.drafts.speculate import NO_GUESS, USUAL, AcceptanceRate, DraftLengths, DraftTokens, ForwardTimes
from llm.sampling.pending import PendingTokens
from llm.sequence import SequenceState
from llm.step import Output, Share, Step, StepResult

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

    def make(self, shares: Sequence[Share]) -> Sequence[Share]:
        """Make the planned number of guesses for each share; returns the shares with these."""
        if self.drafter is None or not any(share.sequence.guesses for share in shares):
            return shares
        guesses: dict[int, DraftTokens] = {}
        asking: list[int] = []
        for i, (sequence, *_) in enumerate(shares):
            if sequence.guesses and sequence.guessed:
                guesses[i] = DraftTokens.on_device(min(sequence.guesses, sequence.guessed))
            elif sequence.guesses:
                asking.append(i)
        if asking:
            requests = [_request(shares[i].sequence, shares[i].start, shares[i].sequence.guesses) for i in asking]
            started = time.perf_counter()
            made = self.drafter.guess(requests)
            guesses.update(zip(asking, made, strict=True))
            if len(requests) == 1 and made[0].known:
                seconds = (time.perf_counter() - started) / (1 if self.drafter.at_once else requests[0].count)
                self._draft_s = min(self._draft_s or seconds, seconds)
        return [share._replace(guess=guesses[i]) if i in guesses else share for i, share in enumerate(shares)]

    def verify(self, step: Step, forward: Forward) -> tuple[PendingTokens, Callable[[], object]] | None:
        """Submit the acceptance of the guesses of a step, behind its forward; returns its most likely tokens, with how
        many guesses of each part that has some were right, and what submits the next guesses.

        None: the host is to accept them. That is where tokens are not all the most likely ones.
        """
        guessed = [part for part in step.sampled if part.guess.tokens]
        graphs = None if self.drafter is None else self.drafter.graphs
        if graphs is None or not guessed or forward.best is None or not forward.recorded:
            return None
        if step.logits or not all(part.sequence.plain for part in step.sampled):
            return None
        rows, counts = step.tokens.output_rows.tolist(), [_next_guesses(part) for part in guessed]
        begun = graphs.begin([
            Verified(
                part.sequence.row, rows[part.first], part.first, part.start, len(part.guess.tokens), count
            )
            for part, count in zip(guessed, counts, strict=True)
        ])  # fmt: skip
        if begun is None:
            return None
        accepted, guess = begun
        pending = PendingTokens(torch.cat([forward.best, accepted]))
        if not any(counts):
            return pending, lambda: None
        for part, count in zip(guessed, counts, strict=True):
            part.result.next_guesses = count
        return pending, guess

    def fetch(self, step: Step, forward: Forward) -> Sequence[Output]:
        """Return the outputs of a step with guesses that the host knows, of which only the device may know some."""
        if all(part.guess.known for part in step.sampled):
            return step.sampled
        assert forward.tokens is not None
        tokens, outputs = forward.tokens.tolist(), []
        for part in step.sampled:
            if not part.guess.known:
                first = int(step.tokens.output_rows[part.first]) + 1
                guess = DraftTokens(tokens[first : first + len(part.guess.tokens)])
                part = replace(part, guess=guess)
            outputs.append(part)
        return outputs

    def read(self, shares: Sequence[Share], results: Sequence[StepResult], forward: Forward) -> None:
        """Have the drafter read the chunks of prompts that a forward has read. Results get the features of their new
        positions that are yet to be read.
        """
        if self.drafter is None or not self.drafter.reads or all(r.next_guesses is not None for r in results):
            return
        requests: list[DraftRequest] = []
        features = forward.features
        if features is not None and forward.recorded:  # the next forward's too
            features = features[: sum(share.rows for share in shares)].clone()
        first = 0
        for share, result in zip(shares, results, strict=True):
            sequence, start, unread, *_ = share
            if self._reads(share):
                unread = min(self.drafter.lookahead, share.length)
                stop = start + share.length - unread
                new = None if features is None else _joined(sequence.features, features[first : first + stop - start])
                requests += [_request(sequence, stop, 0, new)]
            end = first + share.length
            if features is not None:
                result.features = features[end - unread : end + result.accepted]
            first += share.rows
        if requests:
            self.drafter.guess(requests)

    def settle(self, share: Share, result: StepResult) -> None:
        """Take in a step's result: how many tokens of the guess were right, and what was read."""
        if self.drafter is None:
            return
        sequence, features, count, accepted = share.sequence, result.features, len(share.guess.tokens), result.accepted
        sequence.guessed = result.next_guesses or 0
        if result.next_guesses is not None:
            sequence.drafted, sequence.features = share.start + share.length + accepted, None
        elif not self.drafter.reads:
            sequence.drafted = share.start + share.length + accepted
        elif share.guess is not NO_GUESS:
            sequence.drafted, sequence.features = share.start + self.drafter.kept(count, accepted), features
        elif self._reads(share):
            read = share.length - min(self.drafter.lookahead, share.length)
            sequence.drafted, sequence.features = share.start + read, features
        elif features is not None:
            held = _joined(sequence.features, features)
            sequence.features = held if len(held) <= _HELD else None  # `plan` then leaves the sequence alone
        if count:
            assert sequence.pace is not None
            sequence.pace.learn(count, accepted)
            self._average.learn(count, accepted)
            self.guessed += count
            self.accepted += accepted

    def _reads(self, share: Share) -> bool:
        """Return whether the drafter reads a share of a prompt with the model; of each the last positions later, with
        the tokens that follow.
        """
        held = 0 if share.sequence.features is None else len(share.sequence.features)
        return share.length > 1 and share.sequence.drafted + held == share.start

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


def _next_guesses(part: Output) -> int:
    """How many guesses may follow those of a share, all of which may be right: in the pages that its sequence has."""
    sequence, count = part.sequence, len(part.guess.tokens)
    room = sequence.holding.room - part.start - count - 2
    return max(0, min(sequence.guesses, sequence.most_guesses(sequence.guesses + 1) - 1, room))


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
