"""The real pictures as files: in the table's order, on white, and never among others."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from evaluation.scenes import emoji
from training import captions, real

HEAD = "file\temoji\tname\tkeywords\tgroup\tsubgroup\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "emoji"
    folder.mkdir(parents=True)
    rows, colours = ("b", "a", "c"), ((255, 0, 0, 255), (0, 255, 0, 0), (0, 0, 255, 128))
    (folder / "captions.tsv").write_text(
        HEAD + "".join(f"{name}.png\tx\t{name} thing\tk\tg\ts\n" for name in rows), "utf-8"
    )
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for name, colour in zip(rows, colours, strict=True):
            stream = io.BytesIO()
            Image.new("RGBA", (8, 8), colour).save(stream, "PNG")
            archive.writestr(f"{name}.png", stream.getvalue())
    return tmp_path / "data"


def test_they_are_written_in_order_on_white(data: Path, tmp_path: Path) -> None:
    real.write(data, tmp_path / "real", 4, real.plain(emoji.read_rows(data)))
    found = sorted((tmp_path / "real").iterdir())
    assert [path.name for path in found] == ["00000-b.png", "00001-a.png", "00002-c.png"]
    seen = []
    for path in found:
        with Image.open(path) as image:
            assert image.mode == "RGB" and image.size == (4, 4)
            seen.append(image.getpixel((1, 1)))
    assert seen == [(255, 0, 0), (255, 255, 255), (127, 127, 255)]


def test_captions_ask_for_pictures_and_backgrounds(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "captions.tsv"
    path.write_text("id\tcaption\tfile\nx\ta thing on a navy background\ta.png\ny\tb thing, k\tb.png\n", "utf-8")
    wanted = real.asked_for(emoji.read_rows(data), path)
    real.write(data, tmp_path / "real", 4, wanted)
    seen = {}
    for file in sorted((tmp_path / "real").iterdir()):
        with Image.open(file) as image:
            seen[file.name] = image.getpixel((1, 1))
    assert seen == {"x.png": captions.COLOURS["navy"], "y.png": (255, 0, 0)}
    path.write_text("id\tcaption\tfile\nx\ta thing\tz.png\n", "utf-8")
    with pytest.raises(ValueError, match=r"no picture 'z\.png'"):
        real.asked_for(emoji.read_rows(data), path)


def test_other_files_are_left_alone(data: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="is not empty"):
        real.write(data, tmp_path / "real", 4, [])
