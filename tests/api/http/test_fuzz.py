"""Whatever is sent, the answer is a success or a 4xx of OpenAI's shape, and nothing of what was sent is in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.schemas import EditJobFields, JobFields
from core.config import Settings
from tests.api.world import SERVE, Worker, check_error, process

MARK = "MARKER§7q3z"  # no plain word: it may not come back as a field's name either
JSON = {"content-type": "application/json"}

# The API is shared by all examples on purpose: no example can leave it in another state.
fuzz = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

marks = st.just(MARK) | st.text(max_size=5).map(lambda text: text + MARK)
WORDS = ["image", "edit", "data:image/png;base64,AAAA", "64x64", "128x128", "auto", "png", "url", "b64_json", "euler",
         "emoji-xl", ""]  # fmt: skip
numbers = st.integers() | st.integers(-5, 5) | st.floats()
scalars = st.none() | st.booleans() | numbers | marks | st.text(max_size=20) | st.sampled_from(WORDS)
NAMES = sorted({*JobFields.model_fields, *EditJobFields.model_fields, "file_id", "image_url"})
names = st.sampled_from(NAMES) | marks | st.text(max_size=10)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
)


@pytest.fixture(scope="module")
def client(module_settings: Settings) -> Iterator[httpx2.Client]:
    """Of an API in a process of its own: threads of this one would disturb how hypothesis draws."""
    with Worker(module_settings) as worker:
        worker.announce()
        with process(SERVE, module_settings) as (_, client):
            yield client


def check(answer: httpx2.Response, *, success: int) -> None:
    if answer.status_code != success:
        assert 400 <= answer.status_code < 500, answer.text
        check_error(answer, answer.status_code)
    for text in (answer.text, str(answer.headers), answer.content.decode("ascii")):
        assert "MARKER" not in text and "7q3z" not in text


def post(client: httpx2.Client, raw: bytes) -> httpx2.Response:
    return client.post("/v1/jobs", content=raw, headers=JSON)


pieces = st.binary(max_size=30)
bytes_within = st.builds(
    lambda one, other: b'{"type": "image", "prompt": "%b", "user": %b}' % (one, other), pieces, pieces
)
bodies = (values | st.dictionaries(names, values, max_size=5)).map(lambda body: json.dumps(body).encode())


@given(bytes_within | bodies)
@fuzz
def test_any_body(client: httpx2.Client, raw: bytes) -> None:
    check(post(client, raw), success=202)


@given(st.sampled_from(NAMES), values)
@fuzz
def test_one_field_of_anything(client: httpx2.Client, name: str, value: Any) -> None:
    answer = post(client, json.dumps({"type": "image", "prompt": MARK, name: value}).encode())
    check(answer, success=202)
    if answer.status_code != 202:
        param = check_error(answer, answer.status_code)["param"]
        assert param is None or param == name or param.startswith((f"{name}.", f"{name}["))


latin = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=30)
headers = st.dictionaries(
    st.sampled_from(
        ["content-type", "content-encoding", "last-event-id", "if-none-match", "host", "accept", "range", "cookie",
         "x-forwarded-for", "x-forwarded-proto", "origin", "referer", "authorization"]
    ),
    latin.map(lambda text: ("x" + text + "MARKER7q3z").encode("latin-1")),
    max_size=3,
)  # fmt: skip


texts = st.text(max_size=20)


@given(texts, texts, headers, st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]))
@fuzz
def test_any_address_and_headers(
    client: httpx2.Client, path: str, query: str, given: dict[str, bytes], method: str
) -> None:
    url = f"/v1/jobs/{quote(path + MARK)}?q={quote(query + MARK)}&last_event_id={quote(MARK)}"
    check(client.request(method, url, headers=given), success=-1)


@given(st.binary(max_size=60))
@fuzz
def test_any_path(client: httpx2.Client, raw: bytes) -> None:
    quoted = "".join(f"%{byte:02x}" for byte in raw)
    for path in ("", "v1/jobs/", "v1/models/", f"v1/jobs/{known(client)}/images/"):
        answer = client.get(f"/{path}{quoted}")
        if answer.status_code == 404 and "title" in answer.json():  # an owner's model, of which Replicate's clients ask
            assert answer.json().keys() == {"title", "detail", "status", "error"}
        else:
            assert answer.status_code == 200 or check_error(answer, answer.status_code)
        assert answer.status_code < 500 or raw.decode("latin-1") in ("readyz", "v2/health/ready")


@cache
def known(client: httpx2.Client) -> str:
    """A job that waits."""
    return str(post(client, b'{"type": "image", "prompt": "a cat"}').json()["id"])


@pytest.mark.parametrize("host", ["MARKER7q3z", "a b", "[", "evil.example:99999", "", "x" * 5000, "a/b?c#d", "ä"])
def test_any_host(client: httpx2.Client, host: str) -> None:
    """Without keys the server answers to its own names alone, and repeats no other."""
    for path in (f"/v1/jobs/{known(client)}", "/nothing"):
        answer = client.get(path, headers={"host": host.encode("latin-1")})
        check_error(answer, 403 if answer.status_code == 403 else 400)
        assert "MARKER" not in answer.text
