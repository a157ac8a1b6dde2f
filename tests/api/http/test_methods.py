"""HEAD, `Allow`, ranges, numbers in addresses, and what is no HTTP: by the letter of RFC 9110."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import httpx2
import pytest

from api.document import _HEAD
from api.http import body
from tests.api.http.test_protocol import connected, ended
from tests.api.world import PATIENCE_S, Api, Worker, check_error, eventually

JOB = {"type": "image", "prompt": "a cat", "steps": 2}


@pytest.fixture(scope="module")
def drawn(shared: Api) -> tuple[str, bytes]:
    """The address of a finished picture, and its bytes."""
    id = shared.order(n=2)
    with Worker(shared.settings) as worker:
        return f"/v1/jobs/{id}/images/1", worker.work(id)[1]


@pytest.fixture(scope="module")
def addresses(shared: Api, drawn: tuple[str, bytes]) -> dict[str, str]:
    """Every address of the document that answers GET, and the pages, with parameters of what is there."""
    file = shared.client.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}).json()["id"]
    batch = shared.post("/v1/batches", input_file_id=file, endpoint="/v1/completions", completion_window="24h").json()
    known = {
        "/v1/jobs/{id}": {"id": drawn[0].split("/")[3], "k": "1"}, "/v1/files/": {"id": file},
        "/predictions/": {"id": drawn[0].split("/")[3]}, "/v1/predictions/": {"id": drawn[0].split("/")[3]},
        "/v1/models/{owner}/": {"owner": "diptych", "name": "emoji-xl", "id": "emoji-xl"},
        "/v1/batches/": {"id": batch["id"]}, "/v1/models/": {"name": "emoji-xl"}, "/v2/models/": {"name": "emoji-xl"},
        "/v1/queues/": {"name": "image"},
    }  # fmt: skip
    paths = shared.get("/openapi.json").json()["paths"]
    made = {"/": "/", "/web/main.js": "/web/main.js", "/openapi.json": "/openapi.json", "/docs": "/docs"}
    for path in paths:
        parameters = next((one for prefix, one in known.items() if path.startswith(prefix)), {})
        made[path] = path.format(**parameters)
    return made


def test_head_is_get_without_a_body(shared: Api, addresses: dict[str, str]) -> None:
    """Also of pictures, files, event streams, metrics, pages and errors."""
    paths = shared.get("/openapi.json").json()["paths"]
    seen = set()
    for template, path in addresses.items():
        if "get" not in paths.get(template, {"get": {}}):
            continue
        got, head = shared.get(path), shared.head(path)
        seen.add(head.status_code)
        assert head.status_code == got.status_code, path
        assert not head.content, path
        changing = {"date", "x-request-id"} | ({"content-length"} if path in ("/metrics", "/readyz") else set())
        told = [{n: v for n, v in answer.headers.items() if n not in changing} for answer in (got, head)]
        if "event-stream" in got.headers.get("content-type", ""):
            told = [{n: v for n, v in one.items() if n not in ("transfer-encoding", "content-length")} for one in told]
        assert told[0] == told[1], path
        assert head.headers["x-request-id"]
    assert seen == {200, 204} or seen == {200}
    assert not shared.head("/nothing").content and shared.head("/nothing").status_code == 404
    assert all("head" in paths[path] for path in _HEAD)


def test_head_of_a_live_stream_ends_at_once(shared: Api) -> None:
    """The connection serves the next request: nothing of the stream follows, and nobody follows the job."""
    id = shared.order()
    with httpx2.Client(base_url=shared.url, timeout=PATIENCE_S) as client:
        head = client.head(f"/v1/jobs/{id}/events")
        assert head.status_code == 200 and head.headers["content-type"].startswith("text/event-stream")
        assert client.get("/healthz").json() == {"status": "ok"}
    assert id not in shared.server._service.reader._followers


def test_allow_names_every_method(shared: Api, addresses: dict[str, str]) -> None:
    paths = shared.get("/openapi.json").json()["paths"]
    for template, path in addresses.items():
        if template not in paths:
            continue
        there = {method.upper() for method in paths[template]}
        if template.startswith("/v1/models/{owner}"):  # by which a model whose name has slashes is addressed too
            there |= {method.upper() for method in paths["/v1/models/{name}"]}
        there |= {"HEAD"} if "GET" in there else set()
        there |= {"GET", "HEAD"} if path == "/" else set()  # the playground's page, which is no part of the document
        for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"} - there:
            answer = shared.client.request(method, path)
            assert answer.status_code == 405, (method, path)
            assert set(answer.headers["allow"].split(", ")) == there, (method, path)
    assert shared.client.patch("/v1/jobs").headers["allow"] == "GET, HEAD, POST"
    check_error(shared.client.patch("/v1/jobs"), 405, code="method_not_allowed")


def test_a_range_is_of_the_same_representation(shared: Api, drawn: tuple[str, bytes]) -> None:
    """Which ranges there are is in test_stored_bytes.py."""
    path, data = drawn
    answer, whole = (shared.get(path, headers=given) for given in ({"Range": "bytes=-4"}, {}))
    assert answer.status_code == 206 and answer.content == data[-4:] and whole.content == data
    for name in ("etag", "content-type", "accept-ranges"):
        assert answer.headers[name] == whole.headers[name]
    head = shared.head(path, headers={"Range": "bytes=1000000-"})
    assert head.status_code == 200, "ranges are for GET alone"


def test_a_picture_is_put_together_from_its_ranges(shared: Api, drawn: tuple[str, bytes]) -> None:
    path, data = drawn
    tag = shared.head(path).headers["etag"]
    parts = [
        shared.get(path, headers={"Range": f"bytes={at}-{at + 6}", "If-Range": tag}) for at in range(0, len(data), 7)
    ]
    assert {part.status_code for part in parts} == {206} and b"".join(part.content for part in parts) == data


@pytest.mark.parametrize(
    "given",
    [{"Range": "bytes=0-1,3-4"}, {"Range": "items=0-1"}, {"Range": "bytes=5-2"}, {"Range": "bytes=-"},
     {"Range": "bytes=a-b"}, {"Range": "bytes"}, {"Range": "bytes=0-1", "If-Range": '"another"'},
     {"Range": "bytes=0-1", "If-Range": "Wed, 21 Oct 2015 07:28:00 GMT"}],
)  # fmt: skip
def test_what_is_no_range_gives_all(shared: Api, drawn: tuple[str, bytes], given: dict[str, str]) -> None:
    answer = shared.get(drawn[0], headers=given)
    assert answer.status_code == 200 and answer.content == drawn[1]


def test_who_has_it_is_told_before_any_range(shared: Api, drawn: tuple[str, bytes]) -> None:
    tag = shared.head(drawn[0]).headers["etag"]
    given = {"Range": "bytes=0-1", "If-None-Match": tag}
    assert shared.get(drawn[0], headers=given).status_code == 304


@pytest.mark.parametrize(
    "text", ["8.313760042530431", "1e1", "5.5e0", "0", "60", "6E+1", "1e-300", "-0", "0.1000000000000000055511"]
)
def test_numbers_of_every_form(text: str) -> None:
    assert body.number(text) == float(text)


@pytest.mark.parametrize(
    "text",
    ["nan", "inf", "-inf", "Infinity", "0x10", "1_0", " 1", "1 ", "1\n", "", "+1", "1.", ".5", "1e", "٣", "1,5",
     "1e400", "9" * 101],
)  # fmt: skip
def test_what_is_no_number(text: str) -> None:
    assert body.number(text) is None


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    with caplog.at_level(logging.WARNING):
        yield caplog.records


@pytest.mark.parametrize("host", ["x", "localhost"])
@pytest.mark.parametrize("start", ["POST /v1/jobs", "POST /nothing", "GET /healthz", "POST /v1/images/generations"])
def test_a_chunk_that_is_none_in_the_first_packet(
    shared: Api, said: list[logging.LogRecord], start: str, host: str
) -> None:
    """The request is begun when it turns out to be none: it is answered once, and no traceback is logged."""
    with connected(shared) as client:
        client.sendall(f"{start} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".encode())
        answer = ended(client)
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"x-request-id: req_" in head and answer.count(b"HTTP/1.1 ") == 1
    assert b'"code": "invalid_http"' in content
    eventually(lambda: not shared.server.server_state.tasks)
    assert not [record for record in said if record.exc_info], "no traceback"


def test_a_chunk_that_is_none_behind_the_answer(shared: Api, said: list[logging.LogRecord]) -> None:
    with connected(shared) as client:
        client.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        answer = b""
        while b"host_not_allowed" not in answer:
            answer += client.recv(65536)
        assert b"403" in answer
        client.sendall(b"zz\r\n")
        assert b"HTTP/1.1" not in ended(client)
    assert not [record for record in said if record.exc_info], "no traceback"


def test_bytes_that_are_no_http(shared: Api) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET /\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n"):
        with connected(shared) as client:
            client.sendall(data)
            answer = ended(client)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"invalid_http" in answer
    assert shared.get("/healthz").status_code == 200


def test_a_form_takes_the_same_numbers(shared: Api) -> None:
    for text, param in (("1e400", "guidance_scale"), ("5.5e0", "image")):
        fields = {"prompt": "a", "guidance_scale": text}
        answer = shared.client.post("/v1/images/edits", data=fields, files={"image": b"x"})
        check_error(answer, 400, param)
