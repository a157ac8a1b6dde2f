"""Serves several models as one runner: a model is in memory while requests use it, others as far as they fit."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from contract.errors import Invalid
from contract.image import ImageParameters
from core.batching.request import Request
from core.batching.runner import NotYet, Runner, Ticket
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions.asset_cache import Asset, AssetCache, ReadFile
from pipeline.extensions.registry import KINDS
from pipeline.families.diffusers.runner import DiffusersRunner
from pipeline.runner import ImageRunner
from pipeline.tenant_threads import TenantThreads

log = logging.getLogger(__name__)

Pooled = ImageRunner | DiffusersRunner


class PooledRunner(Runner, Protocol):
    """A runner of one model, which can be closed."""

    def close(self) -> None: ...


R = TypeVar("R", bound=PooledRunner)

_STAMP = ""  # models do not change while they are served
_TAKEN_S = 2.0  # after which a model that was loaded for a request, which did not take it, may be evicted for another
_SHARE = 4  # a model that waits for room waits so many times as long as it loads, at least `_LEAST_S`
_LEAST_S = 1.0
_ASKED_S = 2.0  # a model whose requests wait is asked for more often than that
_CHECKS = 8  # requests that are checked at once, each of another tenant
_RETRY_S = 5.0  # between attempts to load a model that could not be loaded


class ModelGroup(NamedTuple):
    """A group of requests of one model."""

    model: str
    group: Hashable

    @property
    def phase(self) -> str:
        return str(getattr(self.group, "phase", self.group))


class Lease(NamedTuple, Generic[R]):
    """A model that a running request keeps in memory."""

    asset: Asset[R]
    runner: R


class Facts(NamedTuple):
    """What is known of a loaded model (`ReadFile`)."""

    name: str
    digest: str
    size_bytes: int
    facts: Any


class Checked(NamedTuple, Generic[R]):
    """What a model's runner found out about a request (`Request.checked`); another load of it has other files."""

    runner: weakref.ref[R]
    inputs: Any


class Check(NamedTuple, Generic[R]):
    """A request that is checked by its model, which that keeps in memory."""

    request: Request
    lease: Asset[R]
    result: Future[None]


