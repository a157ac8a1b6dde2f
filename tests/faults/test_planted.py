"""Tests that the checker finds bugs injected into a running service, and nothing without them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.faults.histories.checker import check
from tests.faults.histories.clients import Book, Client, Line, Own
from tests.faults.histories.gallery import wanted
from tests.faults.histories.history import limits, read_back
from tests.faults.histories.planted import AFTER, BUGS, FENCING, LINK, LOST, OTHERS, SWEEP
from tests.faults.histories.record import Fault, History
from tests.faults.histories.world import World
from tests.faults.parts import Part, wait_for

PATIENCE_S = 60.0
SLOW = "slow STEP=0.1"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("planted")
    with World(folder / "world", bug=folder / "bug", replica=False) as world:
        yield world


def slow(client: Client, steps: int) -> Own:
    """A job that takes a worker about 0.1 s a step."""
    id = f"{client.name}-slow"
    body = {"type": "image", "prompt": SLOW, "seed": 0, "steps": steps, "size": "32x32"}
    client.note(client.line.submit(client.tenant, id, body, wanted(SLOW, 0)))
    return client.own[-1]


def runner(world: World, own: Own, attempt: int = 1, steps: int = 0) -> Part:
    """The worker that runs a job's attempt, once it runs and has done so many steps."""
    found: list[Part] = []

    def runs() -> bool:
        job = world.store.get(own.id)
        if job is None or job.state.value != "running" or job.attempt < attempt:
            return False
        if (job.progress or {"steps_done": 0})["steps_done"] < steps:
            return False
        pids = {card.id: card.pid for card in world.registry.workers()}
        found[:] = [part for part in world.crew if part.pid == pids.get(job.worker)]
        return bool(found)

    wait_for("it runs", runs, PATIENCE_S)
    return found[0]


def stalled(world: World, client: Client) -> list[Fault]:
    """A worker is paused until its job runs elsewhere, and then continues."""
    own = slow(client, 30)
    part = runner(world, own, steps=8)
    part.pause()
    try:
        runner(world, own, attempt=2)
    finally:
        part.resume()
    return [Fault(0, "pause_worker")]


def killed(world: World, client: Client) -> list[Fault]:
    """A worker ends in the middle of a job."""
    runner(world, slow(client, 10)).kill()
    return [Fault(0, "kill_worker")]


def peaceful(world: World, client: Client) -> list[Fault]:
    """Jobs are made and looked at, one is erased, and another takes its id."""
    for _ in range(6):
        client.put()
    wait_for(
        "they have ended",
        lambda: all(client.line.look(client.tenant, own.id)[0].seen[0].final for own in client.own),
        PATIENCE_S,
    )
    own = client.own[0]
    client.look(own)
    client.line.erase(client.tenant, own.id)
    client.own.remove(own)
    client.others.remove((client.tenant, own))
    client._make(own.id)
    return []


def taken(world: World, client: Client) -> list[Fault]:
    """Jobs are taken, and that is all."""
    for _ in range(6):
        client.put()
    return []


# What shows each bug, within how many seconds at most, and the rules that it breaks.
SHOWN: dict[str, tuple[Callable[[World, Client], list[Fault]], float, set[str]]] = {
    FENCING: (stalled, PATIENCE_S, {"events_in_order", "ends_stay"}),
    SWEEP: (killed, 3.0, {"accepted_means_ends"}),
    LINK: (peaceful, PATIENCE_S, {"bytes_of_their_request"}),
    AFTER: (peaceful, PATIENCE_S, {"events_in_order"}),
    OTHERS: (peaceful, PATIENCE_S, {"bytes_of_their_request"}),
    LOST: (taken, 3.0, {"accepted_means_ends"}),
}  # fmt: skip


def broken(
    world: World, name: str, *acts: Callable[[World, Client], list[Fault]], end_s: float = PATIENCE_S
) -> set[str]:
    """The rules that a history of these acts breaks."""
    assert world.bug is not None
    world.settle()
    world.bug.write_text(name)
    book, made, faults, left = Book(), [], [], []  # type: ignore[var-annotated]
    crowd = []
    for act in acts:
        line = Line(book, world.urls(), world.tokens, random.Random(1))
        client = Client(
            f"{name or 'none'}-{act.__name__.strip('<>')}",
            "anna",
            line,
            made,
            world.gallery,
            "http://127.0.0.1:1",
            threading.Event(),
        )
        crowd.append(client)
    try:
        for act, client in zip(acts, crowd, strict=True):
            faults += act(world, client)
            world.tend()
        left = read_back(world, book, crowd, made, end_s)
    finally:
        world.bug.write_text("")
        for client in crowd:
            client.line.close()
    return {problem.rule for problem in check(History(0, faults, book.calls, limits(world), left))}


def test_nothing_is_found_where_nothing_is_wrong(world: World) -> None:
    assert broken(world, "", peaceful, stalled, killed) == set()


@pytest.mark.parametrize("bug", SHOWN)  # the last leaves counters behind that nobody puts right
def test_a_planted_bug_is_found(world: World, bug: str) -> None:
    act, end_s, rules = SHOWN[bug]
    assert broken(world, bug, act, end_s=end_s) & rules


def test_every_bug_is_tried() -> None:
    assert set(SHOWN) == set(BUGS)
