"""Server-sent events: everything once, in order, from any point on; the end carries the whole job."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from api.jobs import events as module
from tests.api.world import PATIENCE_S, Api, Sent, Worker, eventually


def run(worker: Worker, id: str, steps: int = 5) -> None:
    claim = worker.take(id)
    for done in range(1, steps + 1):
        worker.report(claim, done)
    worker.finish(claim)


def test_a_job_that_is_watched(shared: Api, worker: Worker) -> None:
    id = shared.order(steps=5)
    with ThreadPoolExecutor(1) as pool, shared.events(id) as events:
        assert next(events).type == "queued"
        pool.submit(run, worker, id).result(PATIENCE_S)
        rest = list(events)
    assert [event.type for event in rest] == ["running", *["progress"] * 5, "succeeded"]
    assert rest[0].data == {"attempt": 1}
    assert [event.data["steps_done"] for event in rest[1:-1]] == [1, 2, 3, 4, 5]
    assert rest[-1].data == shared.job(id) and rest[-1].data["images"][0]["url"].startswith(shared.url)
    assert shared.all_events(id)[1:] == rest, "the past is told as it was"


def test_resumes_after_any_event(shared: Api, worker: Worker) -> None:
    id = shared.order(steps=7)
    run(worker, id, 7)
    whole = shared.all_events(id)
    assert len(whole) == 10 and len({event.id for event in whole}) == 10
    last = {"Last-Event-ID": whole[-2].id}
    for k, event in enumerate(whole[:-1]):
        assert shared.all_events(id, event.id) == whole[k + 1 :]
        for headers, count in (({}, len(whole) - k - 1), (last, 1)):  # the header goes before the query
            path = f"/v1/jobs/{id}/events"
            answer = shared.get(path, params={"last_event_id": event.id}, headers=headers)
            assert answer.text.count("\n\n") == count
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store" and answer.headers["x-accel-buffering"] == "no"
    assert shared.all_events(id, "0") == shared.all_events(id, "0-0") == shared.all_events(id, "") == whole


def test_who_has_seen_the_end_is_told_not_to_come_again(shared: Api, worker: Worker) -> None:
    id = shared.order()
    run(worker, id)
    for seen in (shared.all_events(id)[-1].id, "9" * 19, f"{'9' * 19}-{'9' * 19}"):
        answer = shared.get(f"/v1/jobs/{id}/events", headers={"Last-Event-ID": seen})
        assert answer.status_code == 204 and answer.content == b""


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_client_that_comes_and_goes_misses_nothing(shared: Api, worker: Worker, every: int) -> None:
    steps = 40
    id = shared.order(steps=steps)
    got: list[Sent] = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run, worker, id, steps)
        while not got or got[-1].type != "succeeded":
            with shared.events(id, got[-1].id if got else None) as events:
                got += itertools.islice(events, every)
    assert got == shared.all_events(id)
    assert [event.type for event in got] == ["queued", "running", *["progress"] * steps, "succeeded"]


@pytest.mark.parametrize("how", ["failed", "cancelled", "expired"])
def test_other_ends(shared: Api, worker: Worker, how: str) -> None:
    id, leases = shared.order(), worker.store.leases
    with shared.events(id) as events:
        next(events)
        if how == "cancelled":
            shared.client.post(f"/v1/jobs/{id}/cancel")
        elif how == "failed":
            leases.fail(id, worker.take(id).attempt, "device_error", "the device went away")
        else:
            leases.expire(id, worker.take(id).attempt)
        last = list(events)[-1]
    assert last.type == how and last.data == shared.job(id) and last.data["status"] == how


def test_a_stream_that_is_gone(shared: Api, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record tells how it ended, to whoever asks from wherever."""
    monkeypatch.setattr(module, "_PAST_S", 0.2)  # nothing can come: the stream is not there
    id = shared.order()
    run(worker, id)
    whole = shared.all_events(id)
    worker.redis.delete(f"diptych:events:{id}")
    for after in (None, whole[0].id):
        (last,) = shared.all_events(id, after)
        assert (last.id, last.type, last.data) == ("", "succeeded", shared.job(id))


def test_silence_is_filled_and_a_lost_end_is_found(
    shared: Api, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis that came back from its file may have lost the last second: here, the stream but not the record."""
    monkeypatch.setattr(module, "_KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr(module, "_PAST_S", 0.2)
    id = shared.order()
    with shared.client.stream("GET", f"/v1/jobs/{id}/events") as answer:
        lines = answer.iter_lines()
        assert eventually(lambda: next(lines).startswith(":")), "a comment keeps the connection alive"
        # As one step for all who read: the end, without its event.
        with worker.redis.pipeline() as pipe:
            pipe.delete(f"diptych:events:{id}")
            pipe.hset(f"diptych:job:{id}", mapping={"state": "cancelled", "ended": 1_700_000_000_000})
            pipe.execute()
        text = "\n".join(lines)
    assert "event: cancelled" in text and f'"id":"{id}"' in text


def test_who_leaves_is_no_longer_served(shared: Api, worker: Worker) -> None:
    id = shared.order()
    followers = shared.server._service.reader._followers  # type: ignore[attr-defined]
    with shared.events(id) as events:
        next(events)
        eventually(lambda: id in followers)
    eventually(lambda: id not in followers, "the subscription is closed")


@pytest.mark.parametrize("pieces", [0, 1])
def test_who_leaves_before_a_stream_has_begun_leaves_nothing(pieces: int) -> None:
    """A generator that never began runs none of its code, and so does not cancel its job: then somebody else does."""
    ended: list[str] = []

    async def source() -> AsyncGenerator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            ended.append("source")

    async def unheard() -> None:
        ended.append("unheard")

    async def work() -> None:
        sent = asyncio.Event()

        async def receive() -> dict[str, Any]:
            while pieces and not sent.is_set():
                await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and message["body"]:
                sent.set()
            elif not pieces:
                await asyncio.Event().wait()  # the headers do not get through

        scope: dict[str, Any] = {"type": "http", "method": "POST", "asgi": {"spec_version": "2.3"}}
        stream = module.EventStream(source(), unheard)
        await asyncio.wait_for(stream(scope, receive, send), PATIENCE_S)  # type: ignore[arg-type]

    asyncio.run(work())
    assert ended == (["source"] if pieces else ["unheard"])
