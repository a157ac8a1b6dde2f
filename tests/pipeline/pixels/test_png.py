"""PNG files in strips: what Pillow reads from them is what was written, whatever the size, mode and content."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from pipeline.pixels import files, png


def drawn(width: int, height: int, channels: int, content: str, seed: int = 0) -> png.Pixels:
    """Noise, a slope with a little noise, or one color."""
    generator = np.random.default_rng(seed)
    if content == "noise":
        return generator.integers(0, 256, (height, width, channels), np.uint8)
    slope = np.add.outer(np.arange(height), np.arange(width))[..., None] * (content == "slope")
    return (slope + generator.integers(0, 3, (1, 1, channels)) + 7).astype(np.uint8)


def texts(text: str) -> PngImagePlugin.PngInfo:
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("parameters", text)
    chunks.add_itxt("diptych", text)
    return chunks


def opened(data: bytes) -> Any:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


@given(
    st.integers(1, 70), st.integers(1, 70), st.integers(1, 4), st.sampled_from(["noise", "slope", "flat"]),
    st.text(st.characters(codec="latin-1", exclude_characters="\0")), st.sampled_from([1, 300, 2**17]),
)  # fmt: skip
def test_what_was_written_is_read(width: int, height: int, channels: int, content: str, text: str, strip: int) -> None:
    pixels = drawn(width, height, channels, content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(png, "_STRIP", strip)
        image = opened(png.encoded(pixels, texts(text)))
    assert np.array_equal(np.asarray(image).reshape(pixels.shape), pixels)
    assert image.text["parameters"] == image.text["diptych"] == text


def chunks(file: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The kind and the content of each chunk of a PNG."""
    at = 8
    while at < len(file):
        end = at + 8 + int.from_bytes(file[at : at + 4])
        yield file[at + 4 : at + 8], file[at + 8 : end]
        at = end + 4


def pillows(pixels: png.Pixels) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def test_rows_have_the_filters_that_pillow_chooses_and_files_are_about_as_small() -> None:
    for content in ("noise", "slope", "flat"):
        pixels = drawn(640, 512, 3, content)
        assert len(png.encoded(pixels)) < 1.02 * len(pillows(pixels)) + 100, "a strip's end costs a few bytes"
    pixels = drawn(300, 200, 3, "slope")
    pixels[50:] += np.random.default_rng(1).integers(0, 9, pixels[50:].shape, np.uint8)
    data = [
        b"".join(part for kind, part in chunks(f) if kind == b"IDAT") for f in (pillows(pixels), png.encoded(pixels))
    ]
    lines, others = (np.frombuffer(zlib.decompress(each), np.uint8).reshape(200, -1)[:, 0] for each in data)
    assert len({*lines.tolist()}) > 2 and (lines == others).mean() > 0.9


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_a_large_image_of_any_mode_is_encoded(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.fromarray(drawn(640, 512, 3, "slope")).convert(mode)
    if mode != "P":
        monkeypatch.setattr(Image.Image, "save", None)
    data = files.png(image, texts("large"))
    read = opened(data)
    assert read.mode == mode and read.tobytes() == image.tobytes() and read.text["diptych"] == "large"
