"""One modality's requests that wait for admission: of each account the most urgent first, accounts by their shares.

There is a queue for each set of resources that requests need, so that those that need others can be passed over as one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from operator import itemgetter

from core.batching.request import Request, State
from core.batching.shares import Account, Order, Shares, account

_Entry = tuple[tuple[int, float, int], int, Request]


class Waiting:
    """`count` is how many wait. `resources` says what a request needs, as `Runner.resources`."""

    def __init__(self, shares: Shares, resources: Callable[[Request], frozenset[str]]) -> None:
        self._shares = shares
        self._resources = resources
        self._queues: dict[frozenset[str], _Queue] = {}
        self.count = 0

    def add(self, request: Request) -> None:
        """Add a request to those that wait."""
        self.count += 1
        self.place(request)

    def place(self, request: Request) -> None:
        """Put a waiting request into the order that it has now."""
        needed = self._resources(request)
        if needed not in self._queues:
            self._queues[needed] = _Queue(self._shares)
        self._queues[needed].place(request)

    def first(self, closed: set[str]) -> Request | None:
        """Return the request to admit next, of those that need none of the `closed` resources.

        One that comes before it is passed over, and closes all that it needs to those after it: added to `closed`.
        """
        heads = [
            (self._shares.order(request), request, needed)
            for needed, queue in self._queues.items()
            if (request := queue.first()) is not None
        ]
        for _, request, needed in sorted(heads, key=itemgetter(0)):
            if needed.isdisjoint(closed):
                return request
            closed |= needed
        return None

    def sweep(self) -> None:
        """Let go of requests that no longer wait: heaps keep their results."""
        if any(queue.size > 2 * self.count + 16 for queue in self._queues.values()):
            self.reset([request for queue in self._queues.values() for request in queue.requests()])

    def reset(self, requests: Iterable[Request]) -> None:
        """Replace all waiting requests by these."""
        self._queues, self.count = {}, 0
        for request in requests:
            self.add(request)


class _Queue:
    """Requests that need the same resources, in a lazy heap: outdated entries stay until they are popped.

    An account's place is looked at again when it comes up: it only ever moves back.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._heaps: dict[Account, list[_Entry]] = {}
        self._places: list[tuple[Order, Account]] = []
        self._place: dict[Account, Order] = {}  # the entry of `_places` that counts
        self._entries = self._added = 0

    @property
    def size(self) -> int:
        """The number of entries there are, outdated ones too."""
        return max(self._entries, len(self._places))

    def place(self, request: Request) -> None:
        """Put a waiting request into the order that it has now."""
        owner, order = account(request), self._shares.order(request)
        self._added += 1
        self._entries += 1
        heapq.heappush(self._heaps.setdefault(owner, []), (request.turn, self._added, request))
        if owner not in self._place or order < self._place[owner]:
            self._place[owner] = order
            heapq.heappush(self._places, (order, owner))

    def first(self) -> Request | None:
        """The request to admit next."""
        while self._places:
            order, owner = self._places[0]
            if self._place.get(owner) != order:
                heapq.heappop(self._places)
                continue
            heap = self._heaps[owner]
            while heap and not _waits(heap[0], owner):
                heapq.heappop(heap)
                self._entries -= 1
            if not heap:
                heapq.heappop(self._places)
                del self._heaps[owner], self._place[owner]
                continue
            now = self._shares.order(heap[0][2])
            if now == order:
                return heap[0][2]
            self._place[owner] = now
            heapq.heapreplace(self._places, (now, owner))
        return None

    def requests(self) -> list[Request]:
        """The waiting requests, each once."""
        entries = [(entry, owner) for owner, heap in self._heaps.items() for entry in heap]
        return [*{entry[2].id: entry[2] for entry, owner in entries if _waits(entry, owner)}.values()]


def _waits(entry: _Entry, owner: Account) -> bool:
    return entry[2].state is State.WAITING and entry[0] == entry[2].turn and account(entry[2]) == owner
