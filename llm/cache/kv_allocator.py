"""Gives sequences their place in the KV cache: a row of its table, and pages for their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from core.batching.slots import Slots
from core.kernels.kv_cache import KVCache
from llm.cache.pages import PAGE, PageAllocator
from llm.features.beam_search import BeamSearch
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
        beams = work.beams
        width = 1 if beams is None else beams.width
        rows = self._rows.take(width)
        if rows is None:
            return False
        self._pages.find(work.holding, work.known_tokens, 0 if work.adapter is None else work.adapter.key)
        # Each beam may need a copy of its last page, and its next one.
        other_rows = self._rows.taken - width + 2 * (width - 1)
        # A page for each of the others to grow into, or the last one admitted would be preempted at once.
        count = len(work.tokens) + (work.parameters.max_tokens > 0)
        if not self._pages.extend(work.holding, count) or self._pages.free < other_rows:
            self._pages.release(work.holding)
            self._rows.give(rows)
            return False
        work.row = rows[0]
        if beams is not None:
            beams.idle = [work.fork() for _ in rows[1:]]
            for state, row in zip(beams.idle, rows[1:], strict=True):
                state.row = row
        work.computed = work.drafted = work.holding.shared * PAGE
        if not work.answered and (beams is None or not beams.length):
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

    def grow_beams(self, beams: BeamSearch[SequenceState], count: int) -> bool:
        """Have pages for `count` more tokens of each running beam, and for `fork`. False: there are too few."""
        if not all(self.grow(state, state.computed + count) for state in beams.states):
            return False
        return self._pages.extend(beams.spare, (beams.width - 1) * PAGE)

    def fork(self, beams: BeamSearch[SequenceState], parents: Sequence[int]) -> None:
        """Give each beam that runs now a sequence: that of the one that it continues, or a copy of it.

        Full pages are shared; of one that is not a copy is made, on a spare page.
        """
        sources, kept = beams.states, {*parents}
        for number, state in enumerate(sources):
            if number not in kept:
                self._pages.release(state.holding)
                beams.idle.append(state)
        beams.states = []
        for parent in parents:
            source = state = sources[parent]
            if parent in kept:
                kept.remove(parent)
            else:
                state = beams.idle.pop()
                full, rest = divmod(source.computed, PAGE)
                state.holding, state.computed = self._pages.share(source.holding, full), source.computed
                state.drafted, state.features = min(source.drafted, full * PAGE), None  # no copy in the drafter's pages
                if rest:
                    page = beams.spare.pages.pop()
                    self._cache.copy_page(source.holding.pages[full], page)
                    state.holding.pages.append(page)
                self._cache.place(state.row, state.holding.pages)
            beams.states.append(state)

    def free(self, work: SequenceState) -> None:
        """Give back the rows and the pages."""
        states, beams = [work], work.beams
        if beams is not None:
            states, beams.states, beams.idle = [*({work} | {*beams.states, *beams.idle})], [], []
            self._pages.release(beams.spare)
        for state in states:
            self._pages.release(state.holding)
            self._rows.give([state.row])
            state.row, state.computed, state.drafted, state.features, state.guessed = -1, 0, 0, None, 0
