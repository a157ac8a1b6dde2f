"""A body's pictures go to a file whatever its chunks, and come back byte for byte; the rest is the same JSON."""

from __future__ import annotations

import base64
import http.client
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.errors import ApiError
from api.http import body
from api.pictures import body as picture_body
from api.pictures.body import PictureBody
from tests.api.world import PATIENCE_S, Api

LEAST = picture_body._LEAST
sizes = st.integers(0, 3 * LEAST)
texts = st.text(st.sampled_from('a/\\"b\n:,{}[]é'), max_size=20)
heads = st.sampled_from(
    ["", "data:image/png;base64,", "data:image/webp;charset=utf-8;base64,", "data:application/octet-stream;base64,"]
)


def content(size: int) -> bytes:
    return bytes(k * 31 % 256 for k in range(size))


def encoded(size: int) -> str:
    """In base64, of every other size in its URL-safe alphabet."""
    encode = base64.urlsafe_b64encode if size % 2 else base64.b64encode
    return encode(content(size)).decode()


@contextmanager
def written(text: str, cuts: Sequence[int] = (), key: re.Pattern[bytes] | None = None) -> Iterator[PictureBody]:
    """The body, read in parts that end at these places."""
    raw, pictures = text.encode(), PictureBody(key)
    try:
        for start, end in pairwise([0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]):
            pictures.write(raw[start:end])
        pictures.seek(0)
        yield pictures
    finally:
        pictures.close()


@given(
    st.lists(st.tuples(texts, heads, sizes), max_size=4),
    st.lists(st.integers(0, 2**20), max_size=12),
    st.booleans(),
    texts,
)
@example([("a", "", 3 * LEAST)], [1, LEAST, LEAST + 1], True, "")
def test_any_body_in_any_chunks(entries: list[tuple[str, str, int]], cuts: list[int], php: bool, prompt: str) -> None:
    """With slashes escaped, as PHP writes them, or not."""
    fields = {"prompt": prompt, "images": [[text, head + encoded(size), text] for text, head, size in entries]}
    text = json.dumps(fields)
    with written(text.replace("/", "\\/") if php else text, cuts) as pictures:
        assert len(pictures.text) < 300 + len(entries) * (LEAST + 300), "pictures of more are not in memory"
        parsed = body.parse(pictures.text)
        assert parsed["prompt"] == prompt
        for (text, _, size), (before, picture, after) in zip(entries, parsed["images"], strict=True):
            assert before == after == text
            assert pictures.source("x", picture).read() == content(size)


def test_text_that_looks_like_a_picture_is_none_for_a_text() -> None:
    """A prompt of so many letters is refused as no text; one with blanks is a text, too long by its own limit."""
    with written(json.dumps({"prompt": "a" * LEAST})) as pictures:
        assert body.parse(pictures.text) == {"prompt": {"picture": 0}}
    words = json.dumps({"prompt": "a cat " * LEAST})
    with written(words, [7, 90_000]) as pictures:
        assert pictures.text == words.encode()
    quoted = json.dumps({"prompt": 'say "' + "a" * 2 * LEAST + '"'})
    with written(quoted, [3]) as pictures:
        assert pictures.text == quoted.encode(), "an escaped quote begins no picture"


@pytest.mark.parametrize(
    "text", [
        '{"a":"' + "a" * (LEAST + 1) + ' b"}', '{"a":"' + "b" * LEAST, '{"' + "a" * LEAST + '":1}',
        "[" + '"' + "a" * LEAST + '"' + "]", '{"picture":' + "1" * LEAST + "}", '"' * 200,
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as caught, written(text) as pictures:
        body.parse(pictures.text)
    assert caught.value.status == 400


def test_text_has_the_limit_of_all_bodies() -> None:
    with pytest.raises(ApiError) as caught, written("a b " * 2**19):
        pass
    assert caught.value.status == 413


def test_a_picture_that_was_not_sent_is_none() -> None:
    with written(json.dumps({"a": "a" * LEAST})) as pictures:
        for value in ({"picture": 1}, {"picture": -1}, {"picture": "0"}, {}, {"image": "x"}):
            with pytest.raises(ApiError):
                pictures.source("mask", value)
        for address in ("https://example.com/a.png", "http://127.0.0.1/", " ftp://example.com/"):
            with pytest.raises(ApiError, match="not fetched"):
                pictures.source("mask", address)
        with pytest.raises(ApiError, match="another media type"):
            pictures.source("mask", "data:text/plain,a")
        lines = pictures.source("mask", "data:image/png;charset=utf-8;base64,-_8\nA")
        assert lines.read() == b"\xfb\xff\0", "as in other bodies"
        for source in (pictures.source("mask", text) for text in ("a", "aaaaa", "!!!!", "é")):
            with pytest.raises(ApiError, match="base64"):
                source.read()


def test_with_a_key_only_its_text_is_a_picture() -> None:
    """With blanks around its colon; all other texts stay, also those that end like it."""
    long = encoded(LEAST)
    for text, count in (
        ('{"x": {"image": "%s"}, "inputs" :\n "%s"}', 1), ('{"a": "%s", "b": "%s"}', 0),
        ('{"my inputs": "%s", "inputs": ["%s"]}', 0),
    ):  # fmt: skip
        with written(text % (long, long), [100, LEAST + 50], re.compile(rb'"inputs"\s*:\s*"\Z')) as pictures:
            parsed = body.parse(pictures.text)
            assert pictures.text.count(b'{"picture"') == count
            if count:
                assert parsed["x"] == {"image": long} and parsed["inputs"] == {"picture": 0}


def test_the_largest_body_is_bounded(shared: Api) -> None:
    """By what it declares, before any of it is read."""
    with closing(http.client.HTTPConnection("127.0.0.1", shared.port, timeout=PATIENCE_S)) as connection:
        connection.putrequest("POST", "/")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(picture_body._PICTURE_BYTES + body.MAX_BYTES + 1))
        connection.endheaders()
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["code"]) == (413, "body_too_large")
