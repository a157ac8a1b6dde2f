"""What cannot be asked is refused at once: in OpenAI's shape, with the field's name, no job made, nothing repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.world import Api, Worker, check_error

# Planted in whatever is sent; no answer may hold it.
MARK = "MARKER-7f3a"


@pytest.fixture(scope="module")
def worker(shared: Api) -> Worker:
    return Worker(shared.settings)


@pytest.fixture(params=["/v1/images/generations", "/v1/jobs"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def whole(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {**({"type": "image"} if path == "/v1/jobs" else {}), "prompt": f"a cat {MARK}", **fields}


def refuse(
    api: Api, worker: Worker, path: str, raw: bytes | Iterator[bytes], status: int, param: str | None, **headers: str
) -> None:
    before = worker.ids()
    answer = api.client.post(path, content=raw, headers={"content-type": "application/json", **headers})
    error = check_error(answer, status, param)
    assert param is None or param in error["message"]
    assert MARK not in answer.text and MARK not in str(answer.headers)
    assert worker.ids() == before, "no job is made"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \n\t "}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x" * 100_000 + MARK}, "prompt"),
        ({"prompt": MARK + "\x00"}, "prompt"),
        ({"prompt": [MARK]}, "prompt"),
        ({"negative_prompt": MARK + "\x08"}, "negative_prompt"),
        ({"vae": "tiny"}, "vae"),  # which this model does not have
        ({"size": "129x128"}, "size"),
        ({"size": [128, 128]}, "size"),
        ({"steps": 0}, "steps"),
        ({"steps": "20"}, "steps"),
        ({"guidance_scale": 1e300}, "guidance_scale"),
        ({"n": 1000}, "n"),
        ({"n": 10**30}, "n"),
        ({"output_format": "gif"}, "output_format"),
        ({"partial_images": 4}, "partial_images"),
        ({"preview_every": -1}, "preview_every"),
        ({"quality": {}}, "quality"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"scheduler": MARK}, "scheduler"),
        ({"deterministic": 1}, "deterministic"),
        ({"priority": 10}, "priority"),
        ({"deadline_s": 86_401}, "deadline_s"),
        ({"deadline_s": 0.5}, "deadline_s"),  # hopeless: the worker needs longer
        ({"response_format": MARK}, "response_format"),
        ({"stream": 1}, "stream"),
        ({"output_compression": 101}, "output_compression"),
        ({"user": 7}, "user"),
        ({"propmt": MARK}, "propmt"),
        ({"width": 128}, "height"),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value)[:40],
)
def test_fields(shared: Api, worker: Worker, path: str, fields: dict[str, Any], param: str) -> None:
    refuse(shared, worker, path, json.dumps(whole(path, fields)).encode(), 400, param)


@pytest.mark.parametrize(
    ("more", "param"),
    [(f'"{name}": {value}', name) for name, value in zip(
        ("guidance_scale", "deadline_s", "steps", "seed", "something_unknown"),
        ("NaN", "Infinity", "-Infinity", "1e999", "NaN"), strict=True)]
    + [('"extra": {"deep": [1, NaN]}', "extra.deep[1]"), ('"seed": 1, "seed": 2', "seed")],
)  # fmt: skip
def test_numbers_that_are_none_and_fields_given_twice(
    shared: Api, worker: Worker, path: str, more: str, param: str
) -> None:
    raw = json.dumps(whole(path, {}))[:-1] + f", {more}}}"
    refuse(shared, worker, path, raw.encode(), 400, param)


@pytest.mark.parametrize("name", ["prompt", "negative_prompt", "user", "something_unknown"])
def test_a_lone_surrogate(shared: Api, worker: Worker, path: str, name: str) -> None:
    raw = json.dumps(whole(path, {name: MARK + "\ud83d"}))
    assert "\\ud83d" in raw
    refuse(shared, worker, path, raw.encode(), 400, name)


def test_a_field_that_is_missing(shared: Api, worker: Worker) -> None:
    refuse(shared, worker, "/v1/images/generations", b"{}", 400, "prompt")
    refuse(shared, worker, "/v1/jobs", b'{"prompt": "a cat"}', 400, "type")
    refuse(shared, worker, "/v1/jobs", b'{"prompt": "a cat", "type": "text"}', 400, "type")
    refuse(shared, worker, "/v1/images/generations", b'{"prompt": "a cat", "type": "image"}', 400, "type")


def test_an_unknown_field_whose_name_is_no_plain_word(shared: Api, worker: Worker, path: str) -> None:
    refuse(shared, worker, path, json.dumps(whole(path, {f"<{MARK}>": 1})).encode(), 400, None)


def test_an_unknown_model(shared: Api, worker: Worker, path: str) -> None:
    before = worker.ids()
    error = check_error(shared.post(path, **whole(path, {"model": MARK})), 404, "model", "model_not_found")
    assert MARK not in error["message"]
    assert worker.ids() == before


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"prompt=" + MARK.encode(), b'"' + MARK.encode() + b'"', b"[1]", b"null", MARK.encode() + b"\xff"],
)
def test_a_body_that_is_no_object(shared: Api, worker: Worker, path: str, raw: bytes) -> None:
    refuse(shared, worker, path, raw, 400, None)


@pytest.mark.parametrize(
    "kind",
    [
        "", "text/plain", "application/x-www-form-urlencoded", f"multipart/form; boundary={MARK}", MARK,
        "application/jsonp", "text/json", "application/json; charset=utf-16", f"application/json; charset={MARK}",
    ],
)  # fmt: skip
def test_a_content_type_that_is_not_json(shared: Api, worker: Worker, path: str, kind: str) -> None:
    raw = json.dumps(whole(path, {})).encode()
    refuse(shared, worker, path, raw, 415, "content-type", **{"content-type": kind})


def test_a_compressed_body(shared: Api, worker: Worker, path: str) -> None:
    refuse(shared, worker, path, b"\x1f\x8b", 415, "content-encoding", **{"content-encoding": "gzip"})


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"']
)
def test_content_types_that_are_json(shared: Api, kind: str) -> None:
    answer = shared.client.post(
        "/v1/jobs", content=b'{"type": "image", "prompt": "\xc3\xa4"}', headers={"content-type": kind}
    )
    assert answer.status_code == 202


def test_a_body_that_is_too_large(shared: Api, worker: Worker, path: str) -> None:
    large = json.dumps(whole(path, {"user": MARK + "x" * 1024 * 1024})).encode()
    refuse(shared, worker, path, large, 413, None)
    pieces = (large[k : k + 65536] for k in range(0, len(large), 65536))  # whose length is not declared
    refuse(shared, worker, path, pieces, 413, None)
    # The client is served again, and a body of just the size is read.
    just = json.dumps({"type": "image", "prompt": "a cat"}).encode()
    just += b" " * (1024 * 1024 - len(just))
    answer = shared.client.post("/v1/jobs", content=just, headers={"content-type": "application/json"})
    assert len(just) == 1024 * 1024 and answer.status_code == 202


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", f"/{MARK}", 404, "not_found"),
        ("GET", f"/v1/{MARK}?{MARK}={MARK}", 404, "not_found"),
        ("GET", f"/v1/jobs/{MARK}", 404, "job_not_found"),
        ("GET", "/v1/jobs/job_000000000000000000000000", 404, "job_not_found"),
        ("POST", "/v1/jobs/job_000000000000000000000000/cancel", 404, "job_not_found"),
        ("GET", "/v1/jobs/..%2f..%2fetc%2fpasswd", 404, "not_found"),
        ("GET", f"/v1/jobs/%00{MARK}", 404, "job_not_found"),
        ("GET", f"/v1/jobs/%ff%fe{MARK}/events", 404, "job_not_found"),
        ("GET", f"/v1/models/{MARK}", 404, "model_not_found"),
        ("GET", f"/v1/models/a/b/{MARK}", 404, "model_not_found"),
        ("DELETE", f"/v1/jobs/{MARK}", 404, "job_not_found"),
        ("PATCH", f"/v1/jobs/{MARK}", 405, "method_not_allowed"),
        ("POST", f"/v1/jobs/{MARK}/requeue", 404, "job_not_found"),
        ("GET", f"/v1/jobs/{MARK}/preview", 404, "job_not_found"),
        ("POST", f"/v1/queues/{MARK}/pause", 404, "queue_not_found"),
        ("GET", f"/v1/jobs?status={MARK}", 400, "invalid_value"),
        ("GET", f"/v1/jobs?limit={MARK}", 400, "invalid_value"),
        ("GET", f"/v1/jobs?after={MARK}", 400, "invalid_value"),
        ("GET", f"/v1/jobs/{MARK}?wait_s={MARK}", 400, "invalid_value"),
        ("POST", "/healthz", 405, "method_not_allowed"),
        ("POST", "/v1/jobs/", 415, "unsupported_media_type"),  # and no redirect, which would repeat it
    ],
)
def test_addresses(shared: Api, method: str, path: str, status: int, code: str) -> None:
    answer = shared.client.request(method, path, headers={"x-mark": MARK, "cookie": MARK, "referer": MARK})
    check_error(answer, status, code=code)
    assert MARK not in answer.text and MARK not in str(answer.headers)
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize("id", [MARK, "-1", "1-", "1-2-3", "1" * 20, "0x1", "١", "$", "*", "+"])
def test_an_event_id_that_is_none(shared: Api, id: str) -> None:
    job = shared.order()
    for given in ({"headers": {"Last-Event-ID": id.encode()}}, {"params": {"last_event_id": id}}):
        answer = shared.get(f"/v1/jobs/{job}/events", **given)
        check_error(answer, 400, "last_event_id")
        assert MARK not in answer.text and MARK not in str(answer.headers)
