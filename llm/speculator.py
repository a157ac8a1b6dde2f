"""Speculative decoding for one runner: decides who gets how many guesses, makes them, and records the acceptance."""

from __future__ import annotations

import time
from collections.abc import Sequence

from core.kernels.kv_cache import TokenBatch
from llm.parts import ScheduledTokens
from llm.sequence import SequenceState
from llm.speculate import NOMINAL, DraftLengths, DraftModel, DraftRequest, DraftTokens, LinearCost


class Speculator:
    """A source of draft tokens: a draft model, prompt lookup, or off."""

    def __init__(self, draft: DraftModel | None = None, *, lookup: bool = False) -> None:
        self.draft = draft
        self.lookup = lookup
        self.guessed = self.accepted = 0  # tokens, since the start
        self._line = LinearCost()
        self._guess_s = 0.0  # per forward of the draft

    @property
    def active(self) -> bool:
        return self.lookup or self.draft is not None

    def make(self, parts: Sequence[ScheduledTokens]) -> None:
        """Make the planned number of guesses for each part; those of the draft take as many forwards of its own."""
        if not self.active:
            return
        asking: list[ScheduledTokens] = []
        for part in parts:
            if isinstance(part.work.guesses, list):
                part.guess = DraftTokens(part.work.guesses)
            elif part.work.guesses:
                asking.append(part)
        if self.draft is not None and asking:
            sequences = [part.work for part in asking]
            started = time.perf_counter()
            requests = [DraftRequest(w.row, w.tokens, w.drafted, w.guess_count, w.settings) for w in sequences]
            for part, guess in zip(asking, self.draft.guess(requests), strict=True):
                part.guess = guess
            turn_s = (time.perf_counter() - started) / max(request.count for request in requests)
            self._guess_s += 0.2 * (turn_s - self._guess_s) if self._guess_s else turn_s

    def read_along(self, parts: Sequence[ScheduledTokens]) -> None:
        """Prefill the draft with the same chunks."""
        if self.draft is None:
            return
        reading = [part for part in parts if part.count > 1 and part.work.drafted == part.start]
        if reading:
            tokens = [t for part in reading for t in part.work.tokens[part.start : part.start + part.count]]
            positions = [n for part in reading for n in range(part.start, part.start + part.count)]
            sequences = [part.work.row for part in reading for _ in range(part.count)]
            self.draft.read(TokenBatch.of(tokens, positions, sequences, []))

    def settle(self, part: ScheduledTokens, accepted: int) -> None:
        """Take in an iteration's result: the first `accepted` tokens of the guess were right."""
        work, count = part.work, len(part.guess.tokens)
        if part.count > 1 and work.drafted == part.start:
            work.drafted = part.start + part.count
        if not count:
            return
        work.pace.learn(count, accepted)
        self.guessed += count
        self.accepted += accepted
        if self.draft is not None:
            work.drafted = part.start + 1 + min(accepted, count - 1)

    def observe(self, rows: int, seconds: float) -> None:
        """Record the time of a forward of the model, without making guesses."""
        self._line.observe(rows, seconds)

    def lengths(self, decoding: int) -> DraftLengths | None:
        """The model of how many guesses pay off with so many requests; None if speculation is off."""
        if not self.active:
            return None
        # A guess's cost over all that are decoding now: its forward of the draft, and their rows in the forward.
        n = max(1, decoding)
        forward_s, row_s = self._line(n)
        return DraftLengths(forward_s, self._guess_s + n * row_s)

    def plan(self, work: SequenceState, lengths: DraftLengths | None = None) -> None:
        """Set the number of guesses of a decoding answer's next iteration."""
        work.guesses = 0
        # Penalties and grammars depend on each token in turn, and guesses ignore a bias.
        if work.modifies_logits or not self.active:
            return
        nominal = NOMINAL["lookup" if self.lookup else "draft"]
        # With a seed the text must not depend on the load, which then must not decide the number of guesses.
        bound = work.settings is not None and work.parameters.seed is not None
        pays = nominal if bound or lengths is None else lengths
        limit = work.most_guesses(pays(work.pace.acceptance))
        if limit > 0:
            work.guesses = work.lookup.guess(limit) if work.lookup is not None else limit
