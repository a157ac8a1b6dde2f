"""Runs one history: clients and faults concurrently, then a quiet phase that reads everything back."""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from limits import parse

from core.jobs import keys
from core.jobs.broker import QUEUES
from core.jobs.record import QueueBacklog
from tests.faults.histories import accounts, attacker
from tests.faults.histories.clients import Client, Own
from tests.faults.histories.faults import Play
from tests.faults.histories.gallery import digest
from tests.faults.histories.line import Book, Line, bytes_of
from tests.faults.histories.quiet import ended, levels, patiently, quiet, warm_up
from tests.faults.histories.record import FINAL, OK, REFUSED, UNKNOWN, Call, Fault, History, Limits, Seen, Told
from tests.faults.histories.strangers import Thing
from tests.faults.histories.world import HOSTILE, QUOTAS, RATES, SHARE, TENANTS, World

END_S = 150.0  # until all has ended: far beyond what is needed, since it only decides that something never ends
_KEPT = 1000  # entries of a stream; the first are dropped then


def play(
    world: World, seed: int, schedule: Sequence[Fault], span_s: float, clients: int = 6, end_s: float = END_S
) -> History:
    """One history: so many clients for so long, and longer where faults last; `schedule` as far as it can be done."""
    world.settle()
    if not world.warm:
        warm_up(world, world.gallery)
    stored_before = accounts.stored(world)
    book, over = Book(), threading.Event()
    heard = len(world.heard)
    world.histories += 1
    # Of one world no two histories share a name, not even the same one played again.
    name = f"h{seed}n{world.histories}"
    made: list[tuple[str, Own]] = []
    things: list[Thing] = []
    crowd = []
    for k in range(clients):
        line = Line(book, world.urls(), world.tokens, random.Random(seed * 1000 + k))
        hook = f"http://127.0.0.1:{world.receiver.port}/{name}"
        tenant = TENANTS[k % len(TENANTS)]
        crowd.append(Client(f"{name}c{k}", tenant, line, made, things, world.gallery, hook, over))
    for client in crowd:
        client.start()
    playing = Play(world, schedule)
    try:
        until = time.monotonic() + span_s
        while playing.step() or time.monotonic() < until:
            if not world.mixed and not any(fault.kind.startswith("other") for fault in playing.played):
                world.miscounted.update(accounts.uncounted(world))
            time.sleep(0.03)
    finally:
        over.set()
        playing.heal()
    while any(client.is_alive() for client in crowd):
        world.tend()
        time.sleep(0.05)
    history = History(seed, playing.played, limits=limits(world), stored_before=stored_before)
    try:
        world.settle()
        attacker.calm(world, time.monotonic() + end_s)
        history.left += read_back(world, book, crowd, made, end_s)
        history.stored = accounts.stored(world)
        history.levels += levels(world)
    finally:
        for client in crowd:
            client.line.close()
    for client in crowd:
        if client.error is not None:
            raise client.error
    for at, path, told in world.heard[heard:]:
        _, of, tenant = path.split("/")
        if of == name:
            seen, heard_at = (Seen.of(told["data"]),), at - book.started
            book.write(Call("webhook", tenant, heard_at, heard_at, OK, 200, about=seen[0].id, seen=seen))
    for begin, end, kind, status in world.statuses:
        outcome = OK if 200 <= status < 300 else UNKNOWN if status <= 0 or status >= 500 else REFUSED
        times = begin - book.started, end - book.started
        book.write(Call("hostile", HOSTILE, *times, outcome, status, about=kind))
    world.statuses.clear()
    for begin, tenant, id in world.unread:  # each counts against its tenant's rate, when it is taken up
        book.write(Call("unread events", tenant, begin - book.started, book.now(), UNKNOWN, about=id))
    world.unread.clear()
    history.miscounted += sorted(world.miscounted)
    world.miscounted.clear()
    history.calls, history.seconds = book.calls, book.now()
    return history


def limits(world: World) -> Limits:
    def rates(k: int) -> dict[str, tuple[int, float]]:
        found = {tenant: parse(given[k]) for tenant, given in RATES.items()}
        return {tenant: (rate.amount, float(rate.get_expiry())) for tenant, rate in found.items()}

    return Limits(world.max_attempts, world.max_queued, rates(0), rates(1), SHARE, dict(QUOTAS))


