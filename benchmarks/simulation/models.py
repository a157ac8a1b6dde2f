"""Simulates a fleet of GPUs that serve many models: residency, routing by model, autoscaling and cascades.

Coarser than `fleet`, which runs the scheduler's every decision: a device here advances all pictures in its batches by
one step a round, and a round takes one forward for each model and kind of picture, of all its pictures up to the widest
forward, by the same cost tables. So an arrival and a picture's end are all that happens, and a thousand devices are
simulated on one core. Workers route by the rule of the service: they take jobs of models that they hold in turn, and
load another one where none could run its next job sooner, or where that has waited for longer than the load takes.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.simulation.costs import ENCODE, STEPS, VAE, Costs
from benchmarks.simulation.runner import Device, SimulatedRunner, limit, phases_of
from contract.image import ImageParameters
from core.batching.admission import Admission
from core.batching.limits import Limits
from core.batching.policy import SchedulingPolicy
from core.batching.request import Request

_ROUNDING = 1e-6  # of a round
_ROUTES_S = 1.0  # between decisions of a worker which models it takes jobs of


@dataclass(frozen=True)
class Residency:
    """Where models are. `loaded` fit on a device beside its pictures, and `pinned` more in a worker's host memory.

    `load_s` reads a model from disk, `switch_s` copies one from host memory; steps go on meanwhile.
    """

    loaded: int = 1
    pinned: int = 0
    load_s: float = 0.0
    switch_s: float = 0.0


@dataclass(frozen=True)
class Scaling:
    """Autoscaling of devices between `least` and `most`: one for each `work_s` seconds of a device that are queued or
    in the making, counted every `poll_s`. A device serves `start_s` after it is asked for, and is given back once no
    fewer were needed for `cooldown_s`.
    """

    least: int
    most: int
    work_s: float = 10.0
    poll_s: float = 15.0
    start_s: float = 90.0
    cooldown_s: float = 300.0


@dataclass(frozen=True, eq=False)
class Stage:
    """One pass of a picture: its rounds, seconds of a round by the number of pictures in one forward, and how many of
    those that a worker has the scheduler takes into one.
    """

    steps: int
    round_s: tuple[float, ...]  # [pictures], from 0 to the widest forward
    before_s: float  # of the device: the prompt
    after_s: float  # of the device: decoding, and what the host takes
    widths: tuple[int, ...]  # [pictures that the worker has], from 0 to its places

    @classmethod
    def of(
        cls, costs: Costs, device: Device, parameters: ImageParameters, *, places: int = 32, host_s: float = 0.0
    ) -> Stage:
        """`host_s`: seconds of the device that each picture costs outside of its iterations."""
        phases = phases_of(parameters)
        steps = [(group, rows) for group, rows in phases if group.phase in STEPS]
        widest = min(limit(costs, device, group) // rows for group, rows in steps)
        rounds = [
            sum(costs(*group, rows * count) for group, rows in steps) / len(steps) for count in range(1, widest + 1)
        ]
        before_s = sum(costs(*group, rows) for group, rows in phases if group.phase == ENCODE)
        after_s = sum(costs(*group, rows) for group, rows in phases if group.phase == VAE) + host_s
        widths = [min(widest, _width(costs, device, parameters, count)) for count in range(1, places + 1)]
        return cls(len(steps), (0.0, *rounds), before_s, after_s, (0, *widths))

    @property
    def least_s(self) -> float:
        """Seconds of a device that a picture costs in forwards as wide as pays best."""
        rounds_s = self.steps * min(s / count for count, s in enumerate(self.round_s) if count)
        return self.before_s + rounds_s + self.after_s

    @property
    def solo_s(self) -> float:
        return self.before_s + self.steps * self.round_s[1] + self.after_s


def _width(costs: Costs, device: Device, parameters: ImageParameters, count: int) -> int:
    """How many of so many equal pictures at their first step the scheduler takes into one forward."""
    runner = SimulatedRunner(costs, device, lambda: 0.0)
    runners = {runner.modality: runner}
    admission = Admission(runners, starvation_s=device.starvation_s)
    policy = SchedulingPolicy(runners, Limits(), admission.waiting, admission.running, admission.shares)
    for number in range(count):
        request = Request(str(number), runner.modality, parameters)
        admission.add(request)
    admission.admit(runner.modality, 0.0)
    admitted = list(admission.running[runner.modality].values())
    for request in admitted:
        runner.commit(request)  # its prompt
    return len(policy.widest(runner, runner.group(admitted[0]), admitted, False))


@dataclass(frozen=True)
class ModelJob:
    """A picture of a model, and the stages that it takes: a cascade's rejected draft has two."""

    arrival: float
    model: int
    stages: tuple[Stage, ...]


