"""Forms: what is parsed equals what was sent, in chunks of any size; limits on fields, files and names."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from fastapi import Request
from hypothesis import given, settings
from hypothesis import strategies as st
from python_multipart.exceptions import FormParserError

from api.errors import ApiError
from api.http import body as request_body
from api.http.body import MAX_BYTES
from api.http.forms import _boundary, _Parts, form
from tests.faults.payloads import form_body

TEXT = st.text(st.characters(codec="utf-8", exclude_characters='"\r\n\\;['), min_size=1, max_size=12)


def parsed(body: bytes, size: int = 1000, *, files: int = 5, fields: int = 10) -> dict[str, Any]:
    """Fields as text, files as bytes, by their names."""
    parts = _Parts(b"edge", files, fields)
    try:
        for at in range(0, len(body), size):
            parts.feed(body[at : at + size])
        parts.finish()
        return {
            name: value if isinstance(value, str) else (value.file.read(), value.size) for name, value in parts.items
        }
    finally:
        parts.close()


@settings(deadline=None)
@given(
    st.dictionaries(TEXT, TEXT, max_size=4), st.dictionaries(TEXT, st.binary(max_size=300), max_size=3),
    st.integers(1, 400),
)  # fmt: skip
def test_what_is_sent_is_parsed_in_chunks_of_any_size(
    fields: dict[str, str], files: dict[str, bytes], size: int
) -> None:
    files = {f"file {name}": data for name, data in files.items() if b"--edge" not in data}
    body = form_body({name: text.encode() for name, text in fields.items()}, files)
    if fields or files:
        assert parsed(body, size) == fields | {name: (data, len(data)) for name, data in files.items()}


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200), st.integers(1, 50))
def test_a_broken_form_is_refused_or_parsed(noise: bytes, at: int, size: int) -> None:
    body = form_body({"prompt": b"a cat"}, {"image": b"\x89PNG"})
    try:
        parsed(body[:at] + noise + body[at:], size)
    except FormParserError:
        pass
    except ApiError as error:
        assert error.status in (400, 413) and error.code in ("invalid_body", "body_too_large")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (form_body({}, {str(k): b"" for k in range(6)}), "too many files"),
        (form_body({str(k): b"" for k in range(11)}, {}), "too many fields"),
        (form_body({"a": bytes(MAX_BYTES // 2), "b": bytes(MAX_BYTES // 2 + 1)}, {}), f"larger than {MAX_BYTES} bytes"),
        (form_body({"prompt": b"\xff"}, {}), "is not UTF-8"),
        (form_body({"a": b""}, {}).replace(b'name="a"', b"x=1"), "has no name"),
        (form_body({"a": b""}, {})[:-8], "its last part has no end"),
    ],
)  # fmt: skip
def test_limits_are_those_of_a_json_body(body: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        parsed(body)


def posted(chunks: Iterator[bytes], length: bytes) -> Request:
    """A request whose body comes in these chunks, with its declared length."""

    async def receive() -> dict[str, Any]:
        chunk = next(chunks, b"")
        return {"type": "http.request", "body": chunk, "more_body": bool(chunk)}

    headers = [(b"content-type", b"multipart/form-data; boundary=edge"), (b"content-length", length)]
    return Request({"type": "http", "headers": headers}, receive)


@pytest.mark.parametrize("epilogue", [False, True])
def test_the_bytes_that_come_are_counted_whatever_length_is_declared(epilogue: bool) -> None:
    """Also those behind the last part, which no parser keeps."""
    whole = form_body({"a": b""}, {}) if epilogue else form_body({}, {"image": bytes(50_000)})
    chunks = [whole, *[bytes(1000)] * 50] if epilogue else [whole[at : at + 1000] for at in range(0, len(whole), 1000)]
    left = iter(chunks)

    async def read() -> None:
        async with form(posted(left, b"100"), "", max_bytes=9_999, max_files=1, max_fields=1):
            pass

    with pytest.raises(ApiError, match="larger than 9999 bytes") as caught:
        asyncio.run(read())
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")
    assert len(list(left)) >= 40, "the rest is not read"


@pytest.mark.parametrize("head", [b"X: y\r\n" * 9, b"X: " + b"y" * 5_000 + b"\r\n"])
def test_headers_of_a_part_are_bounded(head: bytes) -> None:
    with pytest.raises(FormParserError):
        parsed(b"--edge\r\n" + head + b'Content-Disposition: form-data; name="a"\r\n\r\n\r\n--edge--\r\n')


@pytest.mark.parametrize(
    ("given", "size"), [(_Parts._header_field, 100), (_Parts._header_value, 100), (_Parts._header_field, 1)]
)
def test_headers_of_a_part_are_bounded_whatever_their_parser_does(given: Callable[..., None], size: int) -> None:
    """Other versions of it have other limits, or none."""
    parts = _Parts(b"edge", 1, 1)
    with closing(parts), pytest.raises(ApiError, match="too long"):
        for _ in range(1000 if size > 1 else 10_000):
            given(parts, bytes(size), 0, size)
            if size == 1:
                parts._end_header()


@pytest.mark.parametrize(
    ("given", "boundary"),
    [
        ("multipart/form-data; boundary=edge", b"edge"),
        ('Multipart/Form-Data;charset="UTF-8"; boundary="an edge"', b"an edge"),
        ("multipart/form-data; boundary=----WebKitFormBoundary7M;", b"----WebKitFormBoundary7M"),
        ("multipart/form-data; x=1; boundary='a'", b"'a'"),
        ("multipart/form-data; boundary=edge; Charset=UTF8;", b"edge"),
        ("multipart/form-data; boundary=edge; charset=latin-1", None),
        ("multipart/form-data; boundary=edge; charset=utf-8; charset=idna", None),
        ("multipart/form-data", None),
        ("multipart/form-data; boundary=", None),
        ("multipart/mixed; boundary=edge", None),
        ("multipart/form-data" + ";" * 10_000, None),
        ('multipart/form-data; boundary="' + '";' * 100, None),
        ("multipart/form-data; boundary=" + "a" * 70, b"a" * 70),
        ("multipart/form-data; boundary=" + "a" * 71, None),
    ],
)  # fmt: skip
def test_the_content_type_is_read_strictly(given: str, boundary: bytes | None) -> None:
    if boundary is not None:
        assert _boundary(given) == boundary
        return
    with pytest.raises(ApiError, match=re.escape("content-type: must be multipart/form-data")) as caught:
        _boundary(given)
    assert caught.value.status == 415 and caught.value.param == "content-type"


def test_forms_of_a_tenant_are_parsed_one_chunk_at_a_time_and_no_faster_than_its_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixteen at once took all threads, and most of two cores from everybody else."""
    running, most = Counter[bytes](), Counter[bytes]()
    lock, feed = threading.Lock(), _Parts.feed

    def counted(parts: _Parts, chunk: bytes) -> None:
        name = chunk[-1:]
        with lock:
            running[name] += 1
            most[name] = max(most[name], running[name])
        feed(parts, chunk)
        with lock:
            running[name] -= 1

    async def read(tenant: str) -> None:
        head = b'--edge\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
        chunks = iter([head, *[tenant.encode() * 65_536] * 8, b"\r\n--edge--\r\n"])
        async with form(posted(chunks, b"600000"), tenant, max_bytes=600_000, max_files=1, max_fields=1) as parts:
            file = parts["image"]
            assert not isinstance(file, str) and await file.read() == tenant.encode() * 8 * 65_536

    async def all_at_once() -> None:
        await asyncio.gather(*map(read, "aaaab"))

    monkeypatch.setattr(_Parts, "feed", counted)
    monkeypatch.setattr(request_body, "_RATE", 4 * 2**20)
    started = time.monotonic()
    asyncio.run(all_at_once())
    assert most[b"a"] == 1 and time.monotonic() - started >= 4 * 8 * 65_536 / request_body._RATE
