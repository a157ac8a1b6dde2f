"""Picture files that cost more than they look: refused by their headers, before anything is decoded."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from api import uploads
from api.errors import ApiError
from api.uploads import MAX_SCANS, MAX_SIDE, Upload
from contract.image_fields import Margins


def picture(form: str, size: tuple[int, int], **options: object) -> bytes:
    stream = io.BytesIO()
    Image.effect_noise(size, 50).convert("RGB").save(stream, form, **options)
    return stream.getvalue()


def many_scans(n: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again: each makes a decoder go through the whole picture."""
    whole = picture("JPEG", (64, 64), progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * n + whole[-2:]


@pytest.mark.parametrize("size", [(1, MAX_SIDE + 1), (MAX_SIDE + 1, 1), (1, 16_777_216)])
@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_a_side_is_bounded_as_the_area_is(size: tuple[int, int], form: str) -> None:
    if form == "WEBP" and max(size) > 16_383:
        pytest.skip("WebP has no such sizes")
    stream = io.BytesIO()
    Image.new("RGB", size).save(stream, form)
    with pytest.raises(ApiError, match=rf"^image: is wider or higher than {MAX_SIDE} pixels") as caught:
        Upload.of(stream.getvalue(), None)
    assert caught.value.status == 400 and caught.value.param == "image"


@pytest.mark.parametrize("size", [(1, MAX_SIDE), (MAX_SIDE, 1)])
def test_the_longest_that_may_be_is_brought_to_size(size: tuple[int, int]) -> None:
    stream = io.BytesIO()
    Image.new("RGB", size).save(stream, "PNG")
    upload = Upload.of(stream.getvalue(), None)
    assert upload.size == size and Image.open(io.BytesIO(upload.fitted((64, 64))[0])).size == (64, 64)


def test_a_jpeg_of_very_many_scans_is_refused_without_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = many_scans(MAX_SCANS)
    monkeypatch.setattr(uploads, "_decoded", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(ApiError, match=f"^image: is a JPEG of more than {MAX_SCANS} scans"):
        Upload.of(bomb, None)


def test_scans_are_counted_and_thumbnails_are_not() -> None:
    assert uploads._scans(picture("JPEG", (64, 64))) == 1
    progressive = uploads._scans(picture("JPEG", (64, 64), progressive=True))
    assert 5 <= progressive <= 15
    assert uploads._scans(many_scans(20)) == progressive + 19
    exif = Image.Exif()
    exif[0x010E] = "\xff\xda" * 500
    whole = picture("JPEG", (64, 64), exif=exif.tobytes().replace(b"\xc3\xbf\xc3\x9a", b"\xff\xda\xff\xda"))
    assert uploads._scans(whole) == 1 and Upload.of(whole, None).size == (64, 64)


SIDES = st.integers(1, 9)
MARGIN = st.integers(0, 7)


@given(SIDES, SIDES, MARGIN, MARGIN, MARGIN, MARGIN, st.booleans(), st.integers(0, 99))
def test_margins_repeat_the_outermost_pixels_and_are_masked(
    width: int, height: int, left: int, top: int, right: int, bottom: int, masked: bool, seed: int
) -> None:
    """As numpy pads."""
    margins = Margins(left=left, top=top, right=right, bottom=bottom)
    if margins == Margins():
        return
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    alpha = random.choice(np.array([0, 255], np.uint8), (height, width))
    alpha[0, 0] = 0
    mask = np.dstack([pixels, alpha])
    upload = Upload.of(file_of(pixels), file_of(mask) if masked else None, margins=margins)
    assert upload.size == (width + left + right, height + top + bottom) and upload.masked
    image, hole = (np.asarray(Image.open(io.BytesIO(part or b""))) for part in upload.fitted(upload.size))
    pads = ((top, bottom), (left, right))
    assert np.array_equal(image, np.pad(pixels, (*pads, (0, 0)), mode="edge"))
    inside = 255 - alpha if masked else np.zeros_like(alpha)
    assert np.array_equal(hole, np.pad(inside, pads, constant_values=255))


@given(st.lists(st.integers(0, 255), min_size=4, max_size=4))
def test_a_soft_mask_keeps_its_transparency(values: list[int]) -> None:
    """All that is not opaque somewhere is a mask."""
    alpha = np.array(values, np.uint8).reshape(2, 2)
    upload = Upload.of(file_of(alpha), file_of(np.dstack([alpha] * 4)))
    if min(values) == 255:
        with pytest.raises(ApiError, match=r"^mask: has no transparent pixel"):
            upload.fitted((2, 2), soft=True)
        return
    assert np.array_equal(Image.open(io.BytesIO(upload.fitted((2, 2), soft=True)[1] or b"")), 255 - alpha)


def file_of(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return stream.getvalue()
