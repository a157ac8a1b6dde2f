"""Pictures as text in JSON: every way in which data URLs are written, and what is refused with what is accepted."""

from __future__ import annotations

import base64
import random
import tracemalloc
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.errors import ApiError
from api.pictures.urls import MAX_URL, decoded, picture_of

TYPES = ("image/png", "image/jpeg", "image/jpg", "IMAGE/PNG", "image/webp", "image/x-png", "image/pjpeg", "image/*", "",
         "application/octet-stream")  # fmt: skip
PARAMETERS = ("", ";charset=utf-8", ";charset=US-ASCII;name=a.png", "; charset=utf-8")
ENDS = ("\n", "\r\n", " ", "\t\n")


@settings(max_examples=200, deadline=None)
@given(
    data=st.binary(min_size=1, max_size=200), scheme=st.sampled_from(["data:", "DATA:", " data:"]),
    media_type=st.sampled_from(TYPES), parameters=st.sampled_from(PARAMETERS),
    marker=st.sampled_from([";base64", ";BASE64", "; base64"]), safe=st.booleans(), padded=st.booleans(),
    width=st.integers(1, 80), end=st.sampled_from(ENDS), escaped=st.booleans(),
)  # fmt: skip
def test_a_data_url_is_read_however_it_is_written(
    data: bytes, scheme: str, media_type: str, parameters: str, marker: str, safe: bool, padded: bool, width: int,
    end: str, escaped: bool,
) -> None:  # fmt: skip
    text = (base64.urlsafe_b64encode if safe else base64.b64encode)(data).decode()
    text = text if padded else text.rstrip("=")
    text = end.join(text[at : at + width] for at in range(0, len(text), width)) + end
    text = quote(text) if escaped else text
    source = picture_of("image", f"{scheme}{media_type}{parameters}{marker},{text}")
    assert source.read() == data and source.size_bytes >= len(data) and not source.url
    assert picture_of("image", text, bare=True).read() == data


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data:image/gif;base64,AAAA", "of another media type than image/png, image/jpeg or image/webp"),
        ("data:text/html;base64,AAAA", "another media type"),
        ("data:image/png,AAAA", "not in base64: it must have ;base64"),
        ("data:image/png;base64", "an https:// URL or a data: URL"),
        ("AAAA", "an https:// URL or a data: URL of a PNG, JPEG or WebP in base64"),
        ("", "an https:// URL or a data: URL"),
        ("http://a.example/a.png", "other addresses are not fetched"),
        ("ftp://a.example/a.png", "other addresses are not fetched"),
        ("https:///a.png", "must name a host"),
        ("https://a b.example/", "spaces"),
        ("https://a.example/" + "x" * MAX_URL, f"at most {MAX_URL}"),
    ],
)
def test_what_is_no_picture_says_what_would_be(text: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        picture_of("image", text, param="image.image_url")
    assert said in str(caught.value) and caught.value.param == "image.image_url"


@pytest.mark.parametrize("text", ["A", "AAAAA", "AA=A", "AA==AA", "A!AA", "é", "AAA%", "\ud800"])
def test_what_is_no_base64_is_refused_when_it_is_read(text: str) -> None:
    for source in (picture_of("image", f"data:image/png;base64,{text}"), picture_of("image", text, bare=True)):
        with pytest.raises(ApiError, match="image: is not in base64"):
            source.read()


@pytest.mark.quick
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("width", [60, 64, 76, 2**18 - 1])
def test_a_long_text_is_the_same_bytes_with_line_ends(end: str, width: int) -> None:
    """Whatever its parts begin with; padding within it ends no part."""
    data = random.Random(width).randbytes(500_001)
    text = base64.b64encode(data).decode()
    lines = end.join(text[at : at + width] for at in range(0, len(text), width)) + end
    for written in (lines, quote(lines)):
        assert b"".join(decoded("image", "is wrong", written.encode())) == data
    for padding in (2**18 - 1, 2**18):
        with pytest.raises(ApiError):
            b"".join(decoded("image", "is wrong", (text[:padding] + "=" + text[padding + 1 :]).encode()))


@pytest.mark.parametrize("before", range(6))
def test_escapes_are_read_in_parts(before: int) -> None:
    """None of which ends within one."""
    text = b"A" * before + b"%41" * 2**17 + b"A" * (-(before + 2**17) % 4)
    assert b"".join(decoded("image", "is wrong", text)) == bytes((before + 2**17 + 3) // 4 * 3)


def test_a_part_of_escapes_holds_no_more_objects_than_there_is_text() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            b"".join(decoded("image", "is wrong", b"%" * 2**20))
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=100))
def test_anything_is_decoded_or_refused(data: bytes) -> None:
    try:
        assert isinstance(b"".join(decoded("image", "is wrong", data)), bytes)
    except ApiError as error:
        assert str(error) == "image: is wrong"


def test_an_address_is_known_by_itself() -> None:
    first, same = picture_of("image", "https://a.example/a.png#top"), picture_of("mask", " https://a.example/a.png ")
    assert first.url == same.url == "https://a.example/a.png" and first.identity == same.identity
    assert picture_of("image", "https://a.example/b.png").identity != first.identity
