"""Which requests share the next forward, on each lane of the device.

Pure Python with no clock and no threads: time is handed in, so that the same code runs under a virtual clock
in tests and in the simulator.

The policy, in the order in which it is applied:

* Tenants. Of several tenants' requests those go first whose tenant was charged the least of the device, on whatever
  lane, and others join them only so far that it gets its share (shares.py). What follows is among one tenant's own.
* Urgency. Priority first; within a priority the earliest deadline (given, or arrival plus the runner's
  patience). A tenant's oldest request of a modality, once it is older than `starvation_s`, goes before all others of
  its tenant's: one at a time, so that an overload does not wash priorities away, yet nothing waits for ever. Of two
  modalities' elders on one lane the older goes first, whatever its priority.
* Leader. On each lane the most urgent ready request leads, and its group runs.
* One shot first. A group whose requests need one iteration only (a prompt to encode, a latent to decode) goes
  before the leader's group where that lowers the sum of waiting times (Smith's rule): it delays the n
  requests of the leader's batch by its own cost, and spares its k requests what the leader's group still has
  to do. Never against a deadline that someone set in that batch, and never twice in a row before an elder.
* Cohorts. Where the requests of another group come into the leader's group by one iteration (DeepCache's shallow
  steps before a deep one), that group goes first if this lets enough of them share the leader's forward: the cost
  curves say what is saved. The leader is held for one iteration, never twice in a row, never for lesser priorities,
  and never against a deadline that someone set.
* Width. The batch takes the most urgent k requests, k chosen to minimise the mean completion time if all that
  is queued for this group, and the successors that will come while it is served, were served in waves of k.
  With cost(k) flat this is as wide as can be; with cost linear in rows it is 1; and as the queue grows it
  tends to the k of the highest throughput. Where requests stream (GrowingRunner) all go together that the runner's pace
  has time for: whoever is left out would fall silent. And while they do, no other batch of more than one request takes
  longer than the pace leaves over.
* Second place (`depth` 2). A batch queues behind a running one only if it would not do better to join it at the
  next iteration, and never behind one of more urgent priorities: those would wait for it at every step.
* Memory. A batch that did not fit halves what its group may hold (limits.py). Where a runner's requests grow and there
  is too little for the next iteration, the least urgent request that is not under way waits again. And so it does for
  a request of a tenant that holds fewer places, by two at least.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from core.batching.elders import Elders
from core.batching.limits import Limits
from core.batching.policy import Groups, Key, Policy
from core.batching.request import Outcome, Request, State
from core.batching.runner import DeviceLost, GrowingRunner, OutOfMemory, Runner
from core.batching.shares import Shares
from core.batching.waiting import Waiting

_QUEUE_BEHIND_LOSS = 1.05  # a second batch may queue behind one if that costs at most 5% over one wider batch


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that share one forward. `rows` counts their rows, before any padding to a bucket."""

    runner: Runner
    group: Hashable
    lane: str
    requests: list[Request]
    rows: int


