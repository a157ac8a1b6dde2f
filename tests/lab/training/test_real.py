"""The real pictures as files: in the table's order, on white, and never among others."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from PIL import Image

from lab.scenes import emoji
from lab.training import captions, real

HEAD = "file\temoji\tname\tkeywords\tgroup\tsubgroup\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "emoji"
    folder.mkdir(parents=True)
    colours = {"b": (255, 0, 0, 255), "a": (0, 255, 0, 0), "c": (0, 0, 255, 128)}
    rows = [f"{name}.png\tx\t{name} thing\tk\tg\ts\n" for name in colours]
    (folder / "captions.tsv").write_text("".join([HEAD, *rows]), "utf-8")
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for name, colour in colours.items():
            with archive.open(f"{name}.png", "w") as stream:
                Image.new("RGBA", (8, 8), colour).save(stream, "PNG")
    return tmp_path / "data"


def seen(folder: Path) -> dict[str, object]:
    """The colours of its pictures, all of 4 × 4 pixels."""
    found: dict[str, object] = {}
    for path in sorted(folder.iterdir()):
        with Image.open(path) as image:
            assert image.mode == "RGB" and image.size == (4, 4)
            found[path.name] = image.getpixel((1, 1))
    return found


def test_they_are_written_in_order_on_white(data: Path, tmp_path: Path) -> None:
    real.write(data, tmp_path / "real", 4, real.plain(emoji.read_rows(data)))
    assert seen(tmp_path / "real") == {
        "00000-b.png": (255, 0, 0), "00001-a.png": (255, 255, 255), "00002-c.png": (127, 127, 255),
    }  # fmt: skip
    with pytest.raises(ValueError, match="is not empty"):
        real.write(data, tmp_path / "real", 4, [])


def test_captions_ask_for_pictures_and_backgrounds(data: Path, tmp_path: Path) -> None:
    path, rows = tmp_path / "captions.tsv", emoji.read_rows(data)
    path.write_text("id\tcaption\tfile\nx\ta thing on a navy background\ta.png\ny\tb thing, k\tb.png\n", "utf-8")
    real.write(data, tmp_path / "real", 4, real.asked_for(rows, path))
    assert seen(tmp_path / "real") == {"x.png": captions.COLOURS["navy"], "y.png": (255, 0, 0)}
    path.write_text("id\tcaption\tfile\nx\ta thing\tz.png\n", "utf-8")
    with pytest.raises(ValueError, match=r"no picture 'z\.png'"):
        real.asked_for(rows, path)
