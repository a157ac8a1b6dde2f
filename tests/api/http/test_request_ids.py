"""x-request-id: on every answer, whatever it is, and in the lines and spans of the API and of the worker."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import redis

from core import traces
from core.jobs.record import JobDraft, new_id
from core.jobs.store import JobStore
from core.logs import JsonLines, TextLines, request_context
from deployment.redis import RedisServer
from tests.api.text.test_routes import ASK, CHAT
from tests.api.world import Api, Worker, check_error, settings_of
from tests.api.writing import written
from tests.collector import Collector
from tests.llm import stage

MADE = re.compile(r"req_[0-9a-f]{32}")


def test_every_answer_has_one(shared: Api) -> None:
    get, post = shared.client.get, shared.client.post
    job = shared.order()
    answers = [
        get("/healthz"), get("/"), get("/nothing"), get("/openapi.json"), get(f"/v1/jobs/{job}"), post("/healthz"),
        get("/v1/models", headers={"Host": "evil.example"}), post("/v1/jobs", content=b"{"), get("/v1/jobs?limit=0"),
    ]  # fmt: skip
    assert {answer.status_code for answer in answers} == {200, 400, 403, 404, 405, 415}
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert all(map(MADE.fullmatch, ids)) and len(set(ids)) == len(ids)
    with shared.client.stream("GET", f"/v1/jobs/{job}/events") as stream:
        assert MADE.fullmatch(stream.headers["x-request-id"])


@pytest.mark.parametrize("id", ["a", "5f0c9a3e-77aa-4a1e-9d5c-3a8b1f1d0a2b", "req_x.y-Z", "9" * 128])
def test_a_clients_own_is_kept(shared: Api, id: str) -> None:
    for path in ("/healthz", "/nothing"):
        assert shared.get(path, headers={"X-Request-ID": id}).headers["x-request-id"] == id


@pytest.mark.parametrize("id", ["", "a b", "9" * 129, "-a", 'a"b', "a\tb", "<script>", "ä", "a,b"])
def test_one_that_is_not_sane_is_replaced(shared: Api, id: str) -> None:
    answer = shared.get("/healthz", headers={"X-Request-ID": id.encode("latin-1")})
    assert MADE.fullmatch(answer.headers["x-request-id"])


def test_openais_client_reads_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        client.models.retrieve("none", extra_headers={"X-Request-ID": "mine"})
    assert refusal.value.request_id == "mine"


def handler_of(stream: io.StringIO, formatter: logging.Formatter) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    return handler


@contextmanager
def lines(name: str) -> Iterator[list[dict[str, str]]]:
    """What this logger says meanwhile, as JSON; read when the context is left."""
    stream, told = io.StringIO(), list[dict[str, str]]()
    handler = handler_of(stream, JsonLines())
    logging.getLogger(name).addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger(name).removeHandler(handler)
        told += [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_of_the_api_and_of_the_worker_name_it(redis_url: str, tmp_path: Path) -> None:
    """A request that only the worker refuses: it is the worker's line that says so. And the API's,
    of a record that is damaged."""
    pytest.importorskip("llguidance")
    settings = settings_of(redis_url, tmp_path)
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with written(settings, stage.small()) as api:
        with lines("workers.tasks") as told:
            body = {**ASK, "response_format": wanted}
            answer = api.client.post(CHAT, json=body, headers={"X-Request-ID": "from-outside"})
            check_error(answer, 400, "json_schema")
        assert [line["request_id"] for line in told] == ["from-outside"] and told[0]["job"].startswith("job_")
        with Worker(settings) as worker:
            (job,) = worker.ids()
        with lines("api.errors") as told, redis.Redis.from_url(redis_url) as client:
            broken = {"state": "running", "started": "1", "progress": '{"steps_done": "x", "steps": "x"}'}
            client.hset(f"diptych:job:{job}", mapping=broken)
            check_error(api.get(f"/v1/jobs/{job}", headers={"X-Request-ID": "second"}), 500)
        assert [line["request_id"] for line in told] == ["second"]


def test_spans_of_the_api_and_of_the_worker_have_it(redis_server: RedisServer, tmp_path: Path) -> None:
    with Collector() as collector:
        traces.begin(collector.url, "diptych-test")
        try:
            settings = settings_of(redis_server.url, tmp_path, traces=collector.url)
            with written(settings, stage.small()) as api:
                assert api.client.post(CHAT, json=ASK, headers={"X-Request-ID": "traced"}).status_code == 200
        finally:
            traces.end()
        found = {
            span.name: [one.value.string_value for one in span.attributes if one.key == "diptych.request_id"]
            for span in collector.spans()
        }
    assert found[f"POST {CHAT}"] == ["traced"] and found["job text"] == ["traced"]


def test_a_job_of_a_version_without_ids_is_still_done(redis_url: str) -> None:
    store = JobStore(redis_url)
    id = new_id()
    store.create(JobDraft(id=id, modality="text", model="m", request={}, request_id="mine"))
    with redis.Redis.from_url(redis_url) as client:
        assert client.hdel(f"diptych:job:{id}", "request_id", "trace") == 2
    claim = store.leases.claim(id, "w")
    assert claim is not None and (claim.request_id, claim.trace) == ("", "")
    store.close()


def test_plain_lines_have_it_too() -> None:
    stream, log = io.StringIO(), logging.Logger("api")
    log.addHandler(handler_of(stream, TextLines(logging.Formatter("%(levelname)s %(message)s"))))
    log.warning("before")
    with request_context("req_1"):
        log.error("it broke", exc_info=ValueError("why"))
    assert stream.getvalue().splitlines() == ["WARNING before", "ERROR it broke [req_1]", "ValueError: why"]
