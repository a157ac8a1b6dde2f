"""Writes the real images as PNGs, for `diptych evaluate --against`: on white, or as a file's captions ask for them.

Usage:

    python -m training.real --data data --out real
    python -m training.real --data data --out real-held-out --captions models/emoji-xl/held-out.tsv
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline import prompts
from training import captions, pictures
from training.pictures import PictureRow

_CHUNK = 256


class Wanted(NamedTuple):
    """A picture to be written: its file's name, its row, and the colour behind it."""

    name: str
    row: PictureRow
    colour: str


def plain(rows: list[PictureRow]) -> list[Wanted]:
    """Every picture once on white, named by row and file."""
    return [Wanted(f"{index:05d}-{Path(row.file).stem}", row, "white") for index, row in enumerate(rows)]


def asked_for(rows: list[PictureRow], path: Path) -> list[Wanted]:
    """The pictures of a .tsv with columns id, caption and file (`training.held_out`), named by their ids.

    Raises `ValueError` for a file without these columns, unknown pictures and unknown colours.
    """
    by_file = {row.file: row for row in rows}
    texts = prompts.read(path, names=("id",))
    files = prompts.read(path, columns=("file",), names=("id",))
    if missing := [one.text for one in files if one.text not in by_file]:
        raise ValueError(f"{path}: no picture {missing[0]!r}")
    return [
        Wanted(text.name, by_file[file.text], captions.read_caption(text.text).colour)
        for text, file in zip(texts, files, strict=True)
    ]


def write(data: Path, out: Path, size: int, wanted: list[Wanted]) -> None:
    """Write these pictures.

    `out` holds them and nothing else afterwards: raises `ValueError` where it holds something now.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(wanted), _CHUNK):
        part = wanted[start : start + _CHUNK]
        layers = pictures.read_pictures(data, [one.row for one in part], size)
        colours = torch.tensor([captions.COLOURS[one.colour] for one in part]) / 255
        for one, image in zip(part, pictures.to_images(pictures.composite(layers, colours)), strict=True):
            image.save(out / f"{one.name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the real pictures as PNGs.")
    parser.add_argument("--data", type=Path, required=True, help="folder with emoji/")
    parser.add_argument("--out", type=Path, required=True, help="for the pictures: a new folder")
    parser.add_argument("--size", type=int, default=128, help="side in pixels; default: 128")
    parser.add_argument(
        "--captions", type=Path, metavar="TSV", help="with columns id, caption and file; default: all, on white"
    )
    parser.add_argument("--limit", type=int, help="only the first so many, as many as `evaluate --limit` draws")
    options = parser.parse_args()
    try:
        rows = pictures.read_rows(options.data)
        wanted = plain(rows) if options.captions is None else asked_for(rows, options.captions)
        wanted = wanted[: options.limit]
        write(options.data, options.out, options.size, wanted)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{len(wanted)} pictures in {options.out}")


if __name__ == "__main__":
    main()
