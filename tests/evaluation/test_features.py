"""Features in files: taken once, taken on where it stopped, taken anew where anything changed; files that are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from evaluation import features, pixels
from evaluation.pixels import PictureError, Pixels

Take = Callable[..., Tensor]


class Mean:
    """An extractor that counts what it sees, and stops after so many."""

    name, width = "mean", 3

    def __init__(self, digest: str = "d", stop: int = 10**9) -> None:
        self.digest, self.seen, self._stop = digest, 0, stop

    def see(self, pictures: Sequence[Pixels]) -> Tensor:
        if self.seen + len(pictures) > self._stop:
            raise KeyboardInterrupt
        self.seen += len(pictures)
        return torch.stack([torch.tensor(picture).float().mean((0, 1)) for picture in pictures])


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    draw = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for k in range(600):
        Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(folder / f"{k:03d}.png")
    return list(pixels.listing(folder))


@pytest.fixture
def take(files: list[Path], tmp_path: Path) -> Take:
    """Takes the features of the files, or of these, with an extractor; they are kept."""

    def take(extractor: Mean, digest: str = "p", given: list[Path] = files) -> Tensor:
        return features.picture_features(given, digest, extractor, tmp_path / "f")

    return take


def test_they_are_kept_and_taken_on(files: list[Path], tmp_path: Path, take: Take) -> None:
    expected = torch.stack([torch.tensor(pixels.read(path)).float().mean((0, 1)) for path in files])
    with pytest.raises(KeyboardInterrupt):
        take(Mean(stop=400))
    assert torch.equal(take(on := Mean()), expected) and on.seen == 600 - 256  # written down every 8 groups of 32
    assert torch.equal(take(Mean(stop=0)), expected)
    assert (tmp_path / "f.npy").stat().st_size < 600 * 3 * 4 + 200
    with pytest.raises(KeyboardInterrupt):
        take(Mean(stop=40), "q")
    take(back := Mean())
    assert back.seen == 600, "what is overwritten is not vouched for"


@pytest.mark.parametrize(
    ("extractor", "digest", "count"), [("d", "q", 600), ("e", "p", 600), ("d", "p", 10), ("damage", "p", 600)]
)
def test_they_are_taken_anew_where_anything_is_another(
    extractor: str, digest: str, count: int, files: list[Path], tmp_path: Path, take: Take
) -> None:
    take(Mean("damage" if extractor == "damage" else "d"))
    if extractor == "damage":
        (tmp_path / "f.npy").write_bytes(b"\x93NUMPY")
    take(now := Mean(extractor), digest, files[:count])
    assert now.seen == count


def test_a_folder_that_changed_is_another(files: list[Path]) -> None:
    before = features.digest_of(files)
    assert before == features.digest_of(files) != features.digest_of(files[1:])
    Image.new("RGB", (9, 9)).save(files[5])
    assert features.digest_of(files) != before


@pytest.mark.parametrize("data", [b"", b"text", None])
def test_what_is_no_picture_is_named(data: bytes | None, files: list[Path]) -> None:
    files[1].write_bytes(files[1].read_bytes()[:50] if data is None else data)
    with pytest.raises(PictureError, match=r"001\.png: is no whole picture"):
        pixels.read(files[1])


def test_all_unreadable_pictures_are_named_at_once(files: list[Path], take: Take) -> None:
    for number in (40, 70, 599):
        files[number].write_bytes(files[number].read_bytes()[:50])
    with pytest.raises(PictureError, match=r"040\.png: is no whole picture .*; nor are 070\.png, 599\.png$"):
        take(Mean())


def test_transparent_pictures_are_laid_on_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 1), (200, 0, 0, 0))
    image.putpixel((1, 0), (200, 0, 0, 255))
    deep = Image.fromarray(np.array([[7 * 256 + 9]], np.uint16))  # 16 bits, as their 8-bit twin
    for drawn, expected in (
        (image, [[255, 255, 255], [200, 0, 0]]), (Image.new("L", (1, 1), 7), [[7] * 3]), (deep, [[7] * 3]),
    ):  # fmt: skip
        drawn.save(tmp_path / "a.png")
        assert pixels.read(tmp_path / "a.png").tolist() == [expected]


def test_hidden_files_and_others_are_no_pictures(tmp_path: Path) -> None:
    (tmp_path / ".0.png").write_bytes(b"")
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(PictureError, match="holds no pictures"):
        pixels.listing(tmp_path)
