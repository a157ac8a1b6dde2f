"""Tests rolling restarts as in docs/operations.md under load: no job is lost or run twice, no request rejected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from deployment.address import listen, url
from tests.faults.parts import Part, wait_for
from tests.faults.rotation import Clients, Rotation, id_of
from tests.faults.rounds import counters, history
from tests.faults.stack import FINAL, START_S, Stack
from tests.workers.stage import MODEL, picture

NEXT = "stage-next"
SLOW = "STEP=0.1 a slow train"  # six seconds of a worker, at sixty steps
ENOUGH = {"lease_s": "15", "drain_s": "45", "kernels": "false"}  # a drain that is longer than any picture here


@dataclass
class House:
    """A stack of stand-ins whose workers record the jobs that they run."""

    stack: Stack
    log: Path

    def worker(self, number: int, *switches: str) -> Part:
        """One more, started and ready."""
        first = self.stack.crew[0]
        part = Part(
            f"worker-more-{number}", [*first.command, *switches], first.environment,
            first.log.with_name(f"more-{number}.log"), self.stack.guard, niceness=first.niceness,
            preload=first.preload,
        )  # fmt: skip
        self.stack.parts.append(part)
        part.start()
        wait_for("a worker is ready", lambda: self.ready(part), START_S)
        return part

    def ready(self, part: Part) -> bool:
        assert part.running, part.tail()
        return any(card.pid == part.pid and card.state == "ready" for card in self.stack.cards())

    def made(self, id: str) -> bool:
        return bool(self.stack.states([id]))

    def judge(self, clients: Clients, *, waiting: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Every job that was accepted has succeeded, by one attempt that was begun and ended once."""
        assert clients.problems == []
        ids = [id for id in clients.accepted if id not in waiting]
        wait_for("all jobs have ended", lambda: {s for s, _ in self.stack.states(ids).values()} <= FINAL, 120)
        events = [json.loads(line) for line in self.log.read_text().splitlines()]
        for id in ids:
            job = self.stack.store.get(id)
            assert job is not None and job.state.value == "succeeded" and job.lost == 0, job
            assert list(history(self.stack.stream(id))) == []
            mine = [(event["event"], event["request"]) for event in events if event["request"].startswith(f"{id}/")]
            assert [event for event, _ in mine].count("done") == 1, mine
            assert len({request for event, request in mine if event == "admit"}) == 1, "begun twice"
            assert job.result is not None
            wanted, key = job.parameters, job.result["images"][0]["key"]
            prompt = wanted["prompt"] if job.model == MODEL else f"{job.model}: {wanted['prompt']}"
            expected = picture(prompt, wanted["seed"], wanted["width"], wanted["height"])
            assert (self.stack.data / "artifacts" / key).read_bytes() == expected


@contextmanager
def house(folder: Path, workers: int) -> Iterator[House]:
    log = folder / "events"
    switches = ("--log", str(log), "--step", "0.03")
    with Stack(folder, workers, switches=switches, settings=ENOUGH, niceness=0, preload=True) as stack:
        try:
            yield House(stack, log)
        except BaseException as error:
            error.add_note(stack.logs())
            raise


def test_a_rolling_restart_is_not_noticed(tmp_path: Path) -> None:
    with (
        house(tmp_path, workers=2) as here,
        closing(listen("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        stack = here.stack
        first = stack.api
        fd = str(listener.fileno())
        second = Part(
            "api-2", [*first.command[:-1], fd], first.environment, first.log.with_name("api-2.log"), stack.guard,
            descriptors=(listener.fileno(),), preload=first.preload,
        )  # fmt: skip
        stack.parts.append(second)
        second.start()
        apis = {url(stack.listener).rstrip("/"): first, url(listener).rstrip("/"): second}
        wait_for("both APIs are ready", lambda: all(map(answers, apis)), START_S)
        rotation = Rotation(*apis)
        clients = Clients(rotation, steps=10)
        clients.start("order", clients.order, n=1)
        clients.start("draw", clients.draw)
        try:
            # Workers, one after the other: the new one is ready before the old one is asked to end.
            for number, old in enumerate(stack.crew):
                here.worker(number)
                slow: list[str] = []
                while not stack.running_on(old, slow):  # in mid-picture, for seconds to come
                    fields = {"prompt": SLOW, "seed": len(slow), "steps": 30}
                    slow.append(clients.submit(f"slow-{number}-{len(slow)}", fields))
                    wait_for("it is drawn", lambda id=slow[-1]: stack.states([id])[id][0] != "queued", 60)  # type: ignore[misc]
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
        assert counters(stack) == []
        assert len(clients.accepted) > 10


def answers(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/readyz", trust_env=False, verify=False).status_code == 200
    except httpx2.TransportError:
        return False


def test_a_model_of_another_name_takes_over(tmp_path: Path) -> None:
    with house(tmp_path, workers=1) as here:
        stack, address = here.stack, url(here.stack.listener).rstrip("/")
        clients = Clients(Rotation(address), steps=7)
        clients.start("any", clients.order)
        clients.start("old", clients.order, model=MODEL)
        waiting: set[str] = set()
        try:
            new = here.worker(0, "--name", NEXT)
            # Side by side: each draws what names it, though both take from one queue.
            side = {clients.submit(f"side-{k}", {"prompt": f"{k}", "model": (MODEL, NEXT)[k % 2]}) for k in range(10)}
            wait_for("both are drawn", lambda: all(s in FINAL for s, _ in stack.states(list(side)).values()), 120)
            assert stack.crew[0].terminate() == 0
            # The old one is gone: what names it waits, is not failed, and holds nobody up.
            waiting = {clients.submit(f"late-{k}", {"prompt": f"late {k}", "model": MODEL}) for k in range(5)}
            for k in range(2):
                clients.order(f"next-{k}", {"prompt": f"next {k}", "model": NEXT})
                clients.order(f"none-{k}", {"prompt": f"none {k}"})
                assert clients.look(id_of(f"none-{k}"))["model"] == NEXT
            assert {state for state, _ in stack.states(list(waiting)).values()} == {"queued"}
            assert clients.problems == [] and new.running
            # One comes back for what still names it, and goes again.
            back = here.worker(1)
            wait_for("it is drawn", lambda: all(s in FINAL for s, _ in stack.states(list(waiting)).values()), 120)
            waiting = set()
        finally:
            clients.stop()
        assert back.terminate() == 0
        # Nobody will serve it any more.
        waiting = {clients.submit(f"never-{k}", {"prompt": "never", "model": MODEL}) for k in range(3)}
        told: Any = httpx2.delete(f"{address}/v1/models/{MODEL}", timeout=60, trust_env=False, verify=False).json()
        assert (told["deleted"], told["cancelled"]) == (True, 3)
        assert {state for state, _ in stack.states(list(waiting)).values()} == {"cancelled"}
        fields = {"type": "image", "prompt": "x", "model": MODEL}
        assert httpx2.post(f"{address}/v1/jobs", json=fields, trust_env=False, verify=False).status_code == 404
        clients.order("last", {"prompt": "last"})
        here.judge(clients, waiting=waiting)
        assert {stack.store.get(id).model for id in clients.accepted} == {MODEL, NEXT}  # type: ignore[union-attr]
