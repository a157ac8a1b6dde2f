"""Files and batches by OpenAI's own client: they trickle in, end once, and are their owner's."""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import openai
import pytest

from api import files
from api.batches import lines as batch_lines
from api.batches.feeder import BatchFeeder
from api.batches.line_handler import BatchLineHandler, Result
from api.batches.lines import RawLine
from api.batches.routes import KEEP_S
from api.http import body
from api.service import Service
from core.config import Settings
from core.jobs.batches import BatchStore
from core.jobs.record import JobState
from tests.api.easel import Easel
from tests.api.pictures.test_edits import EDITS, as_file, bomb, handed_on, hole, pixels
from tests.api.pictures.test_expand import TEXT, expand, served
from tests.api.pictures.test_references import ZEROS, inline, uploaded
from tests.api.world import CARD, Api, Worker, changed, check_error, client_of, eventually, kept, opened, token_of

URL = "/v1/images/generations"
World = tuple[Api, Worker, openai.OpenAI]


def lines(*bodies: dict[str, Any], url: str = URL) -> bytes:
    asked = [{"custom_id": f"c{k}", "method": "POST", "url": url, "body": body} for k, body in enumerate(bodies)]
    return b"\n".join(json.dumps(line).encode() for line in asked)


@pytest.fixture
def world(settings: Settings) -> Iterator[World]:
    with opened(changed(settings, batch_jobs=3), CARD) as (api, worker), client_of(api.url) as client:
        yield api, worker, client


