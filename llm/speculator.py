"""Speculative decoding for one runner: decides who gets how many guesses, has them made, and records the acceptance."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from llm.drafts import Drafter, DraftRequest
from llm.execution import TextExecution
from llm.parts import ScheduledTokens
from llm.sequence import SequenceState
from llm.speculate import MOST, NO_GUESS, DraftLengths, LinearCost

_ROW = 0.03  # of a forward, for each guess, where measured times may not decide
_TIMED = 4  # guesses at a time, and times
_HELD = 64  # positions of a sequence whose features are kept until they are read


class Speculator:
    """A drafter, or off."""

    def __init__(self, drafter: Drafter | None = None) -> None:
        self.drafter = drafter
        self.guessed = self.accepted = 0  # tokens, since the start
        self._nominal = None if drafter is None else _lengths(drafter, 1, drafter.cost, _ROW if drafter.at_once else 0)
        self._line = LinearCost()
        self._draft_s = 0.0  # of a forward of the drafter

    @property
    def active(self) -> bool:
        return self.drafter is not None

    @property
    def size_bytes(self) -> int:
        """Bytes of the drafter's weights and its cache."""
        return 0 if self.drafter is None else self.drafter.size_bytes

    def make(self, parts: Sequence[ScheduledTokens]) -> None:
        """Make the planned number of guesses for each part."""
        asking = [part for part in parts if part.work.guesses] if self.drafter is not None else []
        if self.drafter is None or not asking:
            return
        started = time.perf_counter()
        requests = [_request(part.work, part.start, part.work.guesses) for part in asking]
        for part, guess in zip(asking, self.drafter.guess(requests), strict=True):
            part.guess = guess
        turns = 1 if self.drafter.at_once else max(request.count for request in requests)
        draft_s = (time.perf_counter() - started) / turns
        self._draft_s += 0.2 * (draft_s - self._draft_s) if self._draft_s else draft_s

    def read(self, parts: Sequence[ScheduledTokens], features: Tensor | None) -> None:
        """Have the drafter read the chunks of prompts that the model has just read; `features` are those of the
        forward's rows. Parts get those of their new positions that are yet to be read.
        """
        if self.drafter is None or not self.drafter.reads:
            return
        requests: list[DraftRequest] = []
        rows: list[list[int]] = []  # by part: of the features that are left
        first = 0
        for part in parts:
            start, work, unread = part.start, part.work, part.count
            if self._reads(part):
                unread = min(self.drafter.lookahead, part.count)
                stop = start + part.count - unread
                new = None if features is None else _joined(work.features, features[first : first + stop - start])
                requests += [_request(work, stop, 0, new)]
            rows.append(list(range(first + part.count - unread, first + part.count)))
            if part.tokens and part.guess.tokens:
                rows[-1] += [first + part.count + j for j in range(len(part.tokens) - 1)]
            first += part.count + len(part.guess.tokens)
        if requests:
            self.drafter.guess(requests)
        if features is not None:
            index = torch.tensor([row for part_rows in rows for row in part_rows], dtype=torch.int64)
            picked = features[index.to(features.device)]  # a copy: the next forward overwrites them
            for part, part_features in zip(parts, picked.split([len(r) for r in rows]), strict=True):
                part.features = part_features

    def settle(self, part: ScheduledTokens, accepted: int) -> None:
        """Take in an iteration's result: the first `accepted` tokens of the guess were right."""
        assert self.drafter is not None
        work, features, count = part.work, part.features, len(part.guess.tokens)
        if not self.drafter.reads:
            work.drafted = part.start + part.count + accepted
        elif part.guess is not NO_GUESS:
            work.drafted, work.features = part.start + self.drafter.kept(count, accepted), features
        elif self._reads(part):
            work.drafted, work.features = part.start + part.count - min(self.drafter.lookahead, part.count), features
        elif features is not None:
            held = _joined(work.features, features)
            work.features = held if len(held) <= _HELD else None  # `plan` then leaves the sequence alone
        if count:
            work.pace.learn(count, accepted)
            self.guessed += count
            self.accepted += accepted

    def _reads(self, part: ScheduledTokens) -> bool:
        """Return whether the drafter reads a part of a prompt with the model; of each the last positions later, with
        the tokens that follow.
        """
        held = 0 if part.work.features is None else len(part.work.features)
        return part.count > 1 and part.work.drafted + held == part.start

    def time(self, execution: TextExecution) -> None:
        """Time the drafter of this execution's model on a token of nobody, before requests come.

        The first guesses, which compile what they need, would make it look dearer than it is, and never be repeated.
        """
        if self.drafter is None or not self.drafter.reads:
            return
        model, layers = execution.model, len(self.drafter.features)
        features = (
            torch.zeros(1, layers * int(model.config.hidden_size), dtype=execution.cache.dtype, device=model.device)
            if layers
            else None
        )
        for count in (MOST, *[_TIMED] * _TIMED):
            started = time.perf_counter()
            self.drafter.guess([DraftRequest(0, [0, 0], 0, 1, count, None, features)])
            seconds = (time.perf_counter() - started) / (1 if self.drafter.at_once else count)
            self._draft_s = seconds if count == MOST else min(self._draft_s, seconds)

    def observe(self, rows: int, seconds: float) -> None:
        """Record the time of a forward of the model, without making guesses."""
        self._line.observe(rows, seconds)

    def lengths(self, decoding: int) -> DraftLengths | None:
        """The model of how many guesses pay off with so many requests; None if speculation is off."""
        if self.drafter is None:
            return None
        # A guess's cost over all that are decoding now: a forward of the drafter, and their rows in the model's.
        n = max(1, decoding)
        forward_s, row_s = self._line(n)
        if not forward_s:
            return self._nominal  # nothing was measured yet
        return _lengths(self.drafter, forward_s, self._draft_s, n * row_s)

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
        pays = self._nominal if bound or lengths is None else lengths
        limit = work.most_guesses(pays(work.pace.acceptance))
        if limit > 0:
            work.guesses = self.drafter.limit(work, limit)


def _lengths(drafter: Drafter, forward_s: float, draft_s: float, row_s: float) -> DraftLengths:
    """`row_s` for one more row of every sequence in the model's forward."""
    return DraftLengths(forward_s, row_s, draft_s) if drafter.at_once else DraftLengths(forward_s, draft_s + row_s)


def _request(work: SequenceState, stop: int, count: int, features: Tensor | None = None) -> DraftRequest:
    features = work.features if features is None else features
    return DraftRequest(work.row, work.tokens, work.drafted, stop, count, work.settings, features, work.own)


def _joined(held: Tensor | None, new: Tensor) -> Tensor:
    """The features of positions that were held before, and of new ones."""
    return new if held is None else torch.cat([held, new])
