"""Compares emoji-xl's images on a GPU with fp32 on a CPU: PSNR with equal seeds, and a contact sheet.

    python -m benchmarks.h200.fidelity draw --device cuda --precision int8 --out int8.npz [--pictures 64]
    python -m benchmarks.h200.fidelity compare fp32.npz int8.npz bf16.npz --sheet sheet.png

The last line of `draw` describes the engine. Prompts are CLDR names, half of them on a coloured background.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

STEPS, GUIDANCE = 20, 4.0
_SHOWN = 16  # pictures of a sheet
_NAMES = (
    "slice of pizza", "red heart", "cat face", "dog face", "sunflower", "red apple", "banana", "hot beverage",
    "birthday cake", "guitar", "rocket", "umbrella", "snowman", "crescent moon", "rainbow", "butterfly",
    "octopus", "turtle", "penguin", "elephant", "lion", "frog", "bee", "mushroom",
    "carrot", "strawberry", "watermelon", "doughnut", "hamburger", "soccer ball", "bicycle", "airplane",
)  # fmt: skip
_COLOURS = ("blue", "yellow", "green", "pink", "black", "orange", "purple", "red")


def prompts(count: int) -> list[str]:
    """Plain names, then names with background colours in rotation."""
    found = [*_NAMES, *(f"{name} on a {_COLOURS[i % 8]} background" for i, name in enumerate(_NAMES))]
    return [found[i % len(found)] for i in range(count)]


def draw(device: str, precision: str, count: int) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    """Images [N, H, W, 3] of the shipped model from the serving engine, and a description of the engine."""
    from contract.image import ImageParameters
    from core.batching.request import Request
    from core.config import read
    from workers.build import build

    settings = read(device=device, precision=precision, compile=False)
    with build(settings) as works:
        side = works.images.model.native
        requests = [
            Request(str(i), "image", ImageParameters(prompt, i, side, side, steps=STEPS, guidance_scale=GUIDANCE))
            for i, prompt in enumerate(prompts(count))
        ]
        started = time.perf_counter()
        made = [future.result() for future in [works.engine.submit(request) for request in requests]]
        seconds = time.perf_counter() - started
    levels = np.stack([np.asarray(picture.image) for picture in made])
    return levels, {**made[0].fingerprint, "pictures": count, "seconds": round(seconds, 2)}


def psnr(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> NDArray[np.float64]:
    """PSNR of each pair of images [N, H, W, 3], in dB; equal ones count as 100."""
    error = np.square(one.astype(np.float64) - other).mean((1, 2, 3))
    found: NDArray[np.float64] = 10 * np.log10(255**2 / np.maximum(error, 255**2 / 1e10))
    return found


def summary(reference: NDArray[np.uint8], other: NDArray[np.uint8]) -> dict[str, Any]:
    """Statistics of the PSNR in dB, and the mean difference in brightness, in levels."""
    found = psnr(reference, other)
    return {
        "pictures": len(found),
        "psnr_mean_db": round(float(found.mean()), 2),
        "psnr_median_db": round(float(np.median(found)), 2),
        "psnr_min_db": round(float(found.min()), 2),
        "psnr_min_of": prompts(len(found))[int(found.argmin())],
        "brighter_levels": round(float(other.astype(np.float64).mean() - reference.mean()), 3),
    }


def sheet(columns: dict[str, NDArray[np.uint8]], out: Path) -> None:
    """A sheet of the first images with one column per variant, in two blocks; names on top."""
    from PIL import Image, ImageDraw

    names, count = list(columns), min(_SHOWN, min(map(len, columns.values())))
    side = next(iter(columns.values())).shape[1]
    half, gap, head = -(-count // 2), side // 8, 16
    page = Image.new("RGB", (2 * len(names) * side + gap, head + half * side), "white")
    pen = ImageDraw.Draw(page)
    for index in range(count):
        block, row = divmod(index, half)
        for column, name in enumerate(names):
            x = block * (len(names) * side + gap) + column * side
            page.paste(Image.fromarray(columns[name][index]), (x, head + row * side))
            if row == 0:
                pen.text((x + 2, 2), name, fill="black")
    out.parent.mkdir(parents=True, exist_ok=True)
    page.save(out)


def compare(reference: Path, others: list[Path], out: Path) -> dict[str, Any]:
    """PSNR of each file's images against the first file's, by file name; writes the sheet."""
    columns = {path.stem: np.load(path)["pictures"] for path in (reference, *others)}
    sheet(columns, out)
    return {name: summary(columns[reference.stem], columns[name]) for name in list(columns)[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--device", required=True)
    drawing.add_argument("--precision", required=True)
    drawing.add_argument("--pictures", type=int, default=64)
    drawing.add_argument("--out", type=Path, required=True)
    comparing = commands.add_parser("compare")
    comparing.add_argument("reference", type=Path)
    comparing.add_argument("others", type=Path, nargs="+")
    comparing.add_argument("--sheet", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "draw":
        levels, drawn_by = draw(options.device, options.precision, options.pictures)
        np.savez_compressed(options.out, pictures=levels)
        print(json.dumps(drawn_by), flush=True)
    else:
        print(json.dumps(compare(options.reference, options.others, options.sheet)), flush=True)


if __name__ == "__main__":
    main()