class ModelPool(Generic[R]):
    """The runner of a worker that serves several models; a request's is `Request.model`. `names` are in order; the
    first stays in memory.

    Models take turns on one lane as groups of one runner do. A model that is not in memory is loaded by a thread of
    its own when its first request is to be admitted; requests of other models go on meanwhile. One that has left the
    device's memory may be kept in the host's, from where it comes back without being loaded. Where it does not fit
    beside models that are in use, requests of these overtake it for four times as long as it loads; then nothing is
    admitted until there is room.
    """

    modality = "image"

    def __init__(
        self,
        names: Sequence[str],
        load: Callable[[str], ReadFile[R]],
        capacity_bytes: int,
        *,
        patience_s: float = 20.0,
        idle_s: float = 0.0,
        host_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` makes a model's runner, with its size; it raises `ModelError`. `capacity_bytes` limits the sizes of
        all models in memory. After `idle_s` without a request a model is evicted; 0: never. `host_bytes` limits the
        sizes of models that are kept in the host's memory.
        """
        self.names = tuple(names)
        self.patience_s = patience_s
        self._load_model, self._clock, self._idle_s = load, clock, idle_s
        self._models: AssetCache[R] = AssetCache(
            "model", capacity_bytes, self._load, free=self._retire, loaded=lambda: self.retry_admission()
        )
        self._host_bytes = host_bytes
        self._offloaded: OrderedDict[str, ReadFile[R]] = OrderedDict()  # least recently used first
        self._offloading = threading.Lock()
        self._facts: weakref.WeakKeyDictionary[R, Facts] = weakref.WeakKeyDictionary()
        self._leases: dict[str, Lease[R]] = {}  # by request
        self._load_s: dict[str, float] = {}
        self._least_load_s: dict[tuple[str, bool], float] = {}  # also by whether it was in the host's memory
        self._sizes: dict[str, int] = {}  # bytes
        self._used: dict[str, float] = {}  # when a model's last request ended
        self._checks: dict[str, Check[R]] = {}  # by request
        self._retry_at: dict[str, float] = {}  # when a model that could not be loaded is tried again
        self._waiting: dict[str, tuple[float, float]] = {}  # since when a model waits for room, and when it last did
        self._next, self._next_seen = "", 0.0  # the model that is loaded for a request which waits
        self._threads = TenantThreads("checks", _CHECKS)
        self._closed = threading.Event()
        self.retry_admission: Callable[[], object] = lambda: None  # the engine's

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def start(self) -> R:
        """Load the first model, which stays. Raises `ModelError`."""
        runner, _ = self.load(self.names[0])
        self._models.take(self.names[:1], wait=False)
        if self._idle_s:
            threading.Thread(target=self._evict_idle, name="idle models", daemon=True).start()
        return runner

    def load(self, name: str) -> tuple[R, Any]:
        """Return a model and what is known of it (`ReadFile.facts`), loaded if need be.

        Raises `ModelError`, also for one that does not fit beside the first: it is not served.
        """
        runner, model, first = self._models.get(name, _STAMP), *map(self._models.known, (name, self.names[0]))
        needed = model.size_bytes + (first.size_bytes if model is not first else 0)
        if needed > self._models.capacity:
            del self._load_s[name]
            self._models.evict([name])
            raise ModelError(
                f"{name}: needs {needed} bytes with {self.names[0]}, and models have {self._models.capacity}"
            )
        return runner, model.facts

    def evict(self, names: Iterable[str]) -> None:
        """Have models leave the memory that no request uses."""
        self._models.evict(names)

    def resident(self, name: str) -> R | None:
        """Return a model that is in memory."""
        return self._models.resident(name)

    def load_s(self, name: str) -> float:
        """Return how long a model takes to load as it last was, at least; 0: it never was."""
        return self._load_s.get(name, 0.0)

    def _load(self, name: str) -> ReadFile[R]:
        with self._offloading:
            offloaded = self._offloaded.pop(name, None)
        self._models.make_room(self._loading_bytes(name) if offloaded is None else offloaded.size_bytes)
        started = self._clock()
        if offloaded is None:
            read = self._load_model(name)
        else:
            assert isinstance(offloaded.content, ImageRunner)  # others do not leave for the host's memory
            offloaded.content.backend.offload(back=True)
            read = offloaded
        self._facts[read.content] = Facts(name, read.digest, read.size_bytes, read.facts)
        kind, took_s = (name, offloaded is not None), self._clock() - started
        # The least: one load while the machine was busy must not keep a model's jobs from it until the next.
        self._load_s[name] = self._least_load_s[kind] = min(took_s, self._least_load_s.get(kind, took_s))
        self._sizes[name] = read.size_bytes
        self._used[name] = self._clock()
        log.info("%s: %.0f MiB were loaded in %.1f s", name, read.size_bytes / 2**20, took_s)
        return read

    def _loading_bytes(self, name: str) -> int:
        """Return what a model takes while it is loaded: as the largest, with parts that turn out to be another's."""
        return max(self._sizes.values(), default=0)

    def _retire(self, runners: list[R]) -> None:
        """Keep evicted models in the host's memory as far as it is for them; close the others. Empties the list."""
        closed: list[R] = []
        while runners:
            runner = runners.pop()
            with self._offloading:
                if not self._offload(runner):
                    closed.append(runner)
                while sum(read.size_bytes for read in self._offloaded.values()) > self._host_bytes:
                    closed.append(self._offloaded.popitem(last=False)[1].content)
            del runner
        _free(closed)

    def _offload(self, runner: R) -> bool:
        name, digest, size_bytes, facts = self._facts[runner]
        if (
            not isinstance(runner, ImageRunner)
            or size_bytes > self._host_bytes
            or name in self._offloaded
            or self.closed
        ):
            return False
        if self._models.resident(name) is not None or self._models.loading(name):  # it was asked for meanwhile
            return False
        try:
            if not runner.backend.offload():
                return False
        except Exception as error:
            log.warning("%s leaves memory: it could not be moved to the host's (%s)", name, type(error).__name__)
            return False
        runner.clear_caches()
        self._offloaded[name] = ReadFile(runner, digest, size_bytes, facts)
        return True

    def _evict_idle(self) -> None:
        while not self._closed.wait(min(self._idle_s, 1.0)):
            until = self._clock() - self._idle_s
            self.evict([name for name in self.names[1:] if self._used.get(name, until) < until])

    # -- called by the scheduler ------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise `Invalid` as the model's runner does; a model that is not in memory checks a request before it admits
        it.
        """
        if request.model not in self._load_s:
            raise Invalid("model", "is none of this worker's")
        runner = self._models.resident(request.model)
        if runner is not None:
            _check(runner, request)

    def resources(self, request: Request) -> frozenset[str]:
        """The fields whose files the request needs, or else the model: neither waits for the other."""
        return frozenset(_resource(request.model, field) for field in _files(request) or [""])

    def admit(self, request: Request) -> NotYet | None:
        self._drop_checks()
        check = self._checks.get(request.id)
        if check is not None and not check.result.done():
            return NotYet(_resource(request.model), pending=True)
        lease = self._acquire(request.model) if check is None else self._checks.pop(request.id).lease
        if isinstance(lease, NotYet):
            return lease
        try:
            if check is not None:
                check.result.result()
            return self._admit(request, lease)
        except BaseException as error:
            if lease.error is not None:
                self._retry_at[request.model] = self._clock() + _RETRY_S
            self._models.give([lease])
            raise error.with_traceback(None) from None  # its frames refer to the model, which may be evicted

    def _admit(self, request: Request, lease: Asset[R]) -> NotYet | None:
        runner, checked = self._models.content(lease), request.checked
        if not isinstance(checked, Checked) or checked.runner() is not runner:
            # Not on this thread: it reads files.
            result = self._threads.submit(request.tenant, _check, runner, request)
            self._checks[request.id] = Check(request, lease, result)
            result.add_done_callback(lambda _: self.retry_admission())
            return NotYet(_resource(request.model), pending=True)
        request.checked = checked.inputs
        refusal = runner.admit(request)
        if refusal is None:
            self._leases[request.id] = Lease(lease, runner)
            return None
        request.checked = checked
        self._models.give([lease], keep=True)
        return NotYet(_resource(request.model, refusal.resource) if refusal.resource else "")

    def _drop_checks(self) -> None:
        """Release the models of requests that ended while they were checked."""
        for id, check in [*self._checks.items()]:
            if check.request.state.final and check.result.done():
                del self._checks[id]
                self._models.give([check.lease])

    def _acquire(self, name: str) -> Asset[R] | NotYet:
        """Pin a model. While it is loaded only its own requests wait for it, and so they do for room at first."""
        now, waits = self._clock(), NotYet(_resource(name), pending=True)
        if self._next and self._next != name and self._models.resident(name) is None:
            if self._models.loading(self._next):
                self._next_seen = now
            if now < self._next_seen + _TAKEN_S:
                return waits
        asset = self._models.known(name)
        if asset.error is not None and now >= self._retry_at.get(name, math.inf):
            asset.error = None
        assets = self._models.take([name], wait=True)
        if assets is not None:
            self._waiting.pop(name, None)
            if self._next == name:  # the others' patience begins anew, or all would be loaded in turn
                self._next, self._waiting = "", dict.fromkeys(self._waiting, (now, now))
            return assets[0]
        if self._models.loading(name) or asset.error is not None:
            self._next, self._next_seen = name, now
            return waits
        since, last = self._waiting.get(name, (now, now))
        since = now if last < now - _ASKED_S else since  # whoever waited then has left
        self._waiting[name] = since, now
        overtaken = now < since + max(_LEAST_S, _SHARE * self._load_s[name])
        return waits if overtaken else NotYet(pending=True)

    def release(self, request: Request) -> None:
        asset, runner = self._leases.pop(request.id)
        runner.release(request)
        self._used[request.model] = self._clock()
        self._models.give([asset])

    def held(self) -> int:
        return sum(runner.held() for name in self.names if (runner := self._models.resident(name)) is not None)

    def group(self, request: Request) -> ModelGroup:
        return ModelGroup(request.model, self._of(request).group(request))

    def rows(self, request: Request) -> int:
        return self._of(request).rows(request)

    def iterations(self, request: Request) -> int:
        return self._of(request).iterations(request)

    def left_s(self, request: Request, rows: int) -> float:
        return self._of(request).left_s(request, rows)

    def next_group(self, request: Request) -> ModelGroup | None:
        group = self._of(request).next_group(request)
        return None if group is None else ModelGroup(request.model, group)

    def limit(self, group: Hashable) -> int:
        runner, own = self._in(group)
        return runner.limit(own)

    def lane_of(self, group: Hashable) -> str:
        runner, own = self._in(group)
        return runner.lane_of(own)

    def cost(self, group: Hashable, rows: int) -> float:
        runner, own = self._in(group)
        return runner.cost(own, rows)

    def launch(self, requests: Sequence[Request]) -> Ticket:
        return self._of(requests[0]).launch(requests)

    def _of(self, request: Request) -> R:
        return self._leases[request.id].runner

    def _in(self, group: Hashable) -> tuple[R, Hashable]:
        assert isinstance(group, ModelGroup)
        runner = self._models.resident(group.model)
        assert runner is not None, "a model with running requests is in memory"
        return runner, group.group

    def close(self) -> None:
        """Close all models."""
        self._closed.set()
        self._threads.close()
        with self._offloading:
            runners = [*(self._models.resident(name) for name in self.names)]
            runners += [read.content for read in self._offloaded.values()]
        for runner in runners:
            if runner is not None:
                runner.close()


def weight_bytes(runner: Pooled) -> int:
    """Return the memory that a model's weights take, of modules that no other model has, and of what its backends have
    packed.
    """
    if isinstance(runner, DiffusersRunner):
        return runner.weight_bytes
    backends = [runner.backend, *([] if runner.refiner is None else [runner.refiner])]
    parts = [part for own in backends for name, part in own.model.parts.items() if name not in own.shared_parts]
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    storages = [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]
    unique = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(unique.values()) + sum(sum(own.held_bytes().values()) for own in backends)


def _resource(model: str, field: str = "") -> str:
    return f"model {model} {field}".rstrip()


def _check(runner: PooledRunner, request: Request) -> None:
    request.checked = None  # another load's, of which not all runners say anything
    runner.check(request)
    request.checked = Checked(weakref.ref(runner), request.checked)


def _files(request: Request) -> list[str]:
    """The fields whose files the request needs."""
    if not isinstance(request.parameters, ImageParameters):
        return []
    return [kind.field for kind in KINDS if getattr(request.parameters, kind.field, None)]


def _free(runners: list[R]) -> None:
    """Release the memory of evicted models, whose parts refer to one another."""
    if runners:
        for runner in runners:
            runner.close()
        del runner
        runners.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
