"""Reads the emoji images and their names, resizes them, and composes them on plain backgrounds of 16 colours."""

from __future__ import annotations

import csv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from core import pictures

COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "gray": (136, 136, 136),
    "red": (222, 44, 44),
    "orange": (250, 140, 22),
    "yellow": (252, 222, 56),
    "green": (48, 160, 70),
    "teal": (0, 140, 140),
    "blue": (40, 84, 224),
    "light blue": (150, 205, 248),
    "navy": (20, 30, 90),
    "purple": (130, 60, 190),
    "pink": (250, 170, 200),
    "brown": (122, 76, 42),
    "beige": (238, 222, 190),
    "light green": (168, 226, 150),
}
"""Background colours by name, RGB in 0..255. A caption without a colour means white."""
FIELDS = ("file", "emoji", "name", "keywords", "group", "subgroup")


@dataclass(frozen=True)
class PictureRow:
    """One line of `captions.tsv`; `keywords` never repeats the name."""

    file: str
    emoji: str
    name: str
    keywords: tuple[str, ...]
    group: str
    subgroup: str


def read_rows(data: Path) -> list[PictureRow]:
    """Read `emoji/captions.tsv` under `data`.

    Raises `ValueError` naming the line when a field is missing or a name is used twice.
    """
    path = data / "emoji" / "captions.tsv"
    rows: list[PictureRow] = []
    seen: dict[str, int] = {}
    with path.open(encoding="utf-8", newline="") as lines:
        for number, line in enumerate(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE), start=2):
            missing = [field for field in FIELDS if line.get(field) is None]
            if missing:
                raise ValueError(f"{path.name} line {number}: no field {missing[0]!r}")
            name = line["name"]
            if name in seen:
                raise ValueError(f"{path.name} line {number}: name {name!r} was used on line {seen[name]}")
            seen[name] = number
            words = tuple(word for word in line["keywords"].split("|") if word and word != name)
            rows.append(PictureRow(line["file"], line["emoji"], name, words, line["group"], line["subgroup"]))
    if not rows:
        raise ValueError(f"{path.name}: no rows")
    return rows


def read_pictures(data: Path, rows: list[PictureRow], size: int) -> Tensor:
    """Read the rows' pictures from `emoji/images.zip`, as uint8 [N, 4, size, size], colour premultiplied by alpha.

    Premultiplied, because resizing straight colours bleeds the hidden colour of transparent pixels into
    edges. Raises `ValueError` naming the file when a picture is missing or not square.
    """
    path = data / "emoji" / "images.zip"
    layers = np.empty((len(rows), 4, size, size), dtype=np.uint8)
    with zipfile.ZipFile(path) as archive:
        inside = set(archive.namelist())
        for index, row in enumerate(rows):
            if row.file not in inside:
                raise ValueError(f"{path.name}: no picture {row.file!r}")
            image = pictures.decode(archive.read(row.file))
            if image.width != image.height:
                raise ValueError(f"{path.name}: {row.file!r} is {image.width}x{image.height}, not square")
            layers[index] = premultiply(pictures.rgba(image), size)
    return torch.from_numpy(layers)


def premultiply(image: Image.Image, size: int) -> npt.NDArray[np.uint8]:
    """RGBA picture to uint8 [4, size, size] with premultiplied colour, box-filtered when it shrinks."""
    straight = np.asarray(image, dtype=np.float32) / 255
    layers = np.concatenate([straight[..., :3] * straight[..., 3:], straight[..., 3:]], axis=-1)
    planes = [Image.fromarray(layers[..., channel]) for channel in range(4)]
    if image.width != size:
        planes = [plane.resize((size, size), Image.Resampling.BOX) for plane in planes]
    scaled = np.stack([np.asarray(plane) for plane in planes])
    premultiplied: npt.NDArray[np.uint8] = np.rint(np.clip(scaled, 0, 1) * 255).astype(np.uint8)
    return premultiplied


def composite(pictures: Tensor, colours: Tensor) -> Tensor:
    """Lay premultiplied uint8 [B, 4, H, W] on plain RGB `colours` [B, 3] in 0..1; returns [B, 3, H, W] in -1..1."""
    layers = pictures.to(colours.dtype) / 255
    return (layers[:, :3] + (1 - layers[:, 3:]) * colours[:, :, None, None]) * 2 - 1


def to_images(pixels: Tensor) -> list[Image.Image]:
    """[B, 3, H, W] in -1..1 to PIL pictures."""
    values = ((pixels.detach().float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return [Image.fromarray(value.permute(1, 2, 0).cpu().numpy()) for value in values]
