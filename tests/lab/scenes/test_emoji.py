"""Rows and pictures are read exactly, composited right, and refused with the place named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lab.scenes import emoji


def test_reads_every_row_and_picture(data: Path) -> None:
    rows = emoji.read_rows(data)
    images = emoji.read_pictures(data, rows, 64)
    assert len(rows) == 61
    assert images.shape == (61, 4, 64, 64) and images.dtype == torch.uint8
    assert all(row.name not in row.keywords for row in rows)
    with pytest.raises(ValueError, match=r"images.zip: no picture 'none.png'"):
        emoji.read_pictures(data, [replace(rows[0], file="none.png")], 32)


def test_composites_colour_where_the_picture_is_transparent(data: Path) -> None:
    rows = emoji.read_rows(data)
    row = next(row for row in rows if row.name == "red circle")
    image = emoji.read_pictures(data, [row], 128)
    pixels = (emoji.composite(image, torch.tensor([[0.0, 1.0, 0.5]])) + 1) / 2 * 255
    assert pixels[0, :, 0, 0].tolist() == pytest.approx([0, 255, 127.5], abs=0.01)
    assert pixels[0, :, 64, 64].tolist() == pytest.approx([220, 40, 40], abs=0.01)


def test_shrinking_does_not_bleed_the_colour_under_transparency() -> None:
    straight = np.zeros((8, 8, 4), dtype=np.uint8)
    straight[..., 0] = 255  # red everywhere, opaque in the right half only
    straight[:, 3:, 3] = 255
    small = emoji.premultiply(Image.fromarray(straight), 4)
    on_black = emoji.composite(torch.from_numpy(small)[None], torch.zeros(1, 3))
    assert on_black[0, 0, 0].tolist() == pytest.approx([-1, 0, 1, 1], abs=0.01)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a.png\tx\tred circle\tred\tg\ts", "line 63: name 'red circle' was used on line 2"),
        ("a.png\tx", "no field 'name'"),
    ],
)
def test_bad_rows_are_named(data: Path, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "emoji").mkdir()
    text = (data / "emoji" / "captions.tsv").read_text(encoding="utf-8")
    (tmp_path / "emoji" / "captions.tsv").write_text(text + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        emoji.read_rows(tmp_path)


def test_pictures_survive_the_round_trip() -> None:
    pixels = torch.rand(2, 3, 8, 8) * 2 - 1
    images = emoji.to_images(pixels)
    again = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 127.5 - 1
    assert float((again - pixels).abs().max()) <= 1 / 127
