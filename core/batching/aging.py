"""Marks each tenant's oldest request of a modality as aged, once it has waited longer than anything should.

What an aged request may do is decided by the sort keys in request.py and shares.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from core.batching.request import Request


class AgedRequests:
    """The aged requests. `promote` receives each request that becomes aged; it stays so to its end."""

    def __init__(self, starvation_s: float, promote: Callable[[Request], None]) -> None:
        self._starvation_s = starvation_s
        self._promote = promote
        self._oldest: dict[tuple[str, str], OrderedDict[str, Request]] = {}
        self._young: OrderedDict[str, Request] = OrderedDict()  # of all tenants

    def add(self, request: Request) -> None:
        request.aged = False
        self._oldest.setdefault((request.modality, request.tenant), OrderedDict())[request.id] = request
        self._young[request.id] = request

    def remove(self, request: Request) -> None:
        """Remove a request that is no longer live; the next oldest takes its place if it is old."""
        key = request.modality, request.tenant
        self._young.pop(request.id, None)
        del self._oldest[key][request.id]
        if self._oldest[key]:
            self._look(next(iter(self._oldest[key].values())))
        else:
            del self._oldest[key]

    def age(self, now: float) -> None:
        """Time has passed."""
        while self._young:
            request = next(iter(self._young.values()))
            if now - request.arrival < self._starvation_s:
                return
            del self._young[request.id]
            self._look(next(iter(self._oldest[request.modality, request.tenant].values())))

    def _look(self, oldest: Request) -> None:
        if oldest.id not in self._young and not oldest.aged:
            self._promote(oldest)
