"""Tests that the checker finds bugs injected into a running service, and nothing without them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from core.jobs.keys import PREFIX
from core.jobs.record import Job
from tests.faults.histories import accounts, planted
from tests.faults.histories.checker import Problem, check
from tests.faults.histories.clients import Client, Own
from tests.faults.histories.gallery import wanted
from tests.faults.histories.history import limits, read_back
from tests.faults.histories.line import Book, Line
from tests.faults.histories.quiet import levels, warm_up
from tests.faults.histories.record import OK, Fault, History
from tests.faults.histories.returns import DESCRIPTORS
from tests.faults.histories.strangers import BATCH, FILE, JOB, PICTURE, ask, ways
from tests.faults.histories.world import RATES, SHARE, World
from tests.faults.parts import Part, wait_for

PATIENCE_S = 60.0
RATE_COUNT = int(RATES["bert"][0].partition("/")[0])  # a second
SLOW = "slow STEP=0.1"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("planted")
    with World(folder / "world", bug=folder / "bug", replica=False, preload=True, patience_s=3.0) as world:
        yield world


def slow(client: Client, steps: int) -> Own:
    """A job that takes a worker about 0.1 s a step."""
    id = f"{client.name}-slow"
    body = {"type": "image", "prompt": SLOW, "seed": 0, "steps": steps, "size": "32x32"}
    client.note(client.line.submit(client.tenant, id, body, wanted(SLOW, 0)))
    return client.own[-1]


def record(world: World, own: Own) -> Job | None:
    """The record of a job of the tenant anna."""
    return world.store.get(world.store.lists.locate(own.id, world.owners["anna"]))


def runner(world: World, own: Own, attempt: int = 1, steps: int = 0) -> Part:
    """The worker that runs a job's attempt, once it runs and has done so many steps."""
    found: list[Part] = []

    def runs() -> bool:
        job = record(world, own)
        if job is not None and job.state.value == "running" and job.attempt >= attempt:
            pids = {card.id: card.pid for card in world.registry.workers()}
            if (job.progress or {"steps_done": 0})["steps_done"] >= steps:
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
    taken(world, client)
    _all_end(client)
    own = client.own[0]
    client.look(own)
    client._erase(own)
    client.others.remove((client.tenant, own))
    client._make(own.id)
    return []


def taken(world: World, client: Client) -> list[Fault]:
    """Jobs are taken, and that is all."""
    for _ in range(6):
        client.put()
    return []


def strangers(world: World, client: Client) -> list[Fault]:
    """One tenant makes a thing of each kind; another, and one without a key, ask for them in every way."""
    client.put()
    client.batch()
    client.edit()
    assert {thing.kind for thing in client.things} >= set(KINDS), client.things
    for kind in KINDS:
        thing = next(thing for thing in reversed(client.things) if thing.kind == kind)
        for name in ways(kind):
            for tenant in ("carl", ""):
                ask(client.line, tenant, thing, name)
    client.made.clear()  # a stranger may have deleted it
    owner, client.tenant = client.tenant, "bert"
    client.long_text()  # lists have large records, too
    client.edit()
    client.tenant = owner
    client.steal()
    file = client.line.upload("bert", bytes(1000))
    assert file.outcome == OK, file
    client.line.forget("bert", file.ids[0])
    return []


def spoiled(world: World, client: Client) -> list[Fault]:
    """Each API is sent a large body that is no JSON."""
    for url in world.urls():
        line = Line(client.line.book, [url], world.tokens, client.line.random)
        headers = {"Content-Type": "application/json"}
        line.call("spoiled", "anna", "POST", "/v1/jobs", headers=headers, given={"content": b"[" * 200_000})
        line.close()
    return []


def busy(world: World, client: Client) -> list[Fault]:
    """More jobs than may wait at once come and go, more calls than a rate allows, and as many as show a leak."""
    for k in range(SHARE + 1):
        fields, wants = world.gallery.order(client.line.random, f"{client.name}-{k}", line=True)
        client.note(client.line.submit("anna", f"{client.name}-{k}", {"type": "image", **fields}, wants))
        if k % 5 == 4:
            _all_end(client)
    for _ in range(RATE_COUNT + 2):  # at half of the rate
        client.line.erase("bert", "nothing")
        time.sleep(2 / RATE_COUNT)
    for _ in range(3 * DESCRIPTORS):  # of two APIs
        client.line.files("anna", limit=1)
    return []


def large(world: World, client: Client) -> list[Fault]:
    """Texts that are large are asked for, and a batch of more pictures than may be drawn at once."""
    for _ in range(6):
        client.long_text()
    client.tenant = "bert"
    client.large_batch()
    return []


def twins(world: World, client: Client) -> list[Fault]:
    """One of two jobs of equal pictures is erased, whose id another tenant uses too; and an attempt that is over is
    handed back.
    """
    body = {"type": "image", "prompt": "twin STEP=0.01", "seed": 0, "steps": 2, "size": "32x32"}
    for k in range(2):
        client.note(client.line.submit("anna", f"{client.name}-{k}", body, wanted("twin STEP=0.01", 0)))
    call = client.line.submit("bert", client.own[0].id, body, wanted("twin STEP=0.01", 0))
    if call.outcome == OK:
        client.others.append(("bert", Own(call.about, call.wants, call.seen[0].created)))
    _all_end(client)
    own = client.own[0]
    client._erase(own)
    client.others.remove((client.tenant, own))
    runner(world, slow(client, 20))
    world.miscounted.update(accounts.hand_back_late(world))
    return []


