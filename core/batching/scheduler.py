"""Selects the requests that share the next forward, on each lane of the device.

Pure Python with no clock and no threads: time is handed in, so that the same code runs under a virtual clock
in tests and in the simulator.

The policy, in the order in which it is applied:

* Tenants. Of several tenants' requests those go first whose tenant was charged the least of the device, on whatever
  lane, and others join them only so far that it gets its share (shares.py). What follows is among one tenant's own.
* Urgency. Priority first; within a priority the earliest deadline (given, or arrival plus the runner's
  patience). A tenant's oldest request of a modality, once it is older than `starvation_s`, goes before all others of
  its tenant's: one at a time, so that an overload does not wash priorities away, yet nothing waits for ever. Of two
  modalities' aged requests on one lane the older goes first, whatever its priority.
* Leader. On each lane the most urgent ready request leads, and its group runs.
* One shot first. A group whose requests need one iteration only (a prompt to encode, a latent to decode) goes
  before the leader's group where that lowers the sum of waiting times (Smith's rule): it delays the n
  requests of the leader's batch by its own cost, and spares its k requests what the leader's group still has
  to do. Never against a deadline that someone set in that batch, and never twice in a row before an aged request.
* Cohorts. Where the requests of another group come into the leader's group by one iteration (DeepCache's shallow
  steps before a deep one), that group goes first if this lets enough of them share the leader's forward: the cost
  curves say what is saved. The leader is held for one iteration, never twice in a row, never for lesser priorities,
  and never against a deadline that someone set.
* Width. The batch takes the most urgent k requests, k chosen to minimise the mean completion time if all that
  is queued for this group, and the successors that will come while it is served, were served in waves of k.
  With cost(k) flat this is as wide as can be; with cost linear in rows it is 1; and as the queue grows it
  tends to the k of the highest throughput. Where requests stream (PreemptibleRunner) all go together that the
  runner's pace has time for: the others would fall silent. And while they do, no other batch of more than one
  request takes longer than the pace leaves over. While a tenant that is owed time is expected back, a batch is the
  narrowest with nearly the throughput of that: whoever comes waits for it to end.
* Second place (`depth` 2). A batch queues behind a running one only if it would not do better to join it at the
  next iteration, and never behind one of more urgent priorities: those would wait for it at every step.
* Admission. In the order of shares and urgency, until something that all requests share has no room. A request that
  waits for a resource of its own, such as a cache of files, delays only those that need one of its resources.
* Memory. A batch that did not fit halves what its group may hold (limits.py). Where a runner's requests grow and there
  is too little for the next iteration, the least urgent request that is not under way waits again. And so it does for
  a request of a tenant that holds fewer places, by two at least.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Mapping, Sequence

from core.batching.admission import Admission
from core.batching.batcher import Batch, Batcher
from core.batching.limits import Limits
from core.batching.policy import SchedulingPolicy
from core.batching.request import Outcome, Request, State
from core.batching.runner import OutOfMemory, Runner


class Scheduler:
    """Keeps every request from `add` to its end, and decides what runs next; a lane may hold `depth` batches."""

    def __init__(self, runners: Sequence[Runner], *, depth: int = 1, starvation_s: float = 60.0) -> None:
        self._runners = {runner.modality: runner for runner in runners}
        if len(self._runners) != len(runners):
            raise ValueError("two runners have the same modality")
        self._live: dict[str, Request] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._ended: list[Request] = []
        self._sequence = 0
        self._limits = Limits()
        self._admission = admission = Admission(self._runners, starvation_s=starvation_s)
        policy = SchedulingPolicy(self._runners, self._limits, admission.waiting, admission.running, admission.shares)
        self._batcher = Batcher(self._runners, policy, self._limits, admission.shares, depth=depth)

    # -- what goes in ----------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Take a request in. Raises ValueError for an id that is live or a modality that no runner serves."""
        if request.id in self._live:
            raise ValueError(f"id {request.id!r} is already in use by a live request")
        runner = self._runners.get(request.modality)
        if runner is None:
            served = ", ".join(self._runners)
            raise ValueError(f"modality {request.modality!r} is not served here; served: {served}")
        self._sequence += 1
        request.sequence = self._sequence
        request.arrival = now
        request.state = State.WAITING
        request.due = request.deadline if request.deadline < math.inf else now + runner.patience_s
        self._live[request.id] = request
        self._admission.add(request)
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.sequence, request))

    def abort(self, request_id: str, now: float) -> bool:
        """End a request early: at once, or when the iteration under way ends. False if it is not live."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self._end(request, State.ABORTED, now)
        return True

    def hand_back(self) -> list[Request]:
        """Take out and forget every request that has not started, most urgent first. It may be added anew."""
        waiting = sorted((r for r in self._live.values() if r.state is State.WAITING), key=lambda r: r.urgency)
        requests = [request for request in waiting if request.started is None]
        for request in requests:
            del self._live[request.id]
            request.sequence = 0
        # what was begun and has to wait again stays
        self._admission.withdraw(requests, [request for request in waiting if request.started is not None])
        self._deadlines = [entry for entry in self._deadlines if self._live.get(entry[2].id) is entry[2]]
        heapq.heapify(self._deadlines)
        return requests

    # -- what comes out --------------------------------------------------------------------------------------

    def take_ended(self) -> list[Request]:
        """Requests that ended since the last call, in the order of their ends."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def idle(self) -> bool:
        return not self._live

    @property
    def live(self) -> Mapping[str, Request]:
        return self._live

    @property
    def caps(self) -> Mapping[tuple[str, Hashable], int]:
        """Limits that are lowered because memory ran out, in rows, by (modality, group)."""
        return self._limits.lowered()

    def counts(self) -> dict[str, tuple[int, int]]:
        """(waiting, running) by modality."""
        waiting, running = self._admission.waiting, self._admission.running
        return {name: (waiting[name].count, len(running[name])) for name in self._runners}

    def next_deadline(self) -> float:
        """The earliest deadline among live requests; infinite if there is none."""
        while self._deadlines and self._deadlines[0][2].state.final:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def check_idle(self) -> None:
        """Raise RuntimeError if an idle scheduler still counts anything, or a runner still holds anything."""
        counts = self.counts()
        if self._live or any(self._batcher.flying.values()) or any(running for _, running in counts.values()):
            raise RuntimeError("the scheduler is not idle")
        if any(waiting for waiting, _ in counts.values()):
            raise RuntimeError(f"idle, but counted as waiting: {counts}")
        for name, runner in self._runners.items():
            if runner.held():
                raise RuntimeError(f"idle, but the {name} runner still holds {runner.held()} slots")

    # -- the decision ----------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[Batch]:
        """End what has expired, admit what fits, and return the batches to launch now, at most one a lane."""
        self._sweep()
        while self.next_deadline() <= now:
            self._end(heapq.heappop(self._deadlines)[2], State.EXPIRED, now)
        admission, batcher = self._admission, self._batcher
        admission.aged.age(now)
        for name in self._runners:
            while (refused := admission.admit(name, now)) is not None:
                self._end(refused, State.FAILED, now)
        ended, batches = len(self._ended), []
        lanes = batcher.ready(admission.running)
        for lane in [*lanes]:
            batch = batcher.form(lane, lanes[lane], now) if lane in lanes else None
            if batch is None:
                continue
            running = len(admission.running[batch.runner.modality])
            if admission.reserve(batch):
                batcher.launch(batch)
                batches.append(batch)
            elif batch.requests[0].error is not None:
                self._end(batch.requests[0], State.FAILED, now)
            if len(admission.running[batch.runner.modality]) < running:  # they may have been ready on other lanes
                lanes = batcher.ready(admission.running)
        # what a lane left to a request that has failed since is due now
        return batches or (self.schedule(now) if len(self._ended) > ended else [])

    def _sweep(self) -> None:
        """Let go of requests that ended where they outnumber those that live: heaps keep their results."""
        if len(self._deadlines) > 2 * len(self._live) + 16:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].state.final]
            heapq.heapify(self._deadlines)
        for waiting in self._admission.waiting.values():
            waiting.sweep()

    # -- what came of it -------------------------------------------------------------------------------------

    def finish(self, batch: Batch, outcomes: Mapping[str, Outcome], now: float) -> None:
        """Take in the outcome of a batch that ran. Every request of the batch must have one."""
        self._batcher.land(batch)
        self._limits.fitted(batch.runner, batch.group, batch.rows)
        for request in batch.requests:
            outcome = outcomes.get(request.id)
            request.alone = False
            if request.deadline <= now:
                request.stop = request.stop or State.EXPIRED
            if request.stop is not None:
                self._end(request, request.stop, now)
            elif outcome is None:
                lost = f"the {request.modality} runner returned no outcome for {request.id}"
                request.error = RuntimeError(lost)
                self._end(request, State.FAILED, now)
            elif outcome.error is not None:
                request.error = outcome.error
                self._end(request, State.FAILED, now)
            elif outcome.finished:
                request.result = outcome.result
                self._end(request, State.DONE, now)

    def fail(self, batch: Batch, error: BaseException, now: float) -> int | None:
        """Take in the failure of a whole batch: its requests are tried again one by one, to fail alone.

        Out of memory halves what a batch of this group may hold instead: the rows are returned.
        """
        self._batcher.land(batch)
        many = len(batch.requests) > 1
        lowered = None
        if many and isinstance(error, OutOfMemory):
            lowered = self._limits.lower(batch.runner, batch.group, batch.rows)
        for request in batch.requests:
            if request.stop is not None:
                self._end(request, request.stop, now)
            elif not many:
                request.error = error
                self._end(request, State.FAILED, now)
            elif not isinstance(error, OutOfMemory):
                request.alone = True
        return lowered

    def _end(self, request: Request, state: State, now: float) -> None:
        """End the request at once, or when its iteration ends: until then its slots are in use."""
        if request.in_flight:
            request.stop = request.stop or state
            return
        self._admission.remove(request)
        request.state = state
        request.ended = now
        del self._live[request.id]
        self._ended.append(request)
