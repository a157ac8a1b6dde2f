"""One modality's requests that wait for admission: of each account the most urgent first, accounts by their shares.

A lazy heap: outdated entries stay until they are popped, or until they outnumber those that wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from core.batching.request import Request, State
from core.batching.shares import Account, Order, Shares, account

_Entry = tuple[tuple[int, float, int], int, Request]


class Waiting:
    """`count` is how many wait. An account's place is looked at again when it comes up: it only ever moves back."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._heaps: dict[Account, list[_Entry]] = {}
        self._places: list[tuple[Order, Account]] = []
        self._place: dict[Account, Order] = {}  # the entry of `_places` that counts
        self._entries = self._added = 0
        self.count = 0

    def add(self, request: Request) -> None:
        """It waits from now on."""
        self.count += 1
        self.place(request)

    def place(self, request: Request) -> None:
        """It waits, and from now on by the order that it has now."""
        who, order = account(request), self._shares.order(request)
        self._added += 1
        self._entries += 1
        heapq.heappush(self._heaps.setdefault(who, []), (request.turn, self._added, request))
        if who not in self._place or order < self._place[who]:
            self._place[who] = order
            heapq.heappush(self._places, (order, who))

    def first(self) -> Request | None:
        """The request to admit next."""
        while self._places:
            order, who = self._places[0]
            if self._place.get(who) != order:
                heapq.heappop(self._places)
                continue
            heap = self._heaps[who]
            while heap and not _waits(heap[0], who):
                heapq.heappop(heap)
                self._entries -= 1
            if not heap:
                heapq.heappop(self._places)
                del self._heaps[who], self._place[who]
                continue
            now = self._shares.order(heap[0][2])
            if now == order:
                return heap[0][2]
            self._place[who] = now
            heapq.heapreplace(self._places, (now, who))
        return None

    def sweep(self) -> None:
        """Let go of requests that no longer wait: heaps keep their results."""
        if self._entries > 2 * self.count + 16 or len(self._places) > 2 * self.count + 16:
            entries = [(entry, who) for who, heap in self._heaps.items() for entry in heap]
            self.reset({entry[2].id: entry[2] for entry, who in entries if _waits(entry, who)}.values())

    def reset(self, requests: Iterable[Request]) -> None:
        """These wait, and no others."""
        self._heaps, self._places, self._place, self._entries, self.count = {}, [], {}, 0, 0
        for request in requests:
            self.add(request)


def _waits(entry: _Entry, who: Account) -> bool:
    return entry[2].state is State.WAITING and entry[0] == entry[2].turn and account(entry[2]) == who
