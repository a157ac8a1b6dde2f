"""stream: true, as OpenAI's own client reads it."""

from __future__ import annotations

import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest

from core.jobs.record import Claim, JobState, ProgressReport
from tests.api.world import PATIENCE_S, Api, Worker, eventually


def taken(worker: Worker, known: set[str]) -> Claim:
    (id,) = eventually(lambda: worker.ids() - known)
    return worker.take(id)


def look(worker: Worker, claim: Claim, done: int, image: int, png: bytes) -> None:
    data = {"steps_done": done, "steps": 20, "image": image, "images_done": 0, "previews": [image]}
    report = ProgressReport(claim.id, claim.attempt, data, {image: base64.b64encode(png).decode()})
    assert worker.store.leases.report([report]).stale == set()


def test_previews_and_then_the_picture(
    shared: Api, worker: Worker, client: openai.OpenAI, pool: ThreadPoolExecutor
) -> None:
    known = worker.ids()
    seen: list[Any] = []
    stream = partial(client.images.generate, prompt="a cat", stream=True, partial_images=2, size="64x64")
    reads = pool.submit(lambda: seen.extend(stream()))
    claim = taken(worker, known)
    assert claim.parameters["preview_every"] == 6  # of 20 steps: two previews, and the picture
    for k in range(2):
        look(worker, claim, 6 * (k + 1), 0, b"look %d" % k)
        eventually(lambda k=k: len(seen) == k + 1)  # type: ignore[misc]
    look(worker, claim, 18, 0, b"one too many")
    pictures = worker.finish(claim)
    reads.result(PATIENCE_S)
    assert [event.type for event in seen] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in seen[:2]] == [0, 1]
    assert [base64.b64decode(event.b64_json) for event in seen] == [b"look 0", b"look 1", pictures[0]]
    assert {(event.size, event.output_format, event.background) for event in seen} == {("64x64", "png", "opaque")}
    assert seen[2].usage.total_tokens == 0


def test_its_bytes_are_events_and_nothing_else(shared: Api, worker: Worker, pool: ThreadPoolExecutor) -> None:
    known = worker.ids()
    fields = {"prompt": "a cat", "stream": True, "n": 2, "response_format": "url"}
    answer = pool.submit(shared.client.post, "/v1/images/generations", json=fields)
    claim = taken(worker, known)
    worker.finish(claim)
    said = answer.result(PATIENCE_S)
    assert said.headers["content-type"].startswith("text/event-stream")
    blocks = said.text.strip().split("\n\n")
    assert len(blocks) == 2
    for k, block in enumerate(blocks):
        event, data = block.split("\n")
        assert event == "event: image_generation.completed" and data.startswith("data: {")
        assert f"/v1/jobs/{claim.id}/images/{k}" in data


@pytest.mark.parametrize("end", ["fail", "cancel", "expire"])
def test_an_end_without_success(
    shared: Api, worker: Worker, client: openai.OpenAI, end: str, pool: ThreadPoolExecutor
) -> None:
    known = worker.ids()
    reads = pool.submit(lambda: list(client.images.generate(prompt="a cat", stream=True)))
    claim = taken(worker, known)
    if end == "fail":
        worker.store.leases.fail(claim.id, 1, "engine_error", "the engine failed")
    elif end == "cancel":
        worker.store.cancel(claim.id)
    else:
        worker.store.leases.expire(claim.id, 1)
    with pytest.raises(openai.APIError) as caught:
        reads.result(PATIENCE_S)
    expected = {"fail": "the engine failed", "cancel": "The job was cancelled.", "expire": "The deadline passed"}
    assert expected[end] in str(caught.value)


def test_who_leaves_a_stream_cancels(shared: Api, worker: Worker, client: openai.OpenAI) -> None:
    known = worker.ids()
    stream: list[Any] = []
    opened = threading.Thread(target=lambda: stream.append(client.images.generate(prompt="a cat", stream=True)))
    opened.start()
    claim = taken(worker, known)
    opened.join(PATIENCE_S)
    stream[0].close()
    eventually(lambda: worker.is_(claim.id, JobState.CANCELLED))
