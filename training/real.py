"""Writes the real images as PNGs, each on white as its plain name asks for, for `diptych evaluate --against`.

Usage:

    python -m training.real --data data --out real
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from training import pictures

_CHUNK = 256


def write(data: Path, out: Path, size: int, limit: int | None = None) -> int:
    """Write the first `limit` rows' pictures, named by row and file, and return how many there are.

    `out` holds these pictures and nothing else afterwards: raises `ValueError` where it holds something now.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty")
    rows = pictures.read_rows(data)[:limit]
    out.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK]
        layers = pictures.read_pictures(data, part, size)
        on_white = pictures.to_images(pictures.composite(layers, torch.ones(len(part), 3)))
        for index, (row, image) in enumerate(zip(part, on_white, strict=True), start):
            image.save(out / f"{index:05d}-{Path(row.file).stem}.png")
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the real pictures as PNGs, on white.")
    parser.add_argument("--data", type=Path, required=True, help="folder with emoji/")
    parser.add_argument("--out", type=Path, required=True, help="for the pictures: a new folder")
    parser.add_argument("--size", type=int, default=128, help="side in pixels; default: 128")
    parser.add_argument("--limit", type=int, help="only the first so many, as many as `evaluate --limit` draws")
    options = parser.parse_args()
    try:
        count = write(options.data, options.out, options.size, options.limit)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{count} pictures in {options.out}")


if __name__ == "__main__":
    main()
