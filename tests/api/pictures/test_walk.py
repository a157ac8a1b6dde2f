"""Pictures that cost more than they look are refused by their structure, before any decoder is called."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from api.pictures.walk import MAX_ANCILLARY, MAX_CHUNKS, MAX_SCANS, MAX_SIDE, InvalidPicture, walk
from tests.api.pictures.test_edits import as_file, pixels


def picture(form: str, size: tuple[int, int] = (64, 64), **options: object) -> bytes:
    return as_file(pixels(*size), form, **options)


def png_chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with(chunks: bytes) -> bytes:
    """A PNG with these chunks behind its header."""
    whole = picture("PNG")
    return whole[:33] + chunks + whole[33:]


def many_scans(n: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again: each makes a decoder go through the whole picture."""
    whole = picture("JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * n + whole[-2:]


def jpeg_with(segments: bytes) -> bytes:
    whole = picture("JPEG")
    return whole[:2] + segments + whole[2:]


def webp_with(chunks: bytes) -> bytes:
    whole = picture("WEBP")
    body = whole[8:] + chunks
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("options", [{}, {"progressive": True, "lossless": True}])
def test_what_encoders_write_passes(form: str, options: dict[str, object]) -> None:
    assert walk(picture(form, (61, 47), **options)) == (61, 47)


@pytest.mark.parametrize(
    ("size", "form"),
    [
        *(((1, MAX_SIDE + 1), form) for form in ("PNG", "WEBP")),
        *(((MAX_SIDE + 1, 1), form) for form in ("PNG", "WEBP")),
        ((1, 16_777_216), "PNG"),  # WebP has no such sizes
    ],
)
def test_a_side_is_bounded_as_the_area_is(size: tuple[int, int], form: str) -> None:
    with pytest.raises(InvalidPicture, match=rf"^is wider or higher than {MAX_SIDE} pixels"):
        walk(as_file(np.zeros((*size, 3), np.uint8), form))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: png_with(png_chunk(b"teXt") * (MAX_CHUNKS + 1)), "chunks besides its pixels"),
        (lambda: png_with(png_chunk(b"teXt", bytes(MAX_ANCILLARY + 1))), "bytes besides its pixels"),
        (lambda: png_with(png_chunk(b"IDAT") * 20_000), "too many small chunks"),
        (lambda: png_with(png_chunk(b"IHDR", bytes(13))), "two chunks IHDR"),
        (lambda: jpeg_with(b"\xff\xe1\x00\x02" * (MAX_CHUNKS + 1)), "chunks besides its pixels"),
        (lambda: jpeg_with(b"\xff\xe1\xff\xff" + bytes(65_533)), None),
        (lambda: jpeg_with((b"\xff\xe1\xff\xff" + bytes(65_533)) * 130), "bytes besides its pixels"),
        (lambda: jpeg_with(b"\xff\xc0\x00\x0b\x08\x00\x40\x00\x40\x01\x01\x11\x00"), "two headers"),
        (lambda: many_scans(MAX_SCANS), f"more than {MAX_SCANS} scans"),
        (lambda: webp_with((b"JUNK" + bytes(4)) * 2_000), "chunks besides"),
        (lambda: webp_with(b"JUNK" + struct.pack("<I", 2**23 + 2) + bytes(2**23 + 2)), "bytes besides"),
    ],
)  # fmt: skip
def test_a_structure_that_costs_more_than_it_shows_is_refused(data: object, message: str | None) -> None:
    assert callable(data)
    if message is None:
        assert walk(data()) == (64, 64)
        return
    with pytest.raises(InvalidPicture, match=message):
        walk(data())


def animation(frames: int) -> bytes:
    """A WebP with its one frame repeated."""
    stream = io.BytesIO()
    first, second = (Image.effect_noise((64, 64), sigma).convert("RGB") for sigma in (50, 60))
    first.save(stream, "WEBP", save_all=True, append_images=[second])
    whole = stream.getvalue()
    start = whole.index(b"ANMF")
    end = start + 8 + int.from_bytes(whole[start + 4 : start + 8], "little")
    body = whole[8:start] + whole[start:end] * frames
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_long_animations_pass_and_endless_ones_of_empty_frames_do_not() -> None:
    assert walk(animation(3 * MAX_CHUNKS)) == (64, 64)
    empty = webp_with((b"ANMF" + bytes(4)) * 20_000)
    with pytest.raises(InvalidPicture, match="too many small chunks"):
        walk(empty)


@pytest.mark.parametrize("form", ["JPEG", "WEBP"])
def test_what_follows_the_end_is_no_part_of_the_picture(form: str) -> None:
    """As behind a photo: a video, or whole other pictures. Decoders end there, too."""
    whole = picture(form, (61, 47))
    video = b"\xff\xe1\x00\x02" * 50_000 + (b"JUNK" + bytes(4)) * 50_000 + b"\xff\xda" * 500
    assert walk(whole + video) == (61, 47)
    with Image.open(io.BytesIO(whole + video)) as decoded:
        decoded.load()
        assert decoded.size == (61, 47)


def test_an_end_before_the_first_scan_is_none() -> None:
    """Pillow reads on behind it."""
    for many in (b"\xff\xd9" + b"\xff\xe1\x00\x02" * (MAX_CHUNKS + 1), b"\xff\xd9" * (MAX_CHUNKS + 1)):
        with pytest.raises(InvalidPicture, match="chunks besides its pixels"):
            walk(jpeg_with(many))


def test_scans_are_counted_and_thumbnails_are_not() -> None:
    assert walk(many_scans(MAX_SCANS - 20)) == (64, 64)
    whole = jpeg_with(b"\xff\xe1" + struct.pack(">H", 1002) + b"\xff\xda" * 500)
    assert whole.count(b"\xff\xda") > MAX_SCANS and walk(whole) == (64, 64)


_PNG = b"\x89PNG\r\n\x1a\n"
HEADS = (b"", _PNG, _PNG + b"\0\0\0\rIHDR" + struct.pack(">II", 9, 9), b"\xff\xd8", b"RIFF\0\0\0\0WEBP")


@given(st.sampled_from(HEADS), st.binary(max_size=200))
def test_any_bytes_are_refused_or_have_a_size_within_the_limits(head: bytes, rest: bytes) -> None:
    try:
        size = walk(head + rest)
    except InvalidPicture:
        return
    assert min(size) > 0 and max(size) <= MAX_SIDE
