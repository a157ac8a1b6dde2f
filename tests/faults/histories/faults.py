"""Defines the faults of histories, each with a begin and an end, and draws schedules of them from a seed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis

from core.jobs import keys
from tests.faults.histories import accounts, attacker, tampering
from tests.faults.histories.proxy import CUT, HANG, PASS, SLOW
from tests.faults.histories.record import Fault
from tests.faults.histories.world import TENANTS, World
from tests.faults.parts import ROOT, Part

Undo = Callable[[], None]
Begin = Callable[[World, Fault], Undo | None]


@dataclass(frozen=True)
class Kind:
    """One kind of fault. `begin` returns what ends it, or None where it could not be done now.

    `seconds`, `size`: the ranges that these are drawn from. `needs`: what a world must have.
    """

    begin: Begin
    seconds: tuple[float, float] = (0.0, 0.0)
    size: tuple[float, float] = (0.0, 0.0)
    weight: float = 1.0
    needs: str = ""


def _nothing() -> None:
    pass


def _part(parts: str, do: Callable[[World, Part], Undo | None]) -> Begin:
    """Something is done to a part, where that runs."""

    def begin(world: World, fault: Fault) -> Undo | None:
        part: Part = getattr(world, parts)[fault.target]
        return do(world, part) if part.running else None

    return begin


def _in_redis(do: Callable[[World, Fault], object]) -> Begin:
    """Something is done in Redis, where that answers."""

    def begin(world: World, fault: Fault) -> Undo | None:
        try:
            do(world, fault)
        except redis.RedisError:
            return None
        return _nothing

    return begin


def _kill(_: World, part: Part) -> Undo:
    part.kill()
    part.root = ROOT  # whatever it was started from
    return _nothing


def _terminate(_: World, part: Part) -> Undo:
    assert part.process is not None
    part.process.terminate()
    part.root = ROOT
    return _nothing


def _other(world: World, part: Part) -> Undo | None:
    """The part runs on with the code of another version, until it is killed."""
    if world.other is None or part.root == world.other:
        return None
    part.kill()
    part.root = world.other
    return _nothing


def _pause(_: World, part: Part) -> Undo:
    part.pause()
    return part.resume


def _pause_redis(world: World, fault: Fault) -> Undo | None:
    process = world.servers[0].process
    if process is None or process.poll() is not None or world.redis_paused or world.redis_limited:
        return None
    os.kill(process.pid, signal.SIGSTOP)
    world.redis_paused = True

    def end() -> None:
        world.redis_paused = False
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)

    return end


def _away(how: str) -> Begin:
    def begin(world: World, fault: Fault) -> Undo | None:
        if not world.servers[0].running or (how == "stop" and world.redis_paused):
            return None
        world.redis_away = True
        world.end_redis(world.servers[0], how)
        return lambda: setattr(world, "redis_away", False)

    return begin


def _promote(world: World, fault: Fault) -> Undo | None:
    """The replica takes over; for some time all still talk to the old one, which then only reads."""
    return world.lead if not world.redis_paused and world.promote() else None


def _outside(server: str, name: str) -> Begin:
    """A server outside has the fault's size, or just the fault, and is as it was at the end."""

    def begin(world: World, fault: Fault) -> Undo | None:
        owner: object = getattr(world, server)
        setattr(owner, name, fault.size or True)
        return lambda: setattr(owner, name, 0.0)

    return begin


def _link(name: str, mode: str) -> Begin:
    def begin(world: World, fault: Fault) -> Undo | None:
        world.links[name].turn(mode, fault.size)
        return lambda: world.links[name].turn(PASS)

    return begin


def _filled(name: str) -> Begin:
    def begin(world: World, fault: Fault) -> Undo | None:
        junk: Path = world.disks[name] / "junk"
        with contextlib.suppress(OSError), junk.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        with contextlib.suppress(OSError), junk.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(64))
        return lambda: junk.unlink(missing_ok=True)

    return begin


def _full(world: World, fault: Fault) -> Undo | None:
    # A paused Redis would take both commands later, in any order; one that is full already stays so for its time.
    if world.redis_paused or world.redis_limited:
        return None

    def limit(most: int) -> None:
        for server in world.servers:
            with world.direct(server) as client:
                client.config_set("maxmemory", most)

    def end() -> None:
        world.redis_limited = False
        for server in world.servers:
            # One that was started again has no limit.
            with contextlib.suppress(redis.RedisError), world.direct(server) as client:
                client.config_set("maxmemory", 0)

    world.redis_limited = True
    try:
        limit(1)
    except redis.RedisError:
        end()
        return None
    return end


def _clock(*names: str) -> Begin:
    def begin(world: World, fault: Fault) -> Undo | None:
        name = names[fault.target % len(names)]
        world.clocks.set(name, fault.size)
        return lambda: world.clocks.set(name, 0.0)

    return begin