def requeued(world: World, client: Client) -> list[Fault]:
    """Both workers end in the middle of jobs, which then wait again."""
    first = slow(client, 30)
    for _ in range(4):
        client.put()
    runner(world, first)
    for part in world.crew:
        part.kill()

    def waits() -> bool:
        world.miscounted.update(accounts.uncounted(world))
        jobs = [record(world, own) for own in client.own]
        return all(job is not None and (job.state.final or job.state.value == "queued") for job in jobs)

    wait_for("they wait again", waits, PATIENCE_S)
    world.miscounted.update(accounts.uncounted(world))
    return [Fault(0, "kill_worker")]


def _all_end(client: Client) -> None:
    wait_for(
        "they have ended",
        lambda: all(client.line.look(client.tenant, own.id)[0].seen[0].final for own in client.own),
        PATIENCE_S,
    )


KINDS = (JOB, FILE, PICTURE, BATCH)
STRANGERS, DUE, QUIET = "strangers_get_nothing", "refusals_are_due", "quiet_calls_are_answered"
# What shows several bugs at once, within how many seconds at most; and for each the rule that it breaks, with a part of
# what that says.
GROUPS: list[tuple[tuple[Callable[[World, Client], list[Fault]], ...], float, dict[str, tuple[str, str]]]] = [
    ((peaceful, strangers), PATIENCE_S, {
        planted.LINK: ("bytes_of_their_request", "link of"), planted.AFTER: ("events_in_order", "after its end"),
        planted.FILES: (STRANGERS, "probe file content: carl"), planted.JOBS: (STRANGERS, "probe job look: carl"),
        planted.BATCHES: (STRANGERS, "probe batch look: carl"), planted.LINES: (STRANGERS, "batch line: anna"),
        planted.OPEN: (STRANGERS, "nobody was let"),
        planted.QUOTA: (QUIET, "upload of"),
    }),
    ((strangers, stalled, spoiled), PATIENCE_S, {
        planted.HINT: (STRANGERS, "403 forbidden"), planted.EXCESS: (QUIET, "beyond the quota"),
        planted.FENCING: ("events_in_order", ""), planted.TURN: (QUIET, "submit: anna"),
    }),
    ((busy,), PATIENCE_S, {
        planted.OTHERS: ("bytes_of_their_request", "picture of"), planted.SHARE: (DUE, "share was full"),
        planted.RATE: (DUE, "bert had asked"), planted.MEMORY: ("resources_return", "MiB"),
        planted.DESCRIPTORS: ("resources_return", "file descriptors"),
    }),
    ((large, twins), PATIENCE_S, {
        planted.REQUEST: ("little_is_stored", "a record of"), planted.BYTES: ("little_is_stored", "not counted"),
        planted.LARGER: ("limits_hold", "taken at once"), planted.UNNAMED: ("nothing_is_left", "is named by"),
        planted.LATE: ("tenants_are_counted", "handed back by attempt"),
        planted.IDS: ("own_things_only", "of bert was taken"),
    }),
    ((requeued,), PATIENCE_S, {planted.FORGETS: ("tenants_are_counted", "do not know it")}),
    ((killed, taken), 3.0, {
        planted.SWEEP: ("accepted_means_ends", "never ended"), planted.LOST: ("accepted_means_ends", "is lost"),
    }),  # the last leaves counters behind that nobody puts right
]  # fmt: skip


def restore_rates(world: World) -> None:
    """Give each tenant the whole of its rates: the warm-up, earlier groups and their bugs have charged them."""
    with world.direct(world.servers[0]) as client:
        for counter in client.scan_iter(f"{PREFIX}limits:*"):
            client.delete(counter)


def broken(
    world: World, names: Iterable[str], *acts: Callable[[World, Client], list[Fault]], end_s: float = PATIENCE_S
) -> list[Problem]:
    """What is wrong with a history of these acts, with these bugs."""
    assert world.bug is not None
    world.settle()
    if not world.warm:
        warm_up(world, world.gallery)
    restore_rates(world)
    names = tuple(names)
    world.bug.write_text(" ".join(names))
    book, made, things, faults, left, held, stored = Book(), [], [], [], [], [], {}  # type: ignore[var-annotated]
    crowd = []
    for act in acts:
        line = Line(book, world.urls(), world.tokens, random.Random(1))
        name = f"{len(names)}-{act.__name__}"
        hook, never = "http://127.0.0.1:1", threading.Event()
        crowd.append(Client(name, "anna", line, made, things, world.gallery, hook, never))
    try:
        for act, client in zip(acts, crowd, strict=True):
            faults += act(world, client)
            world.tend()
        left = read_back(world, book, crowd, made, end_s)
        held, stored = levels(world), accounts.stored(world)
    finally:
        world.bug.write_text("")
        for client in crowd:
            client.line.close()
    miscounted = sorted(world.miscounted)
    world.miscounted.clear()
    return check(History(0, faults, book.calls, limits(world), left, 0.0, held, miscounted, stored))


@pytest.mark.long
def test_nothing_is_found_where_nothing_is_wrong(world: World) -> None:
    assert broken(world, (), peaceful, strangers, killed) == []


@pytest.mark.quick(0)
@pytest.mark.parametrize("number", range(len(GROUPS)), ids=lambda number: "+".join(GROUPS[number][2]))
def test_planted_bugs_are_found(world: World, number: int) -> None:
    acts, end_s, bugs = GROUPS[number]
    problems = broken(world, bugs, *acts, end_s=end_s)
    missed = {
        name for name, (rule, text) in bugs.items()
        if not any(problem.rule == rule and text in problem.text for problem in problems)
    }  # fmt: skip
    assert not missed, [str(problem) for problem in problems]


def test_every_bug_is_tried() -> None:
    assert sorted(name for *_, bugs in GROUPS for name in bugs) == sorted(planted.BUGS)