def read_back(world: World, book: Book, crowd: list[Client], made: list[tuple[str, Own]], end_s: float) -> list[str]:
    """Ask for everything once all has ended, or has had all the time in the world. Returns what is left over."""
    until = time.monotonic() + end_s
    line = Line(book, world.urls(), world.tokens, random.Random(0))

    def asked(ask: Callable[..., Any], *given: Any, **named: Any) -> Call:
        def again() -> Call:
            answer = ask(*given, **named)
            return answer if isinstance(answer, Call) else answer[0]

        return patiently(again, world, until)

    try:
        for client in crowd:
            for again in client.unresolved:
                client.note(asked(again))
        jobs = {(tenant, own.id): own for tenant, own in made}
        for (tenant, id), own in jobs.items():
            last = ended(world, line, tenant, id, until)
            if last.outcome != OK or not last.seen[0].final:
                continue
            follow = asked(line.follow, tenant, id, whole=True)
            if follow.outcome == OK and last.seen[0].status == "succeeded":
                wants = own.wants if last.seen[0].created == own.created else ()
                asked(line.picture, tenant, id, wants=wants, whole=True)
        at = book.now()
        for (tenant, id), told in streams(world, jobs):
            whole = told[-1].type in FINAL and len(told) < _KEPT
            book.write(Call("stream", tenant, at, book.now(), OK, 200, about=id, told=told, whole=whole))
        for client in crowd:
            for link in client.links:
                about = {"about": link.id, "created": link.created, "wants": link.wants}
                asked(line.call, "link", "", "GET", link.link, bytes_of, **about)
            for file, wants in client.made:
                asked(line.content, client.tenant, file, wants)
            for batch in client.batches:
                _batch(world, line, batch, until)
            asked(line.list, client.tenant)
        left = left_over(world, min(until, time.monotonic() + 30))
        if not left:
            quiet(world, line, world.gallery, until)
            left = left_over(world, min(until, time.monotonic() + 30))
        return left + accounts.unnamed(world)
    finally:
        line.close()


def streams(world: World, jobs: Iterable[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], tuple[Told, ...]]]:
    """The streams in Redis of these jobs, each a tenant and an id: followers receive nothing after the terminal event.

    An id that was used again may have told of the job before, too: each job's events come by themselves.
    """
    jobs = list(jobs)
    with world.direct(world.servers[0]) as client, client.pipeline(transaction=False) as pipe:
        for tenant, id in jobs:
            pipe.xrange(keys.events(world.store.lists.locate(id, world.owners.get(tenant, ""))))
        found = pipe.execute()
    for job, entries in zip(jobs, found, strict=True):
        lives: dict[str, list[Told]] = {}
        for position, fields in entries:
            told = Told.of(position, fields["type"], json.loads(fields["data"]))
            lives.setdefault(fields.get("of", ""), []).append(told)
        for life in lives.values():
            yield job, tuple(life)


def _batch(world: World, line: Line, batch: Call, until: float) -> None:
    """Wait for a batch's end, and read what it made: each line's id with the digest of its picture."""
    (id,), status, output = batch.ids, "", None
    while True:
        call, response = line.call("batch_look", batch.tenant, "GET", f"/v1/batches/{id}", keep=False, about=id)
        if call.outcome == OK and response is not None:
            status, output = response.json()["status"], response.json()["output_file_id"]
        over = call.outcome == REFUSED or status in ("completed", "failed", "cancelled", "expired")
        if over or time.monotonic() > until:
            break
        world.tend()
        time.sleep(0.1)
    got: list[str] = []
    while output:
        path = f"/v1/files/{output}/content"
        call, response = line.call("content", batch.tenant, "GET", path, keep=False, about=output)
        if call.outcome != UNKNOWN or time.monotonic() > until:
            for text in response.text.splitlines() if call.outcome == OK and response is not None else ():
                answer = json.loads(text)
                for image in answer["response"]["body"].get("data", ()):
                    got.append(f"{answer['custom_id']} {digest(base64.b64decode(image['b64_json']))}")
            break
        time.sleep(0.2)
    line.book.write(Call(
        "batch_end", batch.tenant, batch.begin, line.book.now(), call.outcome, call.status, status, id, got=tuple(got),
    ))  # fmt: skip


def left_over(world: World, until: float) -> list[str]:
    """Jobs that are still counted as queued or running. Jobs without a known id may still have to end."""
    while True:
        left = []
        for queue in QUEUES:
            try:
                backlog = world.store.backlog(queue)
                if backlog != QueueBacklog(0, 0, 0, 0):
                    left.append(f"the {queue} queue's counters are not zero: {backlog}")
            except RuntimeError as error:
                left.append(f"the counters cannot be read: {error}")
        if not left or time.monotonic() > until:
            return left
        world.tend()
        time.sleep(0.1)
