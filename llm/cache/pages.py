"""Allocates KV cache pages to sequences, shares pages of equal prefixes, and evicts unused ones.

Pure bookkeeping of tokens and page numbers; `core.kernels.kv_cache` owns the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.batching.slots import IntegrityError, Slots
from core.kernels.kv_cache import PAGE as PAGE


@dataclass(slots=True, eq=False)
class SequencePages:
    """The pages of one sequence, in order. The first `shared` were found in the cache: nobody may write to them."""

    pages: list[int] = field(default_factory=list)
    shared: int = 0
    published: int = 0  # of these pages others may find the first so many
    key: int = 0  # of the last page found or published, which the next page's key begins with

    @property
    def room(self) -> int:
        """Tokens that fit in its pages."""
        return len(self.pages) * PAGE


class PageAllocator:
    """`capacity` pages. A full page with known tokens can be found by sequences with the same prefix, and the same
    `lookahead` tokens behind it: what a drafter keeps in a page may depend on these.

    A released page keeps its contents until it is evicted, least recently used first.
    """

    def __init__(self, capacity: int, *, lookahead: int = 0) -> None:
        self._lookahead = lookahead
        self._slots = Slots(capacity)
        self._holders: dict[int, int] = {}
        self._found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (key before, tokens) → page, key
        self._names: dict[int, tuple[int, tuple[int, ...]]] = {}  # page → what it is found by
        self._idle: OrderedDict[int, None] = OrderedDict()  # findable, held by nobody
        self._keys = 0
        self.hits = 0  # tokens that were found instead of computed

    @property
    def capacity(self) -> int:
        return self._slots.capacity

    @property
    def tokens(self) -> int:
        """Tokens that fit in all pages."""
        return self.capacity * PAGE

    @property
    def free(self) -> int:
        """Allocatable pages: empty ones, and released ones."""
        return self._slots.free + len(self._idle)

    def usage(self) -> float:
        """Return the part of all pages that sequences hold, from 0 to 1."""
        return 1 - self.free / self.capacity

    @property
    def held(self) -> int:
        return len(self._holders)

    def find(self, holding: SequencePages, tokens: Sequence[int], adapter: int = 0) -> None:
        """Start a holding with the cached pages of the longest known prefix of these tokens.

        Never includes the last token: its forward is needed to compute what follows. Nor the `lookahead` positions
        before it, which a drafter guesses from: a preempted answer then has the guesses that it would have had.
        `adapter` is the key, negative, of the weights that compute them beside the model's own.
        """
        if holding.pages:
            raise IntegrityError("a holding that has pages cannot begin with others")
        holding.key = adapter
        for start in range(0, (len(tokens) - 1 - self._lookahead) // PAGE * PAGE, PAGE):
            entry = self._found.get((holding.key, tuple(tokens[start : start + PAGE + self._lookahead])))
            if entry is None:
                break
            page, holding.key = entry
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
            holding.pages.append(page)
        holding.shared = holding.published = len(holding.pages)
        self.hits += holding.room

    def share(self, holding: SequencePages, count: int) -> SequencePages:
        """Return another holding of the first `count` pages, all full, which nobody may write to from now on."""
        holding.shared = max(holding.shared, count)
        for page in holding.pages[:count]:
            self._holders[page] += 1
        return SequencePages(holding.pages[:count], count, holding.published, holding.key)

    def extend(self, holding: SequencePages, tokens: int) -> bool:
        """Allocate pages for so many tokens in all. False if there are too few pages: then nothing is allocated."""
        count = -(-tokens // PAGE) - len(holding.pages)
        if count <= 0:
            return True
        if count > self.free:
            return False
        while self._slots.free < count:
            page, _ = self._idle.popitem(last=False)
            del self._found[self._names.pop(page)]
            self._slots.give([page])
        pages = self._slots.take(count)
        assert pages is not None
        for page in pages:
            self._holders[page] = 1
        holding.pages += pages
        return True

    def publish(self, holding: SequencePages, tokens: Sequence[int], computed: int) -> None:
        """Make the full pages among the first `computed` of these tokens findable; at least `lookahead` more follow.

        If two sequences computed the same at once each keeps its page; the first one is found.
        """
        while (holding.published + 1) * PAGE <= computed:
            start = holding.published * PAGE
            name = (holding.key, tuple(tokens[start : start + PAGE + self._lookahead]))
            page = holding.pages[holding.published]
            holding.published += 1
            entry = self._found.get(name)
            if entry is None:
                self._keys += 1
                entry = self._found[name] = (page, self._keys)
                self._names[page] = name
            holding.key = entry[1]

    def release(self, holding: SequencePages) -> None:
        """Release all pages. Raises `IntegrityError` for one that is not held."""
        for page in reversed(holding.pages):  # a sequence's end is evicted before its beginning
            count = self._holders.get(page, 0)
            if count < 1:
                raise IntegrityError(f"page {page} is given back but not held")
            if count > 1:
                self._holders[page] = count - 1
                continue
            del self._holders[page]
            if page in self._names:
                self._idle[page] = None
            else:
                self._slots.give([page])
        holding.pages, holding.shared, holding.published, holding.key = [], 0, 0, 0

    def check(self) -> None:
        """Raise `IntegrityError` unless every page is free, idle or held, once."""
        self._slots.check()
        if self._slots.taken != len(self._holders) + len(self._idle) or self._holders.keys() & self._idle.keys():
            used, holder_count, idle = self._slots.taken, len(self._holders), len(self._idle)
            raise IntegrityError(f"{used} pages are taken, but {holder_count} held and {idle} idle")
        if {page for page, _ in self._found.values()} != self._names.keys() or self._idle.keys() - self._names.keys():
            raise IntegrityError("a page is found by a name that it does not have")
