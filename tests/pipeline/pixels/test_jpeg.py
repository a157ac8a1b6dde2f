"""JPEG files in strips: the bytes that Pillow writes with restart markers, and the pixels that it writes without."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline.pixels import files, jpeg, png, threads
from tests.pipeline.pixels.test_png import drawn, opened


def saved(image: Image.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="JPEG", **options)
    return stream.getvalue()


def picture(width: int, height: int, channels: int, content: str) -> Image.Image:
    pixels = drawn(width, height, channels, content)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)


@given(
    st.integers(1, 90), st.integers(1, 300), st.sampled_from([1, 3]), st.sampled_from(["noise", "slope", "flat"]),
    st.integers(1, 100), st.sampled_from([1, 300, 2**11]),
)  # fmt: skip
def test_a_file_is_pillows_with_a_marker_behind_each_strip(
    width: int, height: int, channels: int, content: str, quality: int, strip: int
) -> None:
    image = picture(width, height, channels, content)
    options = {"quality": quality, "subsampling": 0}
    texts = {"exif": b"Exif\0\0" + b"\xff\xda" * 20, "xmp": b"<x/>"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jpeg, "_STRIP", strip)
        patch.setattr(files, "LARGE", 0)
        rows = jpeg.strip_rows(width)
        data = files.encoded(image, "JPEG", **options, **texts)
        with threads.encoding():
            assert files.encoded(image, "JPEG", **options, **texts) == data, "also where another is in strips"
    markers = {"restart_marker_rows": rows // 8} if height > rows else {}
    assert data == saved(image, **options, **texts, **markers)
    assert np.array_equal(np.asarray(opened(data)), np.asarray(opened(saved(image, **options))))


def test_large_pictures_are_in_strips_and_others_are_not() -> None:
    options = {"quality": 90, "subsampling": 0}
    for side, in_strips in ((256, False), (512, True)):
        image = picture(side, side, 3, "slope")
        assert (b"\xff\xdd\x00\x04" in files.encoded(image, "JPEG", **options)) is in_strips
    for others in ({"quality": 90}, {**options, "optimize": True}, {**options, "progressive": True}):
        assert files.encoded(image, "JPEG", **others) == saved(image, **others), "whose strips would not fit together"


@pytest.mark.parametrize("width", [1, 7, 1024, 2**13, 65_500])
def test_no_interval_is_longer_than_a_file_can_say(width: int) -> None:
    blocks = jpeg.strip_rows(width) // 8 * -(-width // 8)
    assert 0 < blocks < 2**16 and jpeg.strip_rows(width) * width >= min(2**17, 8 * width)


def test_a_file_of_several_scans_is_refused() -> None:
    image = picture(512, 512, 3, "slope")
    with pytest.raises(ValueError, match="baseline"):
        jpeg.encoded(image, lambda part, **_: saved(part, progressive=True), quality=90, subsampling=0)


def test_files_are_in_strips_only_while_no_other_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sixteen that end at once one is; all are alike. One that failed is none that is being encoded."""
    image, whole = picture(512, 512, 3, "noise"), threading.Barrier(16)
    alone = list[bool]()
    in_strips, encode = jpeg._in_strips, files._saved

    def strips(*arguments: Any) -> bytes:
        whole.wait(60)
        alone.append(True)
        return in_strips(*arguments)

    def saved_whole(part: Image.Image, media: str, **options: Any) -> bytes:
        if "restart_marker_rows" in options:
            whole.wait(60)
        return encode(part, media, **options)

    monkeypatch.setattr(jpeg, "_in_strips", strips)
    monkeypatch.setattr(files, "_saved", saved_whole)
    with ThreadPoolExecutor(16) as pool:
        data = {*pool.map(lambda _: files.encoded(image, "JPEG", quality=90, subsampling=0), range(16))}
    assert len(data) == len(alone) == 1
    monkeypatch.undo()
    with pytest.raises(OSError, match="RGBA"):
        files.encoded(image.convert("RGBA"), "JPEG", quality=90, subsampling=0)
    chunk = png._chunk

    def checked(*arguments: Any) -> bytes:
        with threads.encoding() as first:
            assert not first, "a PNG is one, too"
        return chunk(*arguments)

    monkeypatch.setattr(png, "_chunk", checked)
    assert files.png(image)
    with threads.encoding() as first, monkeypatch.context() as patch:
        assert first, "all have ended"
        patch.delattr(jpeg, "_in_strips")
        assert files.encoded(image, "JPEG", quality=90, subsampling=0) in data


def test_a_strip_that_fails_fails_its_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    image, options, encode = picture(1024, 1024, 3, "noise"), {"quality": 90, "subsampling": 0}, files._saved
    data = files.encoded(image, "JPEG", **options)
    left = [1, 2, 3]

    def failing(part: Image.Image, media: str, **options: Any) -> bytes:
        if not left:
            raise OSError("too many open files")
        left.pop()
        return encode(part, media, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_saved", failing)
        with pytest.raises(OSError, match="too many"):
            files.encoded(image, "JPEG", **options)
    assert files.encoded(image, "JPEG", **options) == data
