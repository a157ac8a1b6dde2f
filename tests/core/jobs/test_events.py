"""Every event reaches every subscriber once and in order: late ones, slow ones, and over Redis's restarts."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest
import redis

from core.jobs import events as module
from core.jobs.events import Event, EventReader
from core.jobs.record import ProgressReport, new_id
from core.jobs.store import JobStore
from deployment.redis import RedisServer
from tests.core.jobs.drafts import draft, make
from tests.core.jobs.loops import PATIENCE_S, followed


async def collect(reader: EventReader, job_id: str, after: str = "0") -> list[Event]:
    return [event async for event in reader.subscribe(job_id, after)]


def live_through(store: JobStore, id: str, reports: int, dice: random.Random) -> None:
    """A whole life: claimed, reported on in batches of any size, handed back and claimed again in the middle."""
    for attempt in (1, 2):
        store.leases.claim(id, "ada")
        said = 0
        while said < reports:
            count = dice.randint(1, 5)
            steps = range(said, said + count)
            store.leases.report([ProgressReport(id, attempt, {"attempt": attempt, "step": k}) for k in steps])
            said += count
        if attempt == 1:
            store.leases.hand_back(id, 1)
    store.leases.succeed(id, 2, {})


def whole(client: redis.Redis, id: str) -> list[tuple[str, str]]:
    """The stream as it lies in Redis: (id, type) of each event."""
    entries: Any = client.xrange(f"diptych:events:{id}")
    return [(entry, fields["type"]) for entry, fields in entries]


def types(events: list[Event]) -> list[str]:
    return [event.type for event in events]


def blocks(client: redis.Redis) -> bool:
    """Whether a reader waits in Redis."""
    return any(each["flags"] == "b" for each in client.client_list())


def reads(client: redis.Redis) -> int:
    """How often streams were read."""
    return int(client.info("commandstats").get("cmdstat_xread", {"calls": 0})["calls"])


async def turns(client: redis.Redis, count: int) -> None:
    """So many turns of Redis, and of this loop, in which the reader lives."""
    for _ in range(count):
        await asyncio.to_thread(client.ping)


async def settled(reader: EventReader, client: redis.Redis) -> None:
    """Wait until a reader waits in Redis and has nothing left to read."""
    before = -1
    while reader._due or not blocks(client) or before != reads(client):
        before = reads(client)
        await turns(client, 30)


def seen(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.id, event.type) for event in events]


async def test_past_events_then_the_end(store: JobStore, reader: EventReader, client: redis.Redis) -> None:
    id = make(store)
    live_through(store, id, 150, random.Random(0))  # more than one page
    events = await collect(reader, id)
    assert seen(events) == whole(client, id)
    assert len(events) > 300
    assert [event.final for event in events] == [False] * (len(events) - 1) + [True]
    assert [event.data for event in events[:3]] == [{}, {"attempt": 1}, {"attempt": 1, "step": 0}]
    for index in (0, 1, 99, 100, len(events) - 2, len(events) - 1):
        assert await collect(reader, id, events[index].id) == events[index + 1 :]


async def test_after_an_event_that_is_no_more(store: JobStore, reader: EventReader) -> None:
    id = make(store)
    store.leases.claim(id, "ada")
    store.leases.fail(id, 1, "refused", 'steps: "too" many')
    assert await collect(reader, id, "9999999999999") == []
    events = await collect(reader, id, "1")
    assert types(events) == ["queued", "running", "failed"]
    assert events[-1].data == {"code": "refused", "message": 'steps: "too" many'}


@pytest.mark.parametrize("after", ["", "x", "-1", "1-", "1-2-3", "1 ", "99999999999999999999", "١", "$", "+"])
async def test_after_what_is_no_event(reader: EventReader, after: str) -> None:
    with pytest.raises(ValueError, match="after: is not the id of an event"):
        reader.subscribe("job_x", after)


async def test_live_events_without_gaps_or_duplicates(
    store: JobStore, reader: EventReader, client: redis.Redis
) -> None:
    """Writers race with subscribers who come at any moment, from the beginning or from any event, and leave."""
    dice = random.Random(7)
    ids = [make(store) for _ in range(6)]
    threads = [
        threading.Thread(target=live_through, args=(store, id, 200, random.Random(k))) for k, id in enumerate(ids)
    ]

    async def follow(reader: EventReader, id: str) -> tuple[str, str, list[Event]]:
        """Comes late, leaves and comes again a few times, each time from where it was; or from further back."""
        await asyncio.sleep(dice.random() / 2)
        after, start, events = "0", "0", []
        if dice.random() < 0.5:
            past = [entry for entry, type in whole(client, id) if type != "succeeded"]  # after which comes nothing
            after = start = dice.choice(past)
        while True:
            leave = dice.randint(1, 200)
            stream = reader.subscribe(id, after)
            async for event in stream:
                events.append(event)
                after, leave = event.id, leave - 1
                if event.final:
                    return id, start, events
                if leave == 0:
                    break
            else:
                raise AssertionError("the stream has ended before the job")
            await stream.aclose()

    for thread in threads:
        thread.start()
    results = await asyncio.gather(*(follow(reader, dice.choice(ids)) for _ in range(60)))
    for thread in threads:
        thread.join()
    assert len(results) == 60
    for id, start, events in results:
        stream = whole(client, id)
        begin = [entry for entry, _ in stream].index(start) + 1 if start != "0" else 0
        assert seen(events) == stream[begin:]


async def test_many_subscribers_share_a_few_connections(
    store: JobStore, reader: EventReader, client: redis.Redis
) -> None:
    ids = [make(store) for _ in range(40)]
    before = len(client.client_list())
    tasks = [asyncio.create_task(collect(reader, id)) for id in ids for _ in range(10)]
    while not blocks(client) or len(reader._followers) < len(ids):  # all of them wait
        await asyncio.sleep(0.01)
    assert len(client.client_list()) - before <= 4
    for id in ids:
        await asyncio.to_thread(store.cancel, id)
    for events in await asyncio.gather(*tasks):
        assert types(events) == ["queued", "cancelled"]
    assert len(client.client_list()) - before <= 5  # and the store's own


async def test_waiting_costs_nothing(
    store: JobStore, reader: EventReader, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No spinning: while nothing happens, nothing is asked, but as often as its own times say."""
    assert min(module._BLOCK_S, module._MISSED_S) >= 1
    monkeypatch.setattr(module, "_BLOCK_S", 10 * PATIENCE_S)
    monkeypatch.setattr(module, "_MISSED_S", 10 * PATIENCE_S)
    ids = [make(store) for _ in range(3)]
    tasks = [asyncio.create_task(collect(reader, id)) for id in ids]
    await followed(reader, 3)
    await settled(reader, client)
    before = reads(client)
    await turns(client, 300)
    assert reads(client) == before and blocks(client)
    for id in ids:
        store.cancel(id)
    await asyncio.gather(*tasks)
    assert not reader._followers
    assert not reader._positions