@dataclass
class FleetUsage:
    """Results. `latencies` by job, in order of arrival; `device_s`: seconds of devices that were held, or started."""

    latencies: list[float]
    ends: float = 0.0
    busy_s: float = 0.0
    device_s: float = 0.0
    loads: int = 0
    switches: int = 0
    most_devices: int = 0


@dataclass(slots=True, eq=False)
class _Batch:
    """Pictures of one model and stage on one device, first in first out: those in forwards, and those that wait.

    Entries are the job, which of its stages, its place in the worker's order, and the round at which the stage ends.
    """

    stage: Stage
    rounds: float = 0.0
    running: deque[tuple[int, int, int, float]] = field(default_factory=deque)
    waiting: deque[tuple[int, int, int]] = field(default_factory=deque)

    @property
    def round_s(self) -> float:
        return self.stage.round_s[len(self.running)]

    def fill(self) -> None:
        """Begin with as many as the scheduler would."""
        widths = self.stage.widths
        width = widths[min(len(self.running) + len(self.waiting), len(widths) - 1)]
        while self.waiting and len(self.running) < width:
            job, stage, order = self.waiting.popleft()
            self.running.append((job, stage, order, self.rounds + self.stage.steps))


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    asked: float  # when it was asked for
    models: OrderedDict[int, None] = field(default_factory=OrderedDict)  # loaded, the least recently used first
    pinned: OrderedDict[int, None] = field(default_factory=OrderedDict)
    loading: dict[int, deque[int]] = field(default_factory=dict)  # jobs that wait for each
    leaving: dict[int, int] = field(default_factory=dict)  # loaded model whose last jobs run → the one to load then
    jobs: dict[int, int] = field(default_factory=dict)  # how many it has, by model
    in_hand: int = 0
    batches: dict[tuple[int, Stage], _Batch] = field(default_factory=dict)
    leading: _Batch | None = None  # has the oldest picture: the device serves it until that has ended
    order: int = 0
    since: float = 0.0
    blocked: float = 0.0  # until when prompts and decoding take the device
    encoded: float = -math.inf
    decoding: dict[int, tuple[int, int]] = field(default_factory=dict)  # job → its stage and its place in the order
    version: int = 0
    draining: bool = False
    busy_s: float = 0.0

    def takes(self) -> list[int]:
        """The models that it takes jobs of."""
        return [*(model for model in self.models if model not in self.leaving), *self.loading]


