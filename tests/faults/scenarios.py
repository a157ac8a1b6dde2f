"""Defines the faults, one function each: it puts load on the stack, injects the fault, and waits for the end.

Used by the tests (a few times, short leases) and by chaos.py (many times, real leases). rounds.py checks the results.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import httpx2

from api.queue import MessageProducer
from core.jobs import keys
from core.jobs.broker import Envelope
from core.jobs.crashes import alone_from
from core.jobs.record import JobDraft, new_id
from tests.faults.captions import CAPTIONS
from tests.faults.client import Order, Refused, patiently
from tests.faults.fragile import DIES
from tests.faults.parts import wait_for
from tests.faults.rounds import Round, clear
from tests.faults.stack import FINAL, Stack

TEXTS = 25
MAX_STEPS, MAX_IMAGES = 1000, 10  # of one picture, of one job
_FULL = 12  # jobs from which a load is no short one
_STEPS = 400  # of one picture where possible: a stream keeps a thousand events, over all attempts of its job


@dataclass(frozen=True)
class Load:
    """How much the stack has to do meanwhile: so many jobs, each of so many steps."""

    jobs: int
    steps: int

    @classmethod
    def lasting(cls, stack: Stack, jobs: int, seconds: float) -> Self:
        """Jobs that each take the stack about so long when it does nothing else."""
        return cls(jobs, max(20, round(seconds / stack.step_s())))

    @property
    def share(self) -> int:
        """One in so many is done of what a scenario does a number of times of its own."""
        return 1 if self.jobs >= _FULL else 4

    @property
    def orders(self) -> list[Order]:
        return self._cycle(
            self._order("a lighthouse in the fog", 1),
            self._order("two blue teapots", 2, priority=3),
            self._order("a fox reading a map", 3, times=2),
            self._order("the moon over a harbour", 4, priority=9),
        )

    @property
    def longer(self) -> list[Order]:
        """Of four times as many steps in all."""
        return self._cycle(self._order("a snail on a long way", 5, times=4), self._order("a slow train", 6, times=4))

    def _order(self, prompt: str, seed: int, times: int = 1, priority: int = 5) -> Order:
        """So many times the steps, over as many pictures as that takes."""
        n = min(MAX_IMAGES, max(min(times, 2), math.ceil(times * self.steps / _STEPS)))
        return Order(prompt, seed, min(MAX_STEPS, times * self.steps // n), priority, n=n)

    def _cycle(self, *few: Order) -> list[Order]:
        """Few different ones, since each is drawn undisturbed too."""
        return [few[k % len(few)] for k in range(self.jobs)]


Scenario = Callable[[Round, Load], None]


def worker_killed(round: Round, load: Load) -> None:
    """kill -9 of a worker in mid-batch while another lives. Touched: what it ran."""
    stack = round.stack
    round.load(load.orders)
    victim = round.busy(at_least=2)
    victim.kill()
    at = time.time()
    touched = stack.running_on(victim, round.ids)  # its card outlives it by a lease
    round.fault(touched, at)
    round.end()
    queued = [e.at - at for id in touched for e in stack.stream(id) if e.data.get("reason") == "worker_lost"]
    round.outcome.figures["back_in_the_queue_s"] = max(queued, default=0.0)
    for id, (attempt, lost) in round.attempts().items():
        if (attempt, lost) > (2, 1) or (lost and id not in touched):
            round.problem(f"{id}: one crash cost it {lost} attempts")


def api_killed(round: Round, load: Load) -> None:
    """kill -9 of the API after it made a job and before it answered. Touched: that job."""
    stack = round.stack
    round.load(load.orders[: load.jobs // 2])
    before = set(stack.keys.scan_iter(keys.job("*")))
    order = Order(f"a raven, and {DIES}", 5, load.steps)
    try:
        stack.client.submit(order)
        round.problem("the API lives, and should not")
    except httpx2.TransportError:
        pass
    at = time.time()
    assert stack.api.ended(10) == -9
    made = set(stack.keys.scan_iter(keys.job("*"))) - before
    assert len(made) == 1, made
    id = made.pop().removeprefix(keys.job(""))
    round.accepted(id, order)
    round.fault([id], at)
    stack.tend()
    round.load(load.orders[load.jobs // 2 :])
    round.end()


def redis_restarted(round: Round, load: Load) -> None:
    """Redis ends in good order under busy workers and is started again. Touched: what ran."""
    _redis(round, load, "stop")


def redis_killed(round: Round, load: Load) -> None:
    """kill -9 of Redis under busy workers; it is started again. Touched: what ran."""
    _redis(round, load, "kill")


def _redis(round: Round, load: Load, how: str) -> None:
    stack = round.stack
    round.load(load.orders)
    round.busy()
    running = [id for id, (state, _) in stack.states(round.ids).items() if state == "running"]
    stack.stop_redis(how)
    time.sleep(1.0)
    try:
        stack.client.submit(load.orders[0])
        round.problem("a job was accepted while there was no Redis")
    except Refused as refused:
        if (refused.status, refused.code) != (503, "store_down"):
            round.problem(f"without Redis a job is refused with {refused}")
    stack.start_redis()
    at = time.time()
    states = stack.states(running)
    round.fault([id for id in running if states[id][0] not in FINAL], at)
    round.wait("the service takes jobs again", lambda: _taken(round, load.orders[0]))
    round.end()
    if lost := {id: counted for id, counted in round.attempts().items() if counted[1]}:
        round.problem(f"an absence of Redis shorter than a lease was counted as crashes of workers: {lost}")


def _taken(round: Round, order: Order) -> bool:
    try:
        round.submit(order)
    except (Refused, httpx2.TransportError):
        return False
    return True


def worker_terminated(round: Round, load: Load) -> None:
    """SIGTERM to a worker in mid-job, with less time to drain than its jobs need. Touched: what it ran."""
    stack = round.stack
    for _ in range(3):  # where a machine is quick and slow to be stopped, all may be done before the drain ends
        round.load(load.longer[:4])
        victim = round.busy(at_least=2)
        running = stack.running_on(victim, round.ids)
        at = time.time()
        status = victim.terminate()
        if status != 0:
            round.problem(f"a worker that was asked to stop ended with {status}")
        stack.tend()
        round.fault([], at)
        round.end()
        handed = [id for id in running if any(e.data.get("reason") == "handed_back" for e in stack.stream(id))]
        if handed:
            break
    else:
        round.problem("nothing was handed back: every job was done before the drain ended")
    # It goes on once another worker runs it; what is drawn during the drain does not count.
    again = [e.at for id in handed for e in stack.stream(id) if e.type == "running" and e.data["attempt"] == 2]
    round.outcome.figures["handed_back"] = len(handed)
    round.outcome.recovery_s = max(again, default=at) - at
    if lost := {id: counted for id, counted in round.attempts().items() if counted[1]}:
        round.problem(f"an orderly stop was counted as a crash: {lost}")


def worker_paused(round: Round, load: Load) -> None:
    """SIGSTOP of a worker beyond its lease; it wakes while its jobs run on another. Touched: its jobs."""
    stack = round.stack
    round.load(load.orders)
    victim = round.busy(at_least=2)
    starts = victim.starts
    victim.pause()
    at = time.time()
    touched = stack.running_on(victim, round.ids)
    round.fault(touched, at)
    try:
        round.wait("its jobs run elsewhere", lambda: any(_runs_again(stack, id) for id in touched))
    finally:
        victim.resume()
    round.end()
    if not any(attempt > 1 for attempt, _ in round.attempts().values()):
        round.problem("no job of the paused worker was run again")
    round.wait("the worker that woke serves again", lambda: any(card.pid == victim.pid for card in stack.cards()))
    if victim.starts != starts:
        round.problem("the worker that woke ended")


def _runs_again(stack: Stack, id: str) -> bool:
    return any(entry.type == "running" and entry.data["attempt"] > 1 for entry in stack.stream(id))


# A running job that no crash was counted for yet: its lease is over. Renewals come in between, hence again and again.
_DISOWN = """
local job = redis.call('HMGET', ARGV[1] .. 'job:' .. ARGV[2], 'state', 'lost')
if job[1] ~= 'running' or job[2] ~= '0' then return 0 end
redis.call('ZADD', ARGV[1] .. 'leases', 'XX', 1, ARGV[2])
return 1
"""


_ROUNDS = 8


def worker_disowned(round: Round, load: Load) -> None:
    """Its leases are taken from a worker that lives, goes on and does not know yet. Touched: what was taken."""
    stack = round.stack
    at, starts = stack.now(), {part: part.starts for part in stack.crew}
    taken: list[float] = []
    for _ in range(_ROUNDS):  # a job may end before the next sweep
        round.load(load.longer[:4])
        touched = stack.running_on(round.busy(at_least=2), round.ids)

        def disown(touched: Sequence[str] = touched) -> bool:
            """Expires the leases: the next sweep requeues the jobs for any worker, perhaps the same one."""
            left = [stack.keys.eval(_DISOWN, 0, keys.PREFIX, id) for id in touched]
            return not any(left)

        round.wait("what it runs is taken away", disown)
        taken = [e.at for id in touched for e in stack.stream(id) if e.data.get("reason") == "worker_lost"]
        if taken:
            break
    else:
        round.problem("every job ended before it could be taken away")
    round.fault([id for id, (_, lost) in round.attempts().items() if lost], max(taken, default=at))
    round.end()
    if starts != {part: part.starts for part in stack.crew}:
        round.problem("a worker that lost its jobs ended")


def redis_full(round: Round, load: Load) -> None:
    """Redis is out of memory under load, for longer than a lease. Affected: the first jobs afterwards."""
    stack = round.stack
    round.load([*load.longer[:2], *load.orders])
    round.busy()
    stack.keys.config_set("maxmemory", 1)
    full_until = time.monotonic() + stack.lease_s + 4
    try:
        for order in load.orders[:4]:
            try:
                round.submit(order)
                round.problem("a full Redis took a job")
            except Refused as refused:
                if (refused.status, refused.code) != (503, "store_full"):
                    round.problem(f"with Redis full a job is refused with {refused}")
        running = [id for id, (state, _) in stack.states(round.ids).items() if state == "running"]
        round.wait("what runs ends though Redis is full", lambda: _all_final(stack, running))
        round.wait("it is full for longer than a lease", lambda: time.monotonic() > full_until)
        if not stack.client.ready():
            round.problem("while Redis is full the workers are not seen")
    finally:
        stack.keys.config_set("maxmemory", 0)
    at = stack.now()
    round.fault([round.submit(order) for order in load.orders[:2]], at)
    round.end()
    if lost := {id: counted for id, counted in round.attempts().items() if counted[1]}:
        round.problem(f"a full Redis was counted as crashes of workers: {lost}")


def _all_final(stack: Stack, ids: list[str]) -> bool:
    return all(state in FINAL for state, _ in stack.states(ids).values())


def disk_full(round: Round, load: Load) -> None:
    """Pictures cannot be written: the disk is full, or a file lies in the way. Jobs fail and say why; workers live."""
    stack = round.stack
    order = load.orders[0]
    workers = [part.pid for part in stack.crew]
    for hindered, words in ((_in_the_way, ("directory", "exists")), (_no_room, ("no space left", "directory"))):
        clear(stack)
        with hindered(stack):
            failing = [round.submit(order, expected="failed") for _ in range(2)]
            round.wait("jobs whose pictures cannot be written end", lambda ids=failing: _all_final(stack, ids))  # type: ignore[misc]
            for id in failing:
                error = stack.client.look(id)["error"] or {}
                if not any(word in error.get("message", "").lower() for word in words):
                    round.problem(f"{id}: it does not say what is wrong with the disk: {error}")
    round.load([order] * 3)
    round.end()
    if workers != [part.pid for part in stack.crew]:
        round.problem("a worker ended because of the disk")


@contextlib.contextmanager
def _in_the_way(stack: Stack) -> Iterator[None]:
    """A file where the folder should be: not even root can write beneath it."""
    folder = stack.data / "artifacts"
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_text("in the way")
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


@contextlib.contextmanager
def _no_room(stack: Stack) -> Iterator[None]:
    """A full disk of one page; if mounting is not allowed, a file in place of the folder."""
    folder = stack.data / "artifacts"
    stack.guard.mounted(folder)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    try:
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            with _in_the_way(stack):
                yield
            return
        with contextlib.suppress(OSError), (folder / "junk").open("wb") as junk:
            junk.write(bytes(8192))
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
    finally:
        stack.guard.unmounted(folder)


def poison(round: Round, load: Load) -> None:
    """A request that takes its worker down each time, amid others that keep coming. Touched: what went down first."""
    stack = round.stack
    starts = sum(part.starts for part in stack.crew)
    round.load(load.longer)
    poisoned = round.submit(Order("KILL", 9, load.steps), expected="failed")
    wait_for("the poison takes a worker down", lambda: not all(part.running for part in stack.crew), 60, every_s=0.01)
    at = time.time()
    dead = [part for part in stack.crew if not part.running]
    round.fault([id for part in dead for id in stack.running_on(part, round.ids) if id != poisoned], at)

    def given_up() -> bool:
        states = stack.states(round.ids)
        live = sum(state not in FINAL for state, _ in states.values())
        for order in load.longer[live:]:  # so that it never happens to be alone
            round.submit(order)
        return states[poisoned][0] in FINAL

    round.wait("the poison is given up", given_up)
    round.end()
    error = stack.client.look(poisoned)["error"] or {}
    if error.get("code") != "crashed":
        round.problem(f"the poison ended with {error}")
    attempts = round.attempts()
    if (lost := attempts.pop(poisoned)[1]) != stack.max_attempts:
        round.problem(f"the poison was given up after {lost} crashes, not {stack.max_attempts}")
    most = alone_from(stack.max_attempts)
    if hurt := {id: counted for id, counted in attempts.items() if counted[1] > most}:
        round.problem(f"the poison cost others more than {most} attempts: {hurt}")
    round.outcome.figures["others_hurt"] = sum(lost for _, lost in attempts.values())
    round.outcome.figures["crashes"] = sum(part.starts for part in stack.crew) - starts


def texts_start(round: Round, load: Load) -> None:
    """Every image slot is taken; 25 text tasks (a stand-in's) come. Figures: until they start, by Redis's clock."""
    stack = round.stack
    slots = sum(card.limits["image"] for card in stack.cards())
    endless = Order("a very long panorama", 8, MAX_STEPS, deterministic=False, n=MAX_IMAGES)
    images = [round.submit(endless, expected="cancelled") for _ in range(slots + 2)]
    drawn = f"all {slots} image slots are taken"
    round.wait(drawn, lambda: sum(state == "running" for state, _ in stack.states(images).values()) == slots)
    waits = []
    with contextlib.closing(MessageProducer(stack.redis.url)) as queue:
        for number in range(-1, TEXTS // load.share):  # the first one connects the sender, and does not count
            draft = JobDraft(new_id(), "text", "stage-text", {"prompt": f"text {number}", "steps": 1})
            job = patiently(partial(stack.store.create, draft))  # to the same effect, however often
            queue.send(Envelope(job.id, job.modality, job.priority))
            round.accepted(job.id, None)
            round.wait("a text has ended", lambda id=job.id: stack.states([id])[id][0] in FINAL)  # type: ignore[misc]
            times = {entry.type: entry.at for entry in stack.stream(job.id)}
            waits.append(1000 * (times["running"] - times["queued"]))
    del waits[0]
    if sum(state == "running" for state, _ in stack.states(images).values()) < slots:
        round.problem("images ended meanwhile: the texts may have waited for that")
    for id in images:
        stack.client.cancel(id)
    round.end()
    round.wait("the slots are free again", lambda: not any(card.in_flight["image"] for card in stack.cards()))
    round.outcome.figures |= {"median_ms": statistics.median(waits), "max_ms": max(waits)}


def captions(round: Round, load: Load) -> None:
    """64 captions in one run, as fast as the API takes them, with nothing broken."""
    for number, caption in list(enumerate(CAPTIONS))[:: load.share]:
        round.submit(Order(caption, number, 4, deterministic=False))
    round.end()


PICTURES: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        worker_killed, api_killed, redis_restarted, redis_killed, worker_terminated, worker_paused, worker_disowned,
        redis_full, disk_full, texts_start, captions,
    )
}  # fmt: skip
STAND_INS: dict[str, Scenario] = {"poison": poison}
SCENARIOS = PICTURES | STAND_INS
