"""Image files: what Pillow reads from them, and that it encodes them without the GIL."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, PngImagePlugin

from core.process_pool import ProcessPool
from pipeline.pixels import files


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def texts(text: str) -> PngImagePlugin.PngInfo:
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("parameters", text)
    chunks.add_itxt("diptych", text)
    return chunks


def saved(image: Image.Image, chunks: PngImagePlugin.PngInfo | None = None) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="PNG", pnginfo=chunks)
    return stream.getvalue()


@given(
    st.integers(1, 70), st.integers(1, 70), st.text(st.characters(codec="latin-1", exclude_characters="\0")),
    st.sampled_from([1, files.LARGE]),
)  # fmt: skip
def test_a_png_is_pillows_in_a_process_and_on_a_thread(width: int, height: int, text: str, large: int) -> None:
    image = drawn(width, height)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "LARGE", large)
        assert files.png(image, texts(text)) == saved(image, texts(text))
        assert files.png(image) == saved(image)


def test_a_large_png_is_encoded_by_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    image = drawn(640, 512)
    expected = saved(image, texts("large"))
    monkeypatch.setattr(Image.Image, "save", None)
    assert files.png(image, texts("large")) == expected


def test_where_no_process_can_run_a_thread_encodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = ProcessPool("pipeline.no_such_module", memory_bytes=2**30, cpu_s=10, timeout_s=60.0)
    monkeypatch.setattr(files, "_PROCESSES", broken)
    image = drawn(640, 512)
    assert files.png(image) == saved(image)
    assert "encoded on a thread" in caplog.text


@pytest.mark.parametrize(
    ("media", "options"),
    [
        ("JPEG", {"quality": 90, "subsampling": 0}),
        ("JPEG", {"quality": 100, "exif": b"Exif\0\0"}),
        ("WEBP", {"quality": 80}),
    ],
)
def test_a_file_is_what_pillow_saves(media: str, options: dict[str, Any]) -> None:
    image, stream = drawn(90, 70), io.BytesIO()
    image.save(stream, format=media, **options)
    assert files.encoded(image, media, **options) == stream.getvalue()


def test_the_encoder_gets_a_descriptor_and_so_releases_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors: list[int | None] = []
    encode = ImageFile._encode_tile

    def watched(im: Any, fp: Any, tile: Any, bufsize: int, fh: int | None, exc: Any = None) -> None:
        descriptors.append(fh)
        encode(im, fp, tile, bufsize, fh, exc)

    monkeypatch.setattr(ImageFile, "_encode_tile", watched)
    files.encoded(drawn(64, 64), "JPEG", quality=90)
    assert len(descriptors) == 1 and None not in descriptors
