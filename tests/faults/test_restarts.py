"""Tests rolling restarts as in docs/operations.md under load: no job is lost or run twice, no request rejected."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from core.jobs.record import JobState
from tests.faults.histories.checker import disorder
from tests.faults.histories.history import left_over, streams
from tests.faults.histories.world import START_S, World, answers
from tests.faults.parts import Part, wait_for
from tests.faults.rotation import Clients, Rotation, id_of
from tests.json_lines import whole_lines
from tests.workers.stage import picture

SLOW = "STEP=0.1 a slow train"  # six seconds of a worker, at sixty steps
ENOUGH = {"lease_s": "15", "drain_s": "45"}  # a drain that is longer than any picture here


@dataclass
class House:
    """A service of stand-ins whose workers record the jobs that they run."""

    world: World
    log: Path

    def worker(self, number: int) -> Part:
        """One more, started and ready."""
        first = self.world.crew[0]
        log = first.log.with_name(f"more-{number}.log")
        part = replace(first, name=f"worker-more-{number}", log=log, starts=0, process=None)
        self.world.parts.append(part)
        part.start()
        wait_for("a worker is ready", lambda: self.ready(part), START_S)
        return part

    def ready(self, part: Part) -> bool:
        assert part.running, part.tail()
        return any(card.pid == part.pid and card.state == "ready" for card in self.world.registry.workers())

    def states(self, ids: Iterable[str]) -> set[JobState]:
        return {job.state for id in ids if (job := self.world.store.get(id)) is not None}

    def made(self, id: str) -> bool:
        return self.world.store.get(id) is not None

    def runs(self, part: Part, ids: Iterable[str]) -> bool:
        """Whether the worker runs one of these jobs now."""
        names = {card.id for card in self.world.registry.workers() if card.pid == part.pid}
        jobs = (self.world.store.get(id) for id in ids)
        return any(job is not None and job.state is JobState.RUNNING and job.worker in names for job in jobs)

    def judge(self, clients: Clients) -> None:
        """Every job that was accepted has succeeded, by one attempt that was begun and ended once."""
        assert clients.problems == []
        ids = list(clients.accepted)
        wait_for("all jobs have ended", lambda: all(state.final for state in self.states(ids)), 120)
        for (_, id), told in streams(self.world, [("", id) for id in ids]):
            assert list(disorder(told, whole=True)) == [], id
        events = whole_lines(self.log)
        for id in ids:
            job = self.world.store.get(id)
            assert job is not None and job.state is JobState.SUCCEEDED and job.lost == 0, job
            mine = [(event["event"], event["request"]) for event in events if event["request"].startswith(f"{id}/")]
            assert [event for event, _ in mine].count("done") == 1, mine
            assert len({request for event, request in mine if event == "admit"}) == 1, "begun twice"
            assert job.result is not None
            request, key = job.parameters, job.result["images"][0]["key"]
            expected = picture(request["prompt"], request["seed"], request["width"], request["height"])
            assert (self.world.disks["data"] / "artifacts" / key).read_bytes() == expected


@contextmanager
def house(folder: Path, workers: int) -> Iterator[House]:
    log = folder / "events"
    with World(
        folder / "world", replica=False, preload=True, keyed=False, workers=workers, settings=ENOUGH,
        switches=("--log", str(log), "--step", "0.03"),
    ) as world:  # fmt: skip
        yield House(world, log)


def test_a_rolling_restart_is_not_noticed(tmp_path: Path) -> None:
    with house(tmp_path, workers=2) as here, ThreadPoolExecutor(1) as pool:
        world = here.world
        apis = dict(zip(world.urls(), world.apis, strict=True))
        rotation = Rotation(*apis)
        clients = Clients(rotation, steps=10)
        clients.start("order", clients.order, n=1)
        clients.start("draw", clients.draw)
        try:
            # Workers, one after the other: the new one is ready before the old one is asked to end.
            for number, old in enumerate(world.crew):
                here.worker(number)
                slow: list[str] = []
                while not here.runs(old, slow):  # in mid-picture, for seconds to come
                    fields = {"prompt": SLOW, "seed": len(slow), "steps": 30}
                    slow.append(clients.submit(f"slow-{number}-{len(slow)}", fields))
                    wait_for("it is drawn", lambda id=slow[-1]: JobState.QUEUED not in here.states([id]), 60)  # type: ignore[misc]
                assert old.terminate() == 0
            # APIs, one after the other: out of rotation, and what still waits there is told to come again.
            for number, (address, api) in enumerate(apis.items()):
                key = f"patient-{number}"
                patient = pool.submit(clients.draw, key, {"prompt": SLOW, "seed": number, "steps": 60}, address)
                wait_for("somebody waits there", lambda key=key: here.made(id_of(key)), 60)  # type: ignore[misc]
                assert id_of(key) in rotation.take_out(address, here.made)
                assert api.terminate() in (0, -15)
                api.start()
                wait_for("it is ready again", lambda address=address: answers(address), START_S)  # type: ignore[misc]
                rotation.put_in(address)
                patient.result()
                assert id_of(key) in clients.stopped
        finally:
            clients.stop()
        here.judge(clients)
        assert left_over(world, time.monotonic() + 30) == []
        assert len(clients.accepted) > 10