async def test_every_newcomer_is_noticed(
    store: JobStore, reader: EventReader, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but its own look and the notices brings them what happens."""
    monkeypatch.setattr(module, "_BLOCK_S", 10 * PATIENCE_S)
    monkeypatch.setattr(module, "_MISSED_S", 10 * PATIENCE_S)
    for _ in range(5):
        id = make(store)
        task = asyncio.create_task(collect(reader, id))
        other = asyncio.create_task(collect(reader, id))
        await followed(reader, 2)
        store.cancel(id)
        assert types(await task) == ["queued", "cancelled"]
        assert await task == await other
        # And it sleeps again.
        while not blocks(client):
            await asyncio.sleep(0.01)


async def test_newcomer_who_is_behind(store: JobStore, reader: EventReader) -> None:
    """While it was busy with the past, others were given what it has not seen: the reader goes back for it."""
    id = make(store)
    store.leases.claim(id, "ada")
    ahead, behind = reader.subscribe(id), reader.subscribe(id)
    for stream in (ahead, behind):
        assert types([await anext(stream) for _ in range(2)]) == ["queued", "running"]
    for step in (1, 2):
        store.leases.report([ProgressReport(id, 1, {"step": step})])
        assert (await anext(ahead)).data == {"step": step}
    assert [(await anext(behind)).data for _ in range(2)] == [{"step": 1}, {"step": 2}]
    store.cancel(id)
    for stream in (behind, ahead):
        assert [event.type async for event in stream] == ["cancelled"]


async def test_redis_restarts_under_subscribers(
    store: JobStore, client: redis.Redis, mortal: RedisServer, reader: EventReader
) -> None:
    ids = [make(store) for _ in range(3)]
    for id in ids:
        store.leases.claim(id, "ada")

    def writes(first: int) -> None:
        for step in range(first, first + 20):
            store.leases.report([ProgressReport(id, 1, {"step": step}) for id in ids])

    tasks = [asyncio.create_task(collect(reader, id)) for id in ids]
    for kill in range(3):
        await asyncio.to_thread(writes, 20 * kill)
        await asyncio.to_thread(mortal.kill)
        if kill == 1:  # somebody comes while it is away
            tasks += [asyncio.create_task(collect(reader, id)) for id in ids]
            await asyncio.sleep(0.3)
        await asyncio.to_thread(mortal.start)
    await asyncio.to_thread(writes, 60)
    for id in ids:
        await asyncio.to_thread(store.leases.succeed, id, 1, {})
    for id, events in zip(ids * 2, await asyncio.gather(*tasks), strict=True):
        assert seen(events) == whole(client, id)
        assert [e.data["step"] for e in events if e.type == "progress"] == list(range(80))


async def test_reader_starts_before_redis_and_the_job(
    store: JobStore, mortal: RedisServer, reader: EventReader
) -> None:
    id = new_id()
    mortal.kill()
    task = asyncio.create_task(collect(reader, id))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(mortal.start)
    await asyncio.to_thread(store.create, draft(id=id))
    await asyncio.to_thread(store.cancel, id)
    assert types(await task) == ["queued", "cancelled"]


async def test_slow_subscriber_misses_progress_alone(store: JobStore, reader: EventReader, client: redis.Redis) -> None:
    id = make(store)

    def writes() -> None:
        for attempt in range(1, 5):
            store.leases.claim(id, "ada")
            for step in range(40):
                store.leases.report([ProgressReport(id, attempt, {"step": 10 * step + k}) for k in range(10)])
            store.leases.hand_back(id, attempt)
        store.cancel(id)

    slow = reader.subscribe(id)
    first = await anext(slow)
    # It follows, and then does nothing while everything happens.
    second = asyncio.ensure_future(anext(slow))
    await followed(reader)
    fast = asyncio.create_task(collect(reader, id))
    await asyncio.to_thread(writes)
    everything = await fast
    assert len(everything) > 1000
    assert [event.final for event in everything][-1]
    (follower,) = reader._followers[id]
    assert len(follower.waiting) < 300
    late = [first, await second, *[event async for event in slow]]
    assert len(late) < 400
    rest = iter(everything)
    assert all(event in rest for event in late)  # the same order, and none twice
    changes = [event for event in everything if event.type != "progress"]
    assert [event for event in late if event.type != "progress"] == changes
    assert late[-1].final


async def test_full_redis(store: JobStore, reader: EventReader, full: redis.Redis) -> None:
    """Who follows writes nothing, so that it follows on a full Redis too."""
    id = make(store)
    full.config_set("maxmemory", 1)
    task = asyncio.create_task(collect(reader, id))
    await followed(reader)
    await asyncio.to_thread(store.cancel, id)
    assert types(await task) == ["queued", "cancelled"]


def none_stays(client: redis.Redis, before: int) -> None:
    """Fails if a connection stays open."""
    until = time.monotonic() + PATIENCE_S
    while len(client.client_list()) > before:  # Redis notices in a moment
        assert time.monotonic() < until
        time.sleep(0.001)


async def test_close_ends_subscriptions(store: JobStore, reader: EventReader, client: redis.Redis) -> None:
    id = make(store)
    before = len(client.client_list())
    waiting = asyncio.create_task(collect(reader, id))
    held = reader.subscribe(id)  # one that has fetched an event, and is closed before it asks for the next
    await anext(held)
    await followed(reader)
    await reader.close()
    assert types(await waiting) == ["queued"]
    assert [event async for event in held] == []
    assert await collect(reader, id) == []  # nobody waits at a closed reader
    none_stays(client, before)


async def test_close_at_any_moment(store: JobStore, redis_url: str, client: redis.Redis) -> None:
    """Also while it connects, where a cancellation may get lost. Neither a task nor a connection stays."""
    id = make(store)
    store.cancel(id)
    before, tasks = len(client.client_list()), asyncio.all_tasks()
    for turns in range(60):
        reader = EventReader(redis_url)
        await reader.start()
        if turns % 2:
            await collect(reader, id)
        for _ in range(turns // 2):
            await asyncio.sleep(0)
        await reader.close()
        assert asyncio.all_tasks() == tasks
    none_stays(client, before)


async def test_an_event_costs_the_same_however_many_are_followed(
    store: JobStore, reader: EventReader, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one event makes the reader send to Redis: a few hundred bytes, and not the names of all that is followed."""
    monkeypatch.setattr(module, "_MISSED_S", 10 * PATIENCE_S, raising=False)
    ids = [make(store) for _ in range(1000)]
    claims = [store.leases.claim(id, "ada") for id in ids[:20]]

    def sent() -> int:
        return int(client.info("stats")["total_net_input_bytes"])

    streams = [reader.subscribe(id) for id in ids]
    for stream in streams:
        await anext(stream)
    for stream in streams[:20]:
        await anext(stream)
    coming = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await followed(reader, 1000)
    await settled(reader, client)
    before = sent()
    for claim, arrives in zip(claims, coming, strict=False):
        assert claim is not None
        await asyncio.to_thread(store.leases.report, [ProgressReport(claim.id, claim.attempt, {"step": 1})])
        assert (await arrives).data == {"step": 1}
    assert (sent() - before) / 20 < 5_000
    for task in coming[20:]:
        task.cancel()
    await asyncio.gather(*coming[20:], return_exceptions=True)


async def test_what_sends_no_notices_is_found_all_the_same(
    store: JobStore, reader: EventReader, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of a version before writes events, and tells nobody."""
    monkeypatch.setattr(module, "_MISSED_S", 0.1)
    id = make(store)
    task = asyncio.create_task(collect(reader, id))
    await followed(reader)
    for type, data in (("running", '{"attempt":1}'), ("progress", '{"step":1}'), ("succeeded", "{}")):
        client.xadd(f"diptych:events:{id}", {"type": type, "data": data})
    assert types(await task) == ["queued", "running", "progress", "succeeded"]


async def test_events_of_a_version_to_come(store: JobStore, reader: EventReader, client: redis.Redis) -> None:
    """What cannot be read is left out, but for changes of state: those end what waits."""
    id = make(store)
    stream = f"diptych:events:{id}"
    entries: list[dict[Any, Any]] = [
        {"type": "progress", "data": "{}", "v": "2"}, {"type": "dreaming", "data": "{}", "v": "2"},
        {"type": "running", "data": "\x00", "v": "1"}, {"type": "progress", "data": '{"step":1}', "v": "1"},
        {"v": "x"}, {"type": "succeeded", "v": "2"},
    ]  # fmt: skip
    for entry in entries:
        client.xadd(stream, entry)
    events = await collect(reader, id)
    assert types(events) == ["queued", "running", "progress", "succeeded"]
    assert {fields.get("v") for _, fields in client.xrange(stream, count=1)} == {"1"}