def _disown(world: World, fault: Fault) -> None:
    """Every lease is over at once, though all workers live."""
    with world.direct(world.servers[0]) as client:
        for id in client.zrange(f"{keys.PREFIX}leases", 0, -1):
            client.zadd(f"{keys.PREFIX}leases", {id: 1}, xx=True)


def _hand_back_late(world: World, fault: Fault) -> None:
    """Workers that were given up hand back what others run by now."""
    world.miscounted.update(accounts.hand_back_late(world))


def _slow_readers(world: World, fault: Fault) -> Undo | None:
    """Several follow events and read none of them."""
    open_: list[socket.socket] = []
    with contextlib.suppress(OSError, redis.RedisError), world.direct(world.servers[0]) as client:
        ids = client.zrange(f"{keys.PREFIX}leases", 0, 7)
        for id in ids:
            for tenant in TENANTS:
                reader = socket.create_connection(world.listeners[fault.target].getsockname(), timeout=2)
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                reader.sendall(
                    f"GET /v1/jobs/{id}/events HTTP/1.1\r\nHost: localhost\r\n"
                    f"Authorization: Bearer {world.tokens[tenant]}\r\n\r\n".encode()
                )
                open_.append(reader)
                world.unread.append((time.monotonic(), tenant, id))

    def end() -> None:
        for reader in open_:
            reader.close()

    return end


def _pause_busy(lora: bool) -> Begin:
    """A worker hangs while it runs a job; with `lora` one that names a LoRA."""

    def begin(world: World, fault: Fault) -> Undo | None:
        until = time.monotonic() + _LOOK_S
        with contextlib.suppress(redis.RedisError, RuntimeError), world.direct(world.servers[0]) as client:
            while time.monotonic() < until:
                for id in client.zrange(f"{keys.PREFIX}leases", 0, -1):
                    parameters, worker = client.hmget(keys.job(id), "parameters", "worker")
                    pids = {card.pid for card in world.registry.workers() if card.id == worker}
                    part = next((part for part in world.crew if part.running and part.pid in pids), None)
                    if part is not None and parameters and (not lora or json.loads(parameters).get("lora")):
                        part.pause()
                        return part.resume
                time.sleep(0.02)
        return None

    return begin


def _no_memory(world: World, fault: Fault) -> Undo | None:
    """A worker gets no more memory than it has, and a little: what it loads or allocates meanwhile fails."""
    part = world.crew[fault.target]
    if not part.running:
        return None
    pid = part.pid
    try:
        size = psutil.Process(pid).memory_info().vms
        resource.prlimit(pid, resource.RLIMIT_AS, (size + int(fault.size * 2**20), resource.RLIM_INFINITY))
    except (OSError, psutil.Error):
        return None

    def end() -> None:
        with contextlib.suppress(OSError):  # it may have ended
            resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    return end


def _new_fields(world: World, fault: Fault) -> None:
    """Records get fields of a newer version, and a part of this one starts among them."""
    tampering.new_fields(world)
    process = world.parts[round(fault.size)].process
    if process is not None and process.poll() is None:
        process.terminate()


def _attack(send: Callable[[World, int, int], None]) -> Begin:
    """An attack on one API, drawn from the fault's size."""

    def begin(world: World, fault: Fault) -> Undo | None:
        send(world, int(fault.size), fault.target)
        return _nothing

    return begin