def begin(client: openai.OpenAI, data: bytes, url: Any = URL, **more: Any) -> Any:
    file = client.files.create(file=("asked.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **more)


def raw(data: bytes) -> Iterator[RawLine]:
    return (RawLine(line, 0) for line in data.split(b"\n") if line.strip())


def ended(client: openai.OpenAI, id: str) -> Any:
    return eventually(
        lambda: (found := client.batches.retrieve(id)).status not in ("in_progress", "cancelling") and found
    )


def told(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]


def test_from_file_to_files(world: World) -> None:
    api, worker, client = world
    asked = [{"prompt": f"cat {k}", "seed": k, "size": "64x64", "steps": 2} for k in range(8)]
    asked[2]["prompt"] = ""
    asked[5]["response_format"] = "b64_json"
    asked[6]["n"] = 2
    batch = begin(client, lines(*asked), metadata={"for": "me"})
    client.files.delete(batch.input_file_id)  # which is no harm
    assert (batch.status, batch.request_counts.total, batch.metadata) == ("in_progress", 8, {"for": "me"})
    eventually(lambda: worker.store.backlog("image").queued == 3)
    assert {level for _, level in worker.messages()} == {9}, "who waits for one goes first"
    with Easel(worker) as easel:
        done = ended(client, batch.id)
    assert done.status == "completed" and done.completed_at and not done.failed_at
    assert (done.request_counts.completed, done.request_counts.failed) == (7, 1)
    well, order = told(client, done.output_file_id), [0, 1, 3, 4, 5, 6, 7]
    assert [claim.parameters["seed"] for claim in easel.seen] == order
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in well)
    images = {line["custom_id"]: line["response"]["body"]["data"] for line in well}
    assert [(name, data[0]["seed"]) for name, data in images.items()] == [(f"c{k}", k) for k in order]
    assert len(images["c6"]) == 2 and api.get(images["c0"][0]["url"]).status_code == 200
    assert base64.b64decode(images["c5"][0]["b64_json"]).startswith(b"\x89PNG") and "url" not in images["c5"][0]
    (ill,) = told(client, done.error_file_id)
    assert ill["custom_id"] == "c2" and ill["response"]["status_code"] == 400
    assert ill["response"]["body"]["error"]["param"] == "prompt"
    assert [found.id for found in client.batches.list().data] == [batch.id]
    names = {file.filename for file in client.files.list().data}
    assert names == {f"{batch.id}_output.jsonl", f"{batch.id}_error.jsonl"}
    client.files.delete(done.output_file_id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(done.output_file_id)


def test_a_picture_that_is_deleted_while_it_is_written_leaves_its_link(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was deleted before: the batch goes on."""
    _, worker, client = world
    put_inside, deleted = BatchLineHandler._put_inside, set[str]()

    def delete_then(handler: BatchLineHandler, response: Result, keys: list[str]) -> None:
        put_inside(handler, response, keys)
        for key in set(keys) - deleted:
            worker.artifacts.delete(key)
            deleted.add(key)

    monkeypatch.setattr(BatchLineHandler, "_put_inside", delete_then)
    batch = begin(client, lines({"prompt": "a cat", "steps": 2, "response_format": "b64_json"}))
    with Easel(worker):
        done = ended(client, batch.id)
    assert (done.status, done.request_counts.completed) == ("completed", 1)
    (line,) = told(client, done.output_file_id)
    assert deleted and "url" in line["response"]["body"]["data"][0]


def test_cancelling_reaches_its_jobs_and_no_others(world: World) -> None:
    api, worker, client = world
    other = api.order()
    batch = begin(client, lines(*[{"prompt": "a cat", "steps": 2}] * 5))
    mine = eventually(lambda: len(found := worker.ids() - {other}) == 3 and found)
    first = next(id for id, level in worker.messages() if level == 9)
    worker.work(first)
    client.batches.cancel(batch.id)
    done = ended(client, batch.id)
    assert done.status == "cancelled" and done.cancelled_at
    assert worker.is_(other, JobState.QUEUED)
    assert sorted(worker.job(id).state.value for id in mine) == ["cancelled", "cancelled", "succeeded"]
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 0), "what did not run has not failed"
    left = told(client, done.error_file_id)
    assert len(left) == 4, "what was never begun is told too"
    assert all(line["error"]["code"] == "batch_cancelled" and line["response"] is None for line in left)
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_two_who_work_at_one_do_nothing_twice(settings: Settings) -> None:
    """Another takes over in mid-work, and the first does not know: jobs, counts and files are those of one."""
    service = Service(changed(settings, batch_jobs=4))
    parts = (service.batches, service.files, service.rates, service.keyring, service.registry, service.store)
    with Worker(settings) as worker, ExitStack() as opened_parts:
        for part in (*parts, service.queue):
            opened_parts.callback(part.close)
        service.cards.now = dataclasses.replace(service.cards.now, models=(CARD,))
        file = kept(service, lines(*[{"prompt": "a cat", "steps": 2}] * 6))
        batch = service.batches.add("", URL, file, 6, "http://x/", None, [])
        one, other = BatchFeeder(service), BatchFeeder(service)
        for _ in range(3):
            stale = service.batches.progress([batch.id])
            one.work()
            other._store = Stale(settings.redis_url, stale)  # it acts on what it read before
            other.work()
            other._store.close()
            for id, _ in worker.messages_left():
                worker.work(id)
        one.work()
        one.work()
        found = service.batches.batch(batch.id)
        assert found is not None and (found.status, found.completed, found.failed) == ("completed", 6, 0)
        assert len(worker.ids()) == 6
        outputs = [made for made in service.files.files("").items if made.purpose == "batch_output"]
        assert found.output_file in {made.id for made in outputs}
        assert len(service.artifacts.get(outputs[0].key).splitlines()) == 6


class Stale(BatchStore):
    """Reads a batch as it was."""

    def __init__(self, url: str, was: list[Any]) -> None:
        super().__init__(url)
        self._was = was

    def progress(self, ids: Any) -> list[Any]:
        return self._was


@pytest.mark.parametrize(
    ("data", "param", "line"),
    [
        (b"{}", "custom_id", 1),
        (lines({}) + b"\n" + lines({}), "custom_id", 2),
        (lines({}).replace(b"POST", b"GET"), "method", 1),
        (lines({}).replace(b"generations", b"edits"), "url", 1),
        (lines({}) + b"\nno json", None, 2),
        (lines({}).replace(b"{}", b"[]"), "body", 1),
        (lines(*[{}] * 3) + b"\n" + b'{"custom_id": NaN}', "custom_id", 4),
        (b" \n \n", None, None),
    ],
)
def test_a_file_of_no_use_says_where(data: bytes, param: str | None, line: int | None) -> None:
    found = batch_lines.check(raw(data), URL)
    assert found.errors and (found.errors[0]["param"], found.errors[0]["line"]) == (param, line)
    assert not line or found.lines == line - 1


def test_a_long_text_is_no_number_of_values() -> None:
    """Commas inside of it are not counted; values are, as those of every body."""
    made = lines({"prompt": "a, [b], {c}" * 200_000})
    assert len(made) > body.MAX_BYTES and not batch_lines.check(raw(made), URL).errors
    (error,) = batch_lines.check(raw(lines({"prompt": [1] * body.MAX_TOKENS})), URL).errors
    assert error["code"] == "invalid_body" and f"more than {body.MAX_TOKENS} values" in error["message"]


def test_as_many_lines_as_are_allowed() -> None:
    made = lines(*[{"prompt": "a"}] * batch_lines.MOST_LINES)
    rests: list[float] = []
    found = batch_lines.check(raw(made + b"\n"), URL, rests.append)
    assert found.lines == 10_000 and not found.errors
    assert len(rests) >= len(made) / 8192, "the interpreter is left to others again and again"
    assert all(0 <= rest <= 0.05 for rest in rests)
    assert batch_lines.check(raw(made + b"\n" + made), URL).errors[0]["line"] is None


def test_what_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    api, _, client = world
    failed = begin(client, b"no json")
    assert failed.status == "failed" and failed.errors.data[0].line == 1 and failed.failed_at
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-" + "0" * 24, endpoint=URL, completion_window="24h")  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError):
        client.batches.create(input_file_id="x", endpoint="/v1/responses", completion_window="24h")
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("a", b"x"), purpose="fine-tune")
    post = api.client.post
    check_error(post("/v1/files", files={"file": ("a", b"")}, data={"purpose": "batch"}), 400, "file")
    check_error(post("/v1/files", data={"purpose": "batch"}), 415, code="unsupported_media_type")
    multipart = {"content-type": "multipart/form-data; boundary=x"}
    check_error(post("/v1/files", content=iter([b"--y"]), headers=multipart), 400, code="invalid_body")
    twice = [("file", ("a", b"x")), ("file", ("b", b"y"))]
    check_error(post("/v1/files", files=twice, data={"purpose": "batch"}), 400, "file", "repeated_field")
    monkeypatch.setattr(files, "MAX_BYTES", -files._ENVELOPE)
    for content in (b"--x", iter([b"--x"])):
        check_error(post("/v1/files", content=content, headers=multipart), 413, code="body_too_large")
    for path in ("/v1/files/x", "/v1/files/x/content", "/v1/batches/x", "/v1/batches/batch_é"):
        check_error(api.get(path), 404)


def test_links_of_a_batch_outlive_the_hour(settings: Settings, alone: tuple[Api, Worker]) -> None:
    """They are signed, and last as long as the batch's jobs."""
    api, worker = alone
    with client_of(api.url, token_of(settings)) as client, Easel(worker):
        done = ended(client, begin(client, lines({"prompt": "a cat", "n": 4, "steps": 2})).id)
        (line,) = told(client, done.output_file_id)
        url = line["response"]["body"]["data"][3]["url"]
        (expires,) = parse_qs(urlsplit(url).query)["expires"]
        assert int(expires) > time.time() + KEEP_S - 3600 and api.get(url).status_code == 200


# -- edits -------------------------------------------------------------------------------------------------------------


def test_edits_are_lines_too(world: World) -> None:
    api, worker, client = world
    arrays = [pixels(seed=k) for k in range(3)]
    names = [uploaded(api, as_file(array)) for array in arrays]
    data = lines(
        {"prompt": "one", "images": [names[0]], "seed": 1, "steps": 4},
        {"prompt": "two", "images": [names[1]], "mask": inline(as_file(hole())), "seed": 2, "steps": 4, "n": 2},
        {"prompt": "no file", "images": [{"file_id": ZEROS}]},
        {"prompt": "no picture", "images": [uploaded(api, b"{}", purpose="batch")]},
        {"prompt": "no images"},
        {"prompt": "bomb", "images": [inline(bomb(20_000, 20_000))]},
        {"prompt": "three", "images": [names[2]], "strength": 0.5, "seed": 3, "steps": 4, "stream": True},
        url=EDITS,
    )
    with Easel(worker) as easel:
        done = ended(client, begin(client, data, EDITS).id)
    ill = {line["custom_id"]: line["response"] for line in told(client, done.error_file_id)}
    assert {name: (line["status_code"], line["body"]["error"]["param"]) for name, line in ill.items()} == {
        "c2": (404, "images.file_id"), "c3": (400, "images.file_id"), "c4": (400, "images"), "c5": (400, "images"),
    }  # fmt: skip
    well = [(line["custom_id"], len(line["response"]["body"]["data"])) for line in told(client, done.output_file_id)]
    assert well == [("c0", 1), ("c1", 2), ("c6", 1)]
    for claim, array, prompt, strength in zip(easel.seen, arrays, ("one", "two", "three"), (0.8, 1, 0.5), strict=True):
        assert (claim.parameters["prompt"], claim.parameters["edit"]["strength"]) == (prompt, strength)
        assert np.array_equal(handed_on(worker, claim)[0], array)


def test_an_edit_may_have_its_prompt_expanded_at_every_door(settings: Settings) -> None:
    with served(settings, (CARD, TEXT)) as (api, worker), client_of(api.url) as client:
        fields = {"prompt": "a cat", "images": [inline()], "expand_prompt": True, "seed": 1}
        id = api.order(type="edit", **fields)
        job = expand(worker)
        assert job.id == id and job.parameters["expand_prompt"] is True and job.parameters["edit"]["image"]
        assert api.job(id)["images"][0]["revised_prompt"] == "a cat, the 0th ☂"
        batch = begin(client, lines(fields, url=EDITS), EDITS)
        expand(worker, {id})
        (line,) = told(client, ended(client, batch.id).output_file_id)
        assert line["response"]["body"]["data"][0]["revised_prompt"] == "a cat, the 0th ☂"
        assert all(worker.is_(one, JobState.SUCCEEDED) for one in worker.ids())


def test_a_line_waits_for_a_model_that_is_being_loaded(world: World) -> None:
    api, worker, client = world
    worker.announce(loading={"slow": "image"})
    eventually(lambda: api.get("/readyz").json()["loading"])
    batch = begin(client, lines({"prompt": "a cat", "model": "slow"}, {"prompt": "a cat", "model": "none"}))
    worker.announce(card=dataclasses.replace(CARD, name="slow"))
    (id,) = eventually(worker.ids)
    worker.work(id)
    done = ended(client, batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
