"""Image files: what Pillow reads from them, and that it encodes them without the GIL."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image, ImageFile

from pipeline.pixels import files
from tests.pipeline.pixels.test_png import drawn


@pytest.mark.parametrize(
    ("media", "options"),
    [
        ("JPEG", {"quality": 90, "subsampling": 0}),
        ("JPEG", {"quality": 100, "exif": b"Exif\0\0"}),
        ("WEBP", {"quality": 80}),
    ],
)
def test_a_file_is_what_pillow_saves(media: str, options: dict[str, Any]) -> None:
    image, stream = Image.fromarray(drawn(90, 70, 3, "noise")), io.BytesIO()
    image.save(stream, format=media, **options)
    assert files.encoded(image, media, **options) == stream.getvalue()


def test_the_encoder_gets_a_descriptor_and_so_releases_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors: list[int | None] = []
    encode = ImageFile._encode_tile

    def watched(im: Any, fp: Any, tile: Any, bufsize: int, fh: int | None, exc: Any = None) -> None:
        descriptors.append(fh)
        encode(im, fp, tile, bufsize, fh, exc)

    monkeypatch.setattr(ImageFile, "_encode_tile", watched)
    files.encoded(Image.fromarray(drawn(64, 64, 3, "noise")), "JPEG", quality=90)
    assert len(descriptors) == 1 and None not in descriptors
