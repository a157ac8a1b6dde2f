"""Writes the real images as PNGs, for `diptych evaluate --against`: on white, or as a file's captions ask for them.

python -m lab.training.real --data data --out real
python -m lab.training.real --data data --out real-held-out --captions models/emoji-xl/held-out.tsv
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch

from lab.scenes import emoji
from lab.scenes.emoji import PictureRow
from lab.training import captions
from pipeline.text import prompts


class RealImage(NamedTuple):
    """An image to be written: its file's name, its row, and the colour behind it."""

    name: str
    row: PictureRow
    colour: str


def plain(rows: list[PictureRow]) -> list[RealImage]:
    """Every picture once on white, named by row and file."""
    return [RealImage(f"{index:05d}-{Path(row.file).stem}", row, "white") for index, row in enumerate(rows)]


def asked_for(rows: list[PictureRow], path: Path) -> list[RealImage]:
    """The pictures of a .tsv with columns id, caption and file, named by their ids.

    Raises `ValueError` for a file without these columns, unknown pictures and unknown colours.
    """
    by_file = {row.file: row for row in rows}
    texts = prompts.read(path, names=("id",))
    files = prompts.read(path, columns=("file",), names=("id",))
    if missing := [file.text for file in files if file.text not in by_file]:
        raise ValueError(f"{path}: no picture {missing[0]!r}")
    return [
        RealImage(text.name, by_file[file.text], captions.read_caption(text.text).colour)
        for text, file in zip(texts, files, strict=True)
    ]


def write(data: Path, out: Path, size: int, images: list[RealImage]) -> None:
    """Write these images into `out`; raises `ValueError` where it holds something now."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
    layers = emoji.read_pictures(data, [image.row for image in images], size)
    for image, layer in zip(images, layers, strict=True):
        colour = torch.tensor([captions.COLOURS[image.colour]]) / 255
        emoji.to_images(emoji.composite(layer[None], colour))[0].save(out / f"{image.name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the real images as PNGs.")
    parser.add_argument("--data", type=Path, required=True, help="folder with emoji/")
    parser.add_argument("--out", type=Path, required=True, help="for the images: a new folder")
    parser.add_argument("--size", type=int, default=128, help="side in pixels; default: 128")
    parser.add_argument("--captions", type=Path, metavar="TSV", help="with columns id, caption and file; default: all")
    parser.add_argument("--limit", type=int, help="only the first so many, as many as `evaluate --limit` draws")
    options = parser.parse_args()
    try:
        rows = emoji.read_rows(options.data)
        images = plain(rows) if options.captions is None else asked_for(rows, options.captions)
        write(options.data, options.out, options.size, images[: options.limit])
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{len(images[: options.limit])} images in {options.out}")


if __name__ == "__main__":
    main()