_SHORT, _LEASE, _JUMP = (0.3, 1.5), (2.2, 3.5), (-6.0, 6.0)
_SEED = (0, 10**9)
_LOOK_S = 0.6  # until a worker is found that runs what a fault is about
KINDS: dict[str, Kind] = {
    "kill_worker": Kind(_part("crew", _kill), weight=2),
    "kill_api": Kind(_part("apis", _kill), weight=1.5),
    "stop_worker": Kind(_part("crew", _terminate), weight=0.7),
    "stop_api": Kind(_part("apis", _terminate), weight=0.7),
    "pause_worker": Kind(_part("crew", _pause), (0.5, 3.5)),
    "pause_api": Kind(_part("apis", _pause), (0.3, 2.5)),
    "pause_redis": Kind(_pause_redis, _SHORT),
    "redis_killed": Kind(_away("kill"), _SHORT, weight=1.5),
    "redis_restarted": Kind(_away("stop"), _SHORT, weight=1.5),
    "redis_promoted": Kind(_promote, (0.0, 0.8), needs="replica"),
    "redis_full": Kind(_full, _SHORT),
    "redis_disk_full": Kind(_filled("redis"), _SHORT, weight=0.5, needs="small_disks"),
    "cut_api": Kind(_link("api", CUT), _SHORT, weight=1.5),
    "cut_worker": Kind(_link("worker", CUT), (0.3, 3.0), weight=1.5),
    "hang_api": Kind(_link("api", HANG), _SHORT),
    "hang_worker": Kind(_link("worker", HANG), (0.5, 3.5)),
    "slow_api": Kind(_link("api", SLOW), (1.0, 3.0), (0.01, 0.15)),
    "slow_worker": Kind(_link("worker", SLOW), (1.0, 3.0), (0.01, 0.15)),
    "storage_cut": Kind(_link("storage", CUT), _LEASE, needs="objects"),
    "storage_hung": Kind(_link("storage", HANG), _LEASE, needs="objects"),
    "storage_slow": Kind(_link("storage", SLOW), _LEASE, (0.05, 0.3), needs="objects"),
    "storage_failing": Kind(_outside("storage", "failing"), _LEASE, needs="objects"),
    "disk_full": Kind(_filled("data"), _SHORT, needs="small_disks"),
    "clock_redis": Kind(_clock("redis"), (0.5, 3.0), _JUMP, needs="clocks"),
    "clock_part": Kind(_clock("worker-0", "api-0", "worker-1", "api-1"), (0.5, 3.0), (-600, 600), needs="clocks"),
    "disown": Kind(_in_redis(_disown)),
    "late_hand_back": Kind(_in_redis(_hand_back_late), weight=1.5),
    "slow_receivers": Kind(_outside("receiver", "slow_s"), (1.0, 4.0), (0.5, 12.0)),
    "pause_busy": Kind(_pause_busy(lora=False), (2.5, 4.5), weight=2),
    "pause_lora": Kind(_pause_busy(lora=True), (2.5, 4.5)),
    "no_memory": Kind(_no_memory, (0.3, 2.0), (0, 24)),
    "cache_full": Kind(_filled("cache"), _LEASE, needs="real"),
    "broken_messages": Kind(
        _in_redis(lambda world, fault: tampering.messages(world, int(fault.size))), size=_SEED, weight=1.5
    ),
    "new_fields": Kind(_in_redis(_new_fields), size=(0, 3), weight=1.5),
    "hostile_bodies": Kind(_attack(attacker.bodies), size=_SEED),
    "broken_bodies": Kind(_attack(attacker.broken_bodies)),
    "large_batch": Kind(_attack(attacker.batch), size=_SEED, weight=0.5),
    "slow_readers": Kind(_slow_readers, (1.0, 4.0)),
    "other_worker": Kind(_part("crew", _other), needs="other", weight=0.7),
    "other_api": Kind(_part("apis", _other), needs="other", weight=0.7),
}


def possible(world: World) -> list[str]:
    """The kinds that this world can be hit by."""
    there = {
        "": True, "replica": world.replica, "objects": world.objects, "clocks": world.clocks.there,
        "small_disks": world.small_disks, "other": world.other is not None,
        "real": world.real,
    }  # fmt: skip
    # On an object store nothing is written to the data folder.
    return [name for name, kind in KINDS.items() if there[kind.needs] and not (name == "disk_full" and world.objects)]


def draw(seed: int, kinds: Sequence[str], count: int, span_s: float) -> list[Fault]:
    """A schedule: so many faults of these kinds that begin within the span. The same seed draws the same."""
    random_ = random.Random(seed)

    def between(low: float, high: float) -> float:
        return round(random_.uniform(low, high), 3)

    names = random_.choices(kinds, [KINDS[name].weight for name in kinds], k=count)
    faults = []
    for name in names:
        at, target = between(0.2, span_s), random_.randrange(2)
        faults.append(Fault(at, name, target, between(*KINDS[name].seconds), between(*KINDS[name].size)))
    return sorted(faults, key=lambda fault: fault.at)


class Play:
    """A schedule as it is played: `step` again and again, from the thread that built the world."""

    def __init__(self, world: World, schedule: Sequence[Fault]) -> None:
        self._world = world
        self._coming = sorted(schedule, key=lambda fault: fault.at)
        self._open: list[tuple[float, Undo]] = []
        self._started = time.monotonic()
        self.played: list[Fault] = []

    def step(self) -> bool:
        """Begin and end what is due. False: all is over."""
        now = time.monotonic() - self._started
        for due in [one for one in self._open if one[0] <= now]:
            self._open.remove(due)
            due[1]()
        while self._coming and self._coming[0].at <= now:
            fault = self._coming.pop(0)
            undo = KINDS[fault.kind].begin(self._world, fault)
            if undo is not None:
                self.played.append(fault)
                self._open.append((now + fault.seconds, undo))
        self._world.tend()
        return bool(self._coming or self._open)

    def heal(self) -> None:
        """End all that has not ended."""
        self._coming.clear()
        for _, undo in self._open:
            undo()
        self._open.clear()