class Scheduler:
    """Keeps every request from `add` to its end, and forms batches; a lane may hold `depth` of them."""

    def __init__(self, runners: Sequence[Runner], *, depth: int = 1, starvation_s: float = 60.0) -> None:
        self._runners = {runner.modality: runner for runner in runners}
        if len(self._runners) != len(runners):
            raise ValueError("two runners have the same modality")
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self._growing = {name: runner for name, runner in self._runners.items() if isinstance(runner, GrowingRunner)}
        self._depth = depth
        self._live: dict[str, Request] = {}
        self._shares = Shares(self._runners)
        self._waiting = {name: Waiting(self._shares) for name in self._runners}
        self._running: dict[str, dict[str, Request]] = {name: {} for name in self._runners}
        self._elders = Elders(starvation_s, self._promote)
        self._deadlines: list[tuple[float, int, Request]] = []
        self._flying: dict[str, list[Batch]] = {}
        self._yielded: set[str] = set()  # lanes whose last batch was a one-shot that went before an elder
        self._held: set[str] = set()  # lanes whose last batch was one that the leader was held for
        self._limits = Limits()
        self._policy = Policy(self._runners, self._limits, self._waiting, self._running, self._shares)
        self._ended: list[Request] = []
        self._sequence = 0

    # -- what goes in ----------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Take a request in. Raises ValueError for an id that is live or a modality that no runner serves."""
        if request.id in self._live:
            raise ValueError(f"id {request.id!r} is already in use by a live request")
        runner = self._runner(request)
        self._sequence += 1
        request.sequence = self._sequence
        request.arrival = now
        request.state = State.WAITING
        request.due = request.deadline if request.deadline < math.inf else now + runner.patience_s
        self._live[request.id] = request
        self._elders.add(request)
        self._shares.enter(request)
        self._waiting[request.modality].add(request)
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.sequence, request))

    def abort(self, request_id: str, now: float) -> bool:
        """End a request early: at once, or when the iteration under way ends. False if it is not live."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self._stop(request, State.ABORTED, now)
        return True

    def hand_back(self) -> list[Request]:
        """Take out and forget every request that has not started, most urgent first. It may be added anew."""
        waiting = sorted((r for r in self._live.values() if r.state is State.WAITING), key=lambda r: r.urgency)
        taken = [request for request in waiting if request.started is None]
        for request in taken:
            del self._live[request.id]
            self._shares.leave(request)
            self._elders.remove(request)
            request.sequence = 0
        for name, left in self._waiting.items():  # what was begun and has to wait again stays
            left.reset(r for r in waiting if r.started is not None and r.modality == name)
        self._deadlines = [entry for entry in self._deadlines if self._live.get(entry[2].id) is entry[2]]
        heapq.heapify(self._deadlines)
        return taken

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
        return {name: (self._waiting[name].count, len(self._running[name])) for name in self._runners}

    def next_deadline(self) -> float:
        """The earliest deadline among live requests; infinite if there is none."""
        while self._deadlines and self._deadlines[0][2].state.final:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def check_idle(self) -> None:
        """Raise RuntimeError if an idle scheduler still counts anything, or a runner still holds anything."""
        if self._live or any(self._flying.values()) or any(self._running.values()):
            raise RuntimeError("the scheduler is not idle")
        if any(waiting.count for waiting in self._waiting.values()):
            raise RuntimeError(f"idle, but counted as waiting: {self.counts()}")
        for name, runner in self._runners.items():
            if runner.held():
                raise RuntimeError(f"idle, but the {name} runner still holds {runner.held()} slots")

    # -- the decision ----------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[Batch]:
        """End what has expired, admit what fits, and return the batches to launch now, at most one a lane."""
        self._sweep()
        while self.next_deadline() <= now:
            self._stop(heapq.heappop(self._deadlines)[2], State.EXPIRED, now)
        self._elders.age(now)
        for name in self._runners:
            self._admit(name, now)
        lanes: dict[str, dict[Key, list[Request]]] = {}
        for name, running in self._running.items():
            runner = self._runners[name]
            for request in running.values():
                if not request.in_flight:
                    group = runner.group(request)
                    key = (name, group, request.id if request.alone else "")
                    lanes.setdefault(runner.lane(group), {}).setdefault(key, []).append(request)
        ended, batches = len(self._ended), []
        for lane, groups in lanes.items():
            if len(self._flying.get(lane, ())) >= self._depth:
                continue
            for requests in groups.values():
                requests.sort(key=self._shares.order)
            batch = self._form(lane, groups, now)
            if batch is not None and self._make_room(batch, now):
                self._launch(batch)
                batches.append(batch)
        # what a lane left to a request that has failed since is due now
        return batches or (self.schedule(now) if len(self._ended) > ended else [])

    def _form(self, lane: str, groups: Groups, now: float) -> Batch | None:
        """The batch that runs next on a free place of a lane, or None where waiting is better."""
        led = min(groups, key=lambda key: self._shares.order(groups[key][0]))
        if self._shares.yields(groups[led][0]):
            return None
        elder = groups[led][0].elder
        # retries first, or the first one to succeed would run ahead alone and its cohort never meet again
        retries = [key for key in groups if key[2] and key[:2] == led[:2]]
        led = min(retries, key=lambda key: groups[key][0].urgency, default=led)
        yielded = elder and lane in self._yielded
        before = None if yielded or retries else self._policy.one_shot_before(led, groups, now)
        joining = (
            None if before or elder or retries or lane in self._held else self._policy.cohort_before(led, groups, now)
        )
        chosen = before or joining or led
        name, group, alone = chosen
        runner = self._runners[name]
        requests = self._policy.widest(runner, group, groups[chosen], bool(alone))
        rows = sum(runner.rows(r) for r in requests)
        for flying in self._flying.get(lane, ()):
            first = requests[0]
            if not elder and any(r.tenant == first.tenant and r.priority < first.priority for r in flying.requests):
                return None
            # Behind a batch of its own group a second one is worth its place only where cost is linear in
            # rows: elsewhere its requests do better to join the first ones at the next iteration.
            together = flying.rows + rows
            same = flying.group == group and flying.runner is runner
            if same and together <= self._limits.of(runner, group):
                apart_s = runner.cost(group, flying.rows) + runner.cost(group, rows)
                if apart_s > _QUEUE_BEHIND_LOSS * runner.cost(group, together):
                    return None
        for lanes, so in ((self._yielded, bool(elder and before)), (self._held, joining is not None)):
            if so:
                lanes.add(lane)
            else:
                lanes.discard(lane)
        return Batch(runner, group, lane, requests, rows)

    def _promote(self, request: Request) -> None:
        """It is an elder from now on."""
        running = request.state is State.RUNNING
        if running:
            self._shares.stop(request)
        self._shares.leave(request)
        request.elder = True
        self._shares.enter(request)
        if running:
            self._shares.begin(request)
        else:
            self._waiting[request.modality].place(request)

    def _sweep(self) -> None:
        """Let go of requests that ended where they outnumber those that live: heaps keep their results."""
        if len(self._deadlines) > 2 * len(self._live) + 16:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].state.final]
            heapq.heapify(self._deadlines)
        for waiting in self._waiting.values():
            waiting.sweep()

    def _admit(self, name: str, now: float) -> None:
        """Admit by urgency until the runner says not yet: nobody overtakes whoever needs more room."""
        runner, waiting, running = self._runners[name], self._waiting[name], self._running[name]
        growing = self._growing.get(name)
        while (request := waiting.first()) is not None:
            try:
                admitted = runner.admit(request)
                while not admitted and growing and (victim := self._shares.preemption_victim(request, running)):
                    self._wait_again(growing, victim)
                    admitted = runner.admit(request)
            except DeviceLost:
                raise
            except Exception as error:
                request.error = error
                self._end(request, State.FAILED, now)
                continue
            if not admitted:
                if running:
                    return
                request.error = OutOfMemory(f"request {request.id} needs more than all the {name} runner has")
                self._end(request, State.FAILED, now)
                continue
            waiting.count -= 1
            request.state = State.RUNNING
            request.started = now if request.started is None else request.started
            running[request.id] = request
            self._shares.begin(request)

    def _make_room(self, batch: Batch, now: float) -> bool:
        """Have the runner take what the batch needs, at the cost of the least urgent. False: nothing to launch now."""
        name, first = batch.runner.modality, batch.requests[0]
        runner = self._growing.get(name)
        while runner is not None and not runner.reserve(batch.requests):
            others = [r for r in self._running[name].values() if r is not first and not r.in_flight]
            if others:
                last = max(others, key=self._shares.order)
                if last in batch.requests:
                    batch.requests.remove(last)
                    batch.rows -= runner.rows(last)
                self._wait_again(runner, last)
            elif len(self._running[name]) > 1:
                return False  # what is under way will end and can then be made to wait
            else:
                first.error = OutOfMemory(f"request {first.id} needs more than all the {name} runner has")
                self._end(first, State.FAILED, now)
                return False
        return True

    def _wait_again(self, runner: GrowingRunner, request: Request) -> None:
        runner.preempt(request)
        self._shares.stop(request)
        del self._running[request.modality][request.id]
        request.state = State.WAITING
        self._waiting[request.modality].add(request)

    def _launch(self, batch: Batch) -> None:
        for request in batch.requests:
            request.in_flight = True
        self._flying.setdefault(batch.lane, []).append(batch)
        self._shares.charge(batch.runner, batch.group, batch.requests, batch.rows)

    # -- what came of it -------------------------------------------------------------------------------------

    def finish(self, batch: Batch, outcomes: Mapping[str, Outcome], now: float) -> None:
        """Take in the outcome of a batch that ran. Every request of the batch must have one."""
        self._land(batch)
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

    def fail(self, batch: Batch, error: BaseException, now: float) -> None:
        """Take in the failure of a whole batch: its requests are tried again one by one, to fail alone.

        Out of memory halves what a batch of this group may hold instead.
        """
        self._land(batch)
        many = len(batch.requests) > 1
        if many and isinstance(error, OutOfMemory):
            self._limits.lower(batch.runner, batch.group, batch.rows)
        for request in batch.requests:
            if request.stop is not None:
                self._end(request, request.stop, now)
            elif not many:
                request.error = error
                self._end(request, State.FAILED, now)
            elif not isinstance(error, OutOfMemory):
                request.alone = True

    def _land(self, batch: Batch) -> None:
        self._flying[batch.lane].remove(batch)
        for request in batch.requests:
            request.in_flight = False

    def _stop(self, request: Request, state: State, now: float) -> None:
        if request.state.final:
            return
        if request.in_flight:
            request.stop = request.stop or state  # its slots are in use until the iteration ends
        else:
            self._end(request, state, now)

    def _end(self, request: Request, state: State, now: float) -> None:
        if request.state is State.RUNNING:
            self._shares.stop(request)
            del self._running[request.modality][request.id]
            self._runners[request.modality].release(request)
        else:
            self._waiting[request.modality].count -= 1
        request.state = state
        request.ended = now
        del self._live[request.id]
        self._shares.leave(request)
        self._elders.remove(request)
        self._ended.append(request)

    def _runner(self, request: Request) -> Runner:
        try:
            return self._runners[request.modality]
        except KeyError:
            served = ", ".join(self._runners)
            raise ValueError(f"modality {request.modality!r} is not served here; served: {served}") from None
