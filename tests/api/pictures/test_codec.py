"""Decoding and resizing pictures, as the child processes do: sizes by the header, bits of every mode, damaged files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from api.pictures.codec import fit_mask, fit_picture, measure
from api.pictures.walk import MAX_PIXELS, MAX_SIDE, InvalidPicture
from contract.image_request import Margins
from tests.api.pictures.test_edits import as_file, bomb, pixels


def size_of(data: bytes) -> tuple[int, int]:
    info, _ = measure(None, [data])
    return info["width"], info["height"]


def fitted(data: bytes, size: tuple[int, int], margins: Margins | None = None) -> np.ndarray:
    sides = None if margins is None else (margins.left, margins.top, margins.right, margins.bottom)
    _, (png,) = fit_picture({"margins": sides, "size": size, "fit": "stretch"}, [data])
    image = Image.open(io.BytesIO(png))
    assert (image.format, image.mode) == ("PNG", "RGB")
    return np.asarray(image)


def hole_of(mask: bytes | None, size: tuple[int, int], **more: Any) -> np.ndarray:
    arguments = {"margins": None, "size": size, "soft": False, "own_size": size, "fit": "stretch", **more}
    return np.asarray(Image.open(io.BytesIO(fit_mask(arguments, [] if mask is None else [mask])[1][0])))


@pytest.mark.parametrize("size", [(1, MAX_SIDE), (MAX_SIDE, 1)])
def test_the_longest_picture_is_resized(size: tuple[int, int]) -> None:
    data = as_file(np.zeros((*size[::-1], 3), np.uint8))
    assert size_of(data) == size and fitted(data, (64, 64)).shape == (64, 64, 3)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("options", [{}, {"lossless": True}])
def test_sizes_and_media_types_are_read_from_the_header(form: str, options: dict[str, Any]) -> None:
    expected = {"width": 31, "height": 17, "media_type": f"image/{form.lower()}", "alpha": False}
    assert measure(None, [as_file(pixels(31, 17), form, **options)]) == (expected, [])
    transparent = {**expected, "media_type": "image/webp", "alpha": True}
    assert measure(None, [as_file(pixels(31, 17, 4), "WEBP", **options)]) == (transparent, [])


@pytest.mark.parametrize(("orientation", "turned"), [(1, False), (3, False), (6, True), (8, True)])
@pytest.mark.parametrize("form", ["JPEG", "WEBP", "PNG"])
def test_a_turned_picture_is_turned_back(orientation: int, turned: bool, form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    array = np.repeat(pixels(2, 1), 32, 0).repeat(32, 1)
    data = as_file(array, form, exif=exif)
    size = (32, 64) if turned else (64, 32)
    assert size_of(data) == size
    stored = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(fitted(data, size), np.rot90(stored, {1: 0, 3: 2, 6: 3, 8: 1}[orientation]))


def test_a_pictures_size_is_not_read_beside_a_damaged_chunk() -> None:
    """It may be turned by the one before: the decoder reads what comes before the damage."""
    exif = Image.Exif()
    exif[0x0112] = 6
    turned, plain = as_file(pixels(64, 32), "PNG", exif=exif), as_file(pixels(64, 32))
    chunk = turned[turned.index(b"eXIf") - 4 :][: 12 + int.from_bytes(turned[turned.index(b"eXIf") - 4 :][:4], "big")]
    whole = plain[:-12] + chunk + plain[-12:]
    assert size_of(whole) == (32, 64)
    with pytest.raises(InvalidPicture, match="damaged chunk"):
        measure(None, [plain[:-12] + chunk + b"\0\0\0\1tEXta\0\0\0\0" + plain[-12:]])


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(max_size=300), seed=st.integers(0, 99), cut=st.integers(0, 3000),
    form=st.sampled_from(["PNG", "JPEG", "WEBP"]),
)  # fmt: skip
def test_a_damaged_file_is_refused_or_decoded(data: bytes, seed: int, cut: int, form: str) -> None:
    whole = as_file(pixels(24, 16, seed=seed), form)
    at = cut % len(whole)
    for damaged in (data, whole[:at], whole[:at] + data + whole[at + len(data) :]):
        try:
            measure(None, [damaged])
            assert fitted(damaged, (8, 8)).shape == (8, 8, 3)
        except InvalidPicture as error:
            assert str(error)


def test_the_limit_of_pixels_is_exact() -> None:
    assert MAX_PIXELS == 4096 * 4096
    with pytest.raises(InvalidPicture, match="more than 16777216 pixels"):
        measure(None, [bomb(4096, 4097)])
    assert size_of(bomb(4096, 4096)) == (4096, 4096)


SIDES, MARGIN = st.integers(1, 9), st.integers(0, 7)


@settings(deadline=None)
@given(SIDES, SIDES, MARGIN, MARGIN, MARGIN, MARGIN, st.booleans(), st.integers(0, 99))
def test_margins_repeat_the_outermost_pixels_and_are_masked(
    width: int, height: int, left: int, top: int, right: int, bottom: int, masked: bool, seed: int
) -> None:
    """As numpy pads."""
    margins, sides = Margins(left=left, top=top, right=right, bottom=bottom), (left, top, right, bottom)
    random = np.random.default_rng(seed)
    array = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    alpha = random.choice(np.array([0, 255], np.uint8), (height, width))
    alpha[0, 0] = 0
    mask = as_file(np.dstack([array, alpha])) if masked else None
    size, pads = margins.around((width, height)), ((top, bottom), (left, right))
    assert np.array_equal(fitted(as_file(array), size, margins), np.pad(array, (*pads, (0, 0)), mode="edge"))
    inside = 255 - alpha if masked else np.zeros_like(alpha)
    hole = hole_of(mask, size, margins=sides, own_size=(width, height))
    assert np.array_equal(hole, np.pad(inside, pads, constant_values=255))


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1"])
def test_a_mask_by_luminance_is_white_where_it_is_repainted(mode: str) -> None:
    """In every mode; transparency counts as white, as in other pictures."""
    levels = np.array([[0, 255], [100, 200]], np.uint8)
    stream = io.BytesIO()
    Image.fromarray(levels).convert(mode, dither=Image.Dither.NONE).save(stream, "PNG")
    expected = np.array([[0, 255], [0, 255]])
    assert np.array_equal(hole_of(stream.getvalue(), (2, 2), mask_convention="luminance"), expected)
    if mode != "1":
        assert np.array_equal(hole_of(stream.getvalue(), (2, 2), mask_convention="luminance", soft=True), levels)
    with pytest.raises(InvalidPicture, match="has no white pixel"):
        hole_of(as_file(np.zeros((2, 2, 3), np.uint8)), (2, 2), mask_convention="luminance")


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), min_size=4, max_size=4))
def test_a_soft_mask_keeps_its_transparency(values: list[int]) -> None:
    """All that is not opaque somewhere is a mask."""
    alpha = np.array(values, np.uint8).reshape(2, 2)
    mask = as_file(np.dstack([alpha] * 4))
    if min(values) == 255:
        with pytest.raises(InvalidPicture, match="has no transparent pixel"):
            hole_of(mask, (2, 2), soft=True)
        return
    assert np.array_equal(hole_of(mask, (2, 2), soft=True), 255 - alpha)


def blurred(values: np.ndarray, x: float, y: float) -> np.ndarray:
    """A Gaussian blur by its definition, in windows that end at 2.5 standard deviations as AUTOMATIC1111's."""
    for axis, deviation in enumerate((y, x)):
        if deviation:
            reach = int(2.5 * deviation + 0.5)
            weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * deviation**2))
            padded = np.pad(values, [(reach, reach) if k == axis else (0, 0) for k in range(2)], mode="edge")
            windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1, axis)
            values = windows @ (weights / weights.sum())
    return values


@pytest.mark.parametrize(("x", "y"), [(4.0, 4.0), (9.0, 0.0), (0.0, 2.5), (24.0, 8.0)])
@pytest.mark.parametrize("convention", ["a1111", "a1111-inverted"])
def test_the_edges_of_a_mask_are_blurred(x: float, y: float, convention: str) -> None:
    """Before it is resized; a grey is decided first. Pillow adds boxes up to nearly a Gaussian."""
    levels = np.zeros((128, 160), np.uint8)
    levels[20:70, 30:110], levels[90:, :] = 255, 90
    hard = np.where((levels == 255) == (convention == "a1111"), 255.0, 0.0)
    options: dict[str, Any] = {"mask_convention": convention, "blur": [x, y], "own_size": (160, 128)}
    mask, half = (hole_of(as_file(np.dstack([levels] * 3)), size, **options) for size in ((160, 128), (80, 64)))
    assert np.abs(mask - blurred(hard, x, y)).max() < 0.05 * 255
    assert len(np.unique(mask)) > 10, "nothing is between"
    assert np.array_equal(half, Image.fromarray(mask).resize((80, 64), Image.Resampling.LANCZOS))
