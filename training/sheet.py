"""Contact sheets: images in a grid with a line of text under each.

The README's, of the first 64 prompts of families that training never saw:

    diptych evaluate --prompts models/emoji-xl/unseen.tsv --limit 64 --precision int8 --out RUN
    python -m training.sheet RUN docs/emoji-xl.png
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from evaluation.run import EvaluationRun

CELL = 128
LINE = 13


def save(path: Path, images: list[Image.Image], texts: list[str], columns: int = 8) -> None:
    """Writes a PNG of `images` with `texts` below them, cut to two lines; raises `ValueError` when counts differ."""
    if len(images) != len(texts):
        raise ValueError(f"{path.name}: {len(images)} pictures and {len(texts)} texts")
    tall = CELL + 2 * LINE + 6
    grid = Image.new("RGB", (columns * (CELL + 6), math.ceil(len(images) / columns) * tall), "white")
    pen, font = ImageDraw.Draw(grid), ImageFont.load_default(11)
    for number, (image, text) in enumerate(zip(images, texts, strict=True)):
        x, y = number % columns * (CELL + 6) + 3, number // columns * tall + 3
        grid.paste(image.resize((CELL, CELL), Image.Resampling.BICUBIC), (x, y))
        for row, line in enumerate(_wrap(pen, font, text)[:2]):
            pen.text((x, y + CELL + row * LINE), line, fill=(40, 40, 40), font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.save(path, optimize=True)


def _wrap(pen: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if pen.textlength(longer, font=font) <= CELL or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def main() -> None:
    """`python -m training.sheet RUN FILE`: of the pictures of a finished run of `diptych evaluate`."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run", type=Path)
    options.add_argument("file", type=Path)
    given = options.parse_args()
    run = EvaluationRun.read(given.run)
    images = [Image.open(file).convert("RGB") for file in run.files()]
    save(given.file, images, [caption.text for caption in run.captions])


if __name__ == "__main__":
    main()
