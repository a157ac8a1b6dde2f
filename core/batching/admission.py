"""Admission: which live requests wait, and which hold a place with their runner, until they end or are preempted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.batching.aging import AgedRequests
from core.batching.batcher import Batch
from core.batching.request import Request, State
from core.batching.runner import DeviceLost, NotYet, OutOfMemory, PreemptibleRunner, Runner
from core.batching.shares import Shares
from core.batching.waiting import Waiting


class Admission:
    """`waiting` and `running` requests by modality, in the order of their tenants' shares."""

    def __init__(self, runners: Mapping[str, Runner], *, starvation_s: float) -> None:
        self._runners = runners
        self._growing = {name: runner for name, runner in runners.items() if isinstance(runner, PreemptibleRunner)}
        self.shares = Shares(runners)
        self.waiting = {name: Waiting(self.shares, runner.resources) for name, runner in runners.items()}
        self.running: dict[str, dict[str, Request]] = {name: {} for name in runners}
        self.aged = AgedRequests(starvation_s, self._promote)

    def add(self, request: Request) -> None:
        """A new request waits."""
        self.aged.add(request)
        self.shares.enter(request)
        self.waiting[request.modality].add(request)

    def withdraw(self, requests: Sequence[Request], left: Sequence[Request]) -> None:
        """Take these out of all that wait; the others are `left`."""
        for request in requests:
            self.shares.leave(request)
            self.aged.remove(request)
        for name, waiting in self.waiting.items():
            waiting.reset(request for request in left if request.modality == name)

    def remove(self, request: Request) -> None:
        """The request ends: what it holds is given back."""
        if request.state is State.RUNNING:
            self.shares.stop(request)
            del self.running[request.modality][request.id]
            self._runners[request.modality].release(request)
        else:
            self.waiting[request.modality].count -= 1
        self.shares.leave(request)
        self.aged.remove(request)

    def admit(self, name: str, now: float) -> Request | None:
        """Admit by urgency until the runner says not yet: no request overtakes one that needs more room.

        Where a request's own resources have none it is passed over, with all that need one of these, and keeps its
        place: of those that need any of them it is still the first. Stops early at a request that can never be served
        and returns it, its error set: to be ended, before this is called again.
        """
        runner, waiting, running = self._runners[name], self.waiting[name], self.running[name]
        closed: set[str] = set()
        while (request := waiting.first(closed)) is not None:
            try:
                refusal = self._ask(name, request)
            except DeviceLost:
                raise
            except Exception as error:
                request.error = error
                return request
            if refusal is not None:
                if not running and not refusal.pending:
                    request.error = _too_large(request)
                    return request
                if not refusal.resource:
                    return None
                closed |= runner.resources(request)
                continue
            waiting.count -= 1
            request.state = State.RUNNING
            request.started = now if request.started is None else request.started
            running[request.id] = request
            self.shares.begin(request)
        return None

    def _ask(self, name: str, request: Request) -> NotYet | None:
        """The runner's answer, once as many others as may be preempted for the request were."""
        runner, growing = self._runners[name], self._growing.get(name)
        while (refusal := runner.admit(request)) is not None and not refusal.pending and growing is not None:
            peers = {peer.id: peer for peer in self._peers(request, refusal.resource)}
            victim = self.shares.preemption_victim(request, peers)
            if victim is None:
                break
            self._preempt(growing, victim)
        return refusal

    def reserve(self, batch: Batch) -> bool:
        """Have the runner take what the batch needs, at the cost of the least urgent. False: nothing to launch now.

        The batch's first request then has its error set if it can never be served.
        """
        name, first = batch.runner.modality, batch.requests[0]
        runner = self._growing.get(name)
        while runner is not None and not runner.reserve(batch.requests):
            peers = self._peers(first)
            victims = [r for r in peers if r is not first and not r.in_flight]
            if not victims:
                if len(peers) == 1:  # else what is under way will end and can then be preempted
                    first.error = _too_large(first)
                return False
            last = max(victims, key=self.shares.order)
            if last in batch.requests:
                batch.requests.remove(last)
                batch.rows -= runner.rows(last)
            self._preempt(runner, last)
        return True

    def _peers(self, request: Request, resource: str = "") -> list[Request]:
        """Return the running requests that hold what a request wants: the resource, or else what all share that need
        the same resources as it, or some of these alone.
        """
        resources = self._runners[request.modality].resources
        needed = resources(request)
        others = [(peer, resources(peer)) for peer in self.running[request.modality].values()]
        if resource:
            return [peer for peer, theirs in others if resource in theirs]
        return [peer for peer, theirs in others if theirs <= needed or needed <= theirs]

    def _preempt(self, runner: PreemptibleRunner, request: Request) -> None:
        """Preempt the request: it waits again."""
        runner.preempt(request)
        self.shares.stop(request)
        del self.running[request.modality][request.id]
        request.state = State.WAITING
        self.waiting[request.modality].add(request)

    def _promote(self, request: Request) -> None:
        """Mark the request as aged."""
        running = request.state is State.RUNNING
        if running:
            self.shares.stop(request)
        self.shares.leave(request)
        request.aged = True
        self.shares.enter(request)
        if running:
            self.shares.begin(request)
        else:
            self.waiting[request.modality].place(request)


def _too_large(request: Request) -> OutOfMemory:
    return OutOfMemory(f"request {request.id} needs more than all the {request.modality} runner has")
