"""Gives sequences their place in the KV cache: a row of its table, and pages for their tokens."""

from __future__ import annotations

from core.batching.slots import Slots
from core.kernels.kv_cache import KVCache
from llm.pages import PAGE, PageAllocator
from llm.sequence import SequenceState


class KVAllocator:
    """Rows and pages of one cache. A draft model's cache shares its table."""

    def __init__(self, cache: KVCache, pages: PageAllocator, *, sequences: int) -> None:
        self._cache = cache
        self._pages = pages
        self._rows = Slots(sequences)

    @property
    def full(self) -> bool:
        """Return whether all rows are taken."""
        return self._rows.free == 0

    @property
    def held(self) -> int:
        """Rows and pages that sequences hold."""
        return self._rows.taken + self._pages.held

    def allocate(self, work: SequenceState) -> bool:
        """A row, and pages for the tokens and, of an answer, one more; those known by their content count as computed.

        False: there is too little, and nothing is held.
        """
        row = self._rows.take()
        if row is None:
            return False
        self._pages.find(work.holding, work.known_tokens)
        other_rows = self._rows.taken - 1
        # A page for each of the others to grow into, or the last one admitted would be preempted at once.
        count = len(work.tokens) + (work.parameters.max_tokens > 0)
        if not self._pages.extend(work.holding, count) or self._pages.free < other_rows:
            self._pages.release(work.holding)
            self._rows.give(row)
            return False
        work.row = row[0]
        work.computed = work.drafted = work.holding.shared * PAGE
        if not work.answered:
            work.cached = work.computed
        self._cache.place(work.row, work.holding.pages)
        return True

    def grow(self, work: SequenceState, tokens: int) -> bool:
        """Have pages for so many tokens. False: there are too few."""
        had = len(work.holding.pages)
        if tokens <= work.holding.room:
            return True
        if not self._pages.extend(work.holding, tokens):
            return False
        self._cache.place(work.row, work.holding.pages[had:], had)
        return True

    def publish(self, work: SequenceState, computed: int) -> None:
        """Let others find the pages of the first `computed` tokens, once another page is complete."""
        if computed >= (work.holding.published + 1) * PAGE:
            self._pages.publish(work.holding, work.tokens, computed)

    def free(self, work: SequenceState) -> None:
        """Give back the row and the pages."""
        self._pages.release(work.holding)
        self._rows.give([work.row])
        work.row, work.computed, work.drafted, work.features = -1, 0, 0, None