class ModelFleet:
    """Devices on one clock. Without `scaling` all `gpus` serve from the start; `places` are a worker's `image_jobs`."""

    def __init__(
        self,
        gpus: int,
        *,
        places: int,
        residency: Residency,
        unit_s: float,
        scaling: Scaling | None = None,
        first: Sequence[int] = (),
    ) -> None:
        """`unit_s`: seconds of a device that a job takes, by which workers and the autoscaler count work. Workers have
        the models of `first` when they begin to serve.
        """
        self._first = first
        self._places = places
        self._residency = residency
        self._unit_s = unit_s
        self._scaling = scaling
        self._workers: list[_Worker] = []
        self._serving: dict[_Worker, None] = {}
        self._queues: dict[int, deque[int]] = {}  # by model with waiting jobs
        self._holders: dict[int, dict[_Worker, None]] = {}  # by model, who may take jobs of it: the next to take first
        self._events: list[tuple[float, int, int, _Worker | None, int]] = []
        self._sequence = 0
        self._jobs: Sequence[ModelJob] = ()
        self._usage = FleetUsage([])
        self._now = 0.0
        self._loaded_at: dict[int, dict[_Worker, None]] = {}  # by model, who takes jobs of it, full ones too
        self._pinned_at: dict[int, dict[_Worker, None]] = {}
        self._needed = deque[tuple[float, int]]()
        self._starting = 0
        self._queued = 0
        for _ in range(gpus if scaling is None else scaling.least):
            self._serve(self._hire())

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self, jobs: Sequence[ModelJob]) -> FleetUsage:
        """Serve all jobs, given in the order of their arrival. Can be called once per instance."""
        self._jobs, self._usage = jobs, FleetUsage([math.nan] * len(jobs))
        self._usage.most_devices = len(self._serving)
        self._call(_ROUTES_S, _ROUTE)
        if self._scaling is not None:
            self._call(0.0, _SCALE)
        self._left = len(jobs)
        following, count, events = 0, len(jobs), self._events
        while self._left:
            arrives = jobs[following].arrival if following < count else math.inf
            if arrives <= events[0][0]:
                self._now = arrives
                self._arrive(following)
                following += 1
            else:
                self._now, _, kind, worker, value = heapq.heappop(events)
                self._happen(kind, worker, value)
        usage = self._usage
        usage.ends = self._now
        for worker in self._workers:
            usage.busy_s += worker.busy_s
            if worker in self._serving or not worker.draining:
                usage.device_s += self._now - worker.asked
        return usage

    def _happen(self, kind: int, worker: _Worker | None, value: int) -> None:
        if kind == _END:
            assert worker is not None
            if worker.version == value:
                self._advance(worker)
                self._finish(worker)
        elif kind == _ROUTE:
            self._route()
            self._call(self._now + _ROUTES_S, _ROUTE)
        elif kind == _READY:
            assert worker is not None
            self._loaded(worker, value)
        elif kind == _DONE:
            assert worker is not None
            self._done(worker, value)
        elif kind == _SCALE:
            self._scale()
        else:
            assert worker is not None
            self._starting -= 1
            self._serve(worker)

    # -- the queue -------------------------------------------------------------------------------------------------

    def _arrive(self, job: int) -> None:
        model = self._jobs[job].model
        holders = self._holders.get(model)
        if holders:
            self._take(next(iter(holders)), job)
            return
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = deque()
        queue.append(job)
        self._queued += 1

    def _offer(self, worker: _Worker) -> None:
        """Record that a worker may take jobs of the models that it has, unless it is full, and give it those that
        wait, of its models in turn.
        """
        queues = self._queues
        while worker.in_hand < self._places and not worker.draining:
            waiting = [model for model in worker.takes() if model in queues]
            if not waiting:
                break
            for model in waiting:
                if worker.in_hand < self._places and model in queues:
                    self._take(worker, self._pop(model))
        if worker.in_hand < self._places and not worker.draining:
            for model in worker.takes():
                self._holders.setdefault(model, {}).setdefault(worker)

    def _pop(self, model: int) -> int:
        queue = self._queues[model]
        job = queue.popleft()
        if not queue:
            del self._queues[model]
        self._queued -= 1
        return job

    def _withdraw(self, worker: _Worker, models: Sequence[int]) -> None:
        for model in models:
            if model in self._holders:
                self._holders[model].pop(worker, None)

    def _take(self, worker: _Worker, job: int) -> None:
        model = self._jobs[job].model
        worker.in_hand += 1
        worker.jobs[model] = worker.jobs.get(model, 0) + 1
        if worker.in_hand == self._places:
            self._withdraw(worker, worker.takes())
        elif worker in (holders := self._holders.get(model, {})):
            del holders[worker]
            holders[worker] = None  # the longest waiting is served first
        if model in worker.loading:
            worker.loading[model].append(job)
            return
        worker.models.move_to_end(model)
        self._advance(worker)
        worker.order += 1
        self._start(worker, job, 0, worker.order)
        self._plan(worker)

    # -- a device --------------------------------------------------------------------------------------------------

    def _advance(self, worker: _Worker) -> None:
        """Bring a device's rounds up to now."""
        begins = min(max(worker.since, worker.blocked), self._now)
        if worker.leading is not None and begins < self._now:
            worker.leading.rounds += (self._now - begins) / worker.leading.round_s
        worker.busy_s += (begins if worker.leading is None else self._now) - worker.since
        worker.since = self._now

    def _start(self, worker: _Worker, job: int, stage: int, order: int) -> None:
        """A picture begins a stage, or waits for it."""
        record = self._jobs[job]
        key = record.model, record.stages[stage]
        batch = worker.batches.get(key)
        if batch is None:
            batch = worker.batches[key] = _Batch(record.stages[stage])
        batch.waiting.append((job, stage, order))
        batch.fill()
        # Prompts that come within one round are encoded together.
        if worker.leading is None or self._now - worker.encoded >= worker.leading.round_s:
            worker.encoded = self._now
            self._block(worker, batch.stage.before_s)

    def _block(self, worker: _Worker, seconds: float) -> None:
        worker.blocked = max(worker.blocked, self._now) + seconds

    def _finish(self, worker: _Worker) -> None:
        """Decode the pictures of the leading batch whose rounds are over."""
        batch = worker.leading
        assert batch is not None
        until = batch.rounds + _ROUNDING
        while batch.running and batch.running[0][3] <= until:
            job, stage, order, _ = batch.running.popleft()
            worker.decoding[job] = stage, order
            self._block(worker, batch.stage.after_s)
            self._call(worker.blocked, _DONE, worker, job)
        batch.fill()
        if not batch.running:
            del worker.batches[next(key for key, other in worker.batches.items() if other is batch)]
        worker.leading = None
        self._plan(worker)

    def _done(self, worker: _Worker, job: int) -> None:
        """A picture's stage has ended: it begins the next one, or its worker has a place for another."""
        self._advance(worker)
        record, (stage, order) = self._jobs[job], worker.decoding.pop(job)
        if stage + 1 < len(record.stages):
            self._start(worker, job, stage + 1, order)
        else:
            self._usage.latencies[job] = self._now - record.arrival
            self._left -= 1
            worker.in_hand -= 1
            model = record.model
            worker.jobs[model] -= 1
            if not worker.jobs[model]:
                del worker.jobs[model]
                if model in worker.leaving:
                    self._read(worker, worker.leaving.pop(model), model)
            if worker.draining and not worker.in_hand:
                self._dismiss(worker)
            else:
                self._offer(worker)
        self._plan(worker)

    def _plan(self, worker: _Worker) -> None:
        """The device serves the batch with the oldest picture next, until one of that batch ends."""
        worker.version += 1
        if worker.leading is None and worker.batches:
            worker.leading = min(worker.batches.values(), key=lambda batch: batch.running[0][2])
        batch = worker.leading
        if batch is not None:
            rounds = max(0.0, batch.running[0][3] - batch.rounds)
            self._call(max(worker.blocked, self._now) + rounds * batch.round_s, _END, worker, worker.version)

    # -- models ----------------------------------------------------------------------------------------------------

    def _route(self) -> None:
        """Load models that wait: where the delay is least if no worker that has it is nearer, and where a place is free
        if the first has waited for longer than a load takes.
        """
        if not self._queues:
            return
        free = [(worker.in_hand, worker.number, worker) for worker in self._serving if self._may_load(worker)]
        heapq.heapify(free)
        for model in [*self._queues]:
            if not free:
                return
            chosen = self._nearest(free, model)
            if chosen is None:
                continue
            delay_s, worker = chosen
            waited_s = self._now - self._jobs[self._queues[model][0]].arrival
            loaded_at = self._loaded_at.get(model, ())
            if waited_s <= delay_s and any(other.in_hand * self._unit_s <= delay_s for other in loaded_at):
                continue
            self._load(worker, model)
            if self._may_load(worker):
                heapq.heappush(free, (worker.in_hand, worker.number, worker))

    def _nearest(self, free: list[tuple[int, int, _Worker]], model: int) -> tuple[float, _Worker] | None:
        """The worker with a free place that could run a job first, and its delay; of those that neither have the model
        nor are about to drop it. It leaves `free`, unless its entry there lies deeper: then it stands there twice, to
        no harm.
        """
        loaded_at, skipped, chosen = self._loaded_at.get(model, {}), [], None
        while free:
            entry = heapq.heappop(free)
            if entry[2] not in loaded_at and model not in entry[2].leaving:
                chosen = entry[0] * self._unit_s + self._delay_s(entry[2], model), entry[2]
                break
            skipped.append(entry)
        for entry in skipped:
            heapq.heappush(free, entry)
        for worker in self._pinned_at.get(model, ()):
            delay_s = worker.in_hand * self._unit_s + self._residency.switch_s
            if self._may_load(worker) and chosen is not None and delay_s < chosen[0]:
                heapq.heappush(free, (chosen[1].in_hand, chosen[1].number, chosen[1]))
                chosen = delay_s, worker
        return chosen

    def _may_load(self, worker: _Worker) -> bool:
        """Return whether it has a free place, and room for a model beside those that it is about to load."""
        free = worker.in_hand < self._places and len(worker.loading) < self._residency.loaded
        return free and worker in self._serving and not worker.draining

    def _delay_s(self, worker: _Worker, model: int) -> float:
        return self._residency.switch_s if model in worker.pinned else self._residency.load_s

    def _load(self, worker: _Worker, model: int) -> None:
        """Take jobs of a model, and load it in the place of the least recently used one, which runs its last jobs."""
        worker.loading[model] = deque()
        self._loaded_at.setdefault(model, {})[worker] = None
        taken = len(worker.models) + len(worker.loading) - len(worker.leaving)
        if taken <= self._residency.loaded:
            self._read(worker, model, None)
        else:
            others = [other for other in worker.models if other not in worker.leaving]
            victim = next((other for other in others if other not in worker.jobs), others[0])
            self._withdraw(worker, (victim,))
            del self._loaded_at[victim][worker]
            if victim in worker.jobs:
                worker.leaving[victim] = model
            else:
                self._read(worker, model, victim)
        self._offer(worker)

    def _read(self, worker: _Worker, model: int, victim: int | None) -> None:
        """Begin to read a model, once the one in whose place it is has no jobs."""
        if victim is not None:
            del worker.models[victim]
            worker.pinned[victim] = None
            self._pinned_at.setdefault(victim, {})[worker] = None
        pinned = model in worker.pinned
        if pinned:
            self._unpin(worker, model)
        while len(worker.pinned) > self._residency.pinned:
            self._unpin(worker, next(iter(worker.pinned)))
        self._usage.loads += not pinned
        self._usage.switches += pinned
        delay_s = self._residency.switch_s if pinned else self._residency.load_s
        self._call(self._now + delay_s, _READY, worker, model)

    def _unpin(self, worker: _Worker, model: int) -> None:
        del worker.pinned[model]
        del self._pinned_at[model][worker]

    def _loaded(self, worker: _Worker, model: int) -> None:
        self._advance(worker)
        waiting = worker.loading.pop(model)
        worker.models[model] = None
        for job in waiting:
            worker.order += 1
            self._start(worker, job, 0, worker.order)
        self._plan(worker)

    # -- autoscaling -----------------------------------------------------------------------------------------------

    def _hire(self) -> _Worker:
        worker = _Worker(len(self._workers), self._now, since=self._now)
        self._workers.append(worker)
        return worker

    def _serve(self, worker: _Worker) -> None:
        self._serving[worker] = None
        self._usage.most_devices = max(self._usage.most_devices, len(self._serving))
        for model in self._first:
            worker.models[model] = None
            self._loaded_at.setdefault(model, {})[worker] = None
        self._offer(worker)

    def _dismiss(self, worker: _Worker) -> None:
        del self._serving[worker]
        for pinned in [*worker.pinned]:
            self._unpin(worker, pinned)
        self._usage.device_s += self._now - worker.asked

    def _scale(self) -> None:
        scaling = self._scaling
        assert scaling is not None
        active = [worker for worker in self._serving if not worker.draining]
        work_s = self._unit_s * (self._queued + sum(worker.in_hand for worker in self._serving))
        needed = min(scaling.most, max(scaling.least, math.ceil(work_s / scaling.work_s)))
        self._needed.append((self._now, needed))
        while self._needed[0][0] < self._now - scaling.cooldown_s:
            self._needed.popleft()
        for _ in range(needed - len(active) - self._starting):
            self._starting += 1
            self._call(self._now + scaling.start_s, _START, self._hire())
        kept = max(count for _, count in self._needed)
        for worker in sorted(active, key=lambda worker: worker.in_hand)[: max(0, len(active) - kept)]:
            worker.draining = True
            self._withdraw(worker, worker.takes())
            for model in worker.takes():
                del self._loaded_at[model][worker]
            if not worker.in_hand:
                self._dismiss(worker)
        self._call(self._now + scaling.poll_s, _SCALE)

    def _call(self, when: float, kind: int, worker: _Worker | None = None, value: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (when, self._sequence, kind, worker, value))


_END, _DONE, _ROUTE, _READY, _SCALE, _START = range(6)
