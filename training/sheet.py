"""Contact sheets: images in a grid with a line of text under each.

The README's, of the first 64 prompts of families that training never saw:

    diptych evaluate --prompts models/emoji-xl/unseen.tsv --limit 64 --precision int8 --out RUN
    python -m training.sheet RUN docs/emoji-xl.png

Several runs of the same prompts, a line for each: `python -m training.sheet RUN RUN … FILE --first 8`.
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


def tile(path: Path, images: list[Image.Image], *, columns: int, cell: int, group: int = 1, gap: int = 6) -> None:
    """Writes a PNG of square cells without texts, `group` cells touching; in 256 colours, to be small."""
    rows, groups = math.ceil(len(images) / columns), math.ceil(columns / group)
    grid = Image.new("RGB", (columns * cell + (groups - 1) * gap, rows * (cell + gap) - gap), "white")
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        place = column * cell + column // group * gap, row * (cell + gap)
        grid.paste(image.convert("RGB").resize((cell, cell), Image.Resampling.LANCZOS), place)
    _save(grid, path)


def _wrap(pen: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if pen.textlength(longer, font=font) <= CELL or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def strip(path: Path, rows: dict[str, list[Image.Image]]) -> None:
    """Writes a PNG with a line of pictures for each name, the name to the left."""
    cell, gap = 96, 6
    font = ImageFont.load_default(12)
    margin = 10 + round(max(font.getlength(name) for name in rows))
    columns = max(map(len, rows.values()))
    grid = Image.new("RGB", (margin + columns * (cell + gap) - gap, len(rows) * (cell + gap) - gap), "white")
    pen = ImageDraw.Draw(grid)
    for row, (name, images) in enumerate(rows.items()):
        pen.text((2, row * (cell + gap) + cell // 2 - 7), name, fill=(40, 40, 40), font=font)
        for column, image in enumerate(images):
            place = margin + column * (cell + gap), row * (cell + gap)
            grid.paste(image.convert("RGB").resize((cell, cell), Image.Resampling.LANCZOS), place)
    _save(grid, path)


def _save(grid: Image.Image, path: Path) -> None:
    """In 256 colours, to be small."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """`python -m training.sheet RUN… FILE`: of the pictures of finished runs of `diptych evaluate`."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    options.add_argument("file", type=Path, metavar="FILE")
    options.add_argument("--first", type=int, default=8, metavar="N", help="pictures of each of several runs")
    given = options.parse_args()
    runs = [EvaluationRun.read(folder) for folder in given.runs]
    if len(runs) > 1:
        strip(given.file, {run.name: [Image.open(file) for file in run.files()[: given.first]] for run in runs})
        return
    images = [Image.open(file).convert("RGB") for file in runs[0].files()]
    save(given.file, images, [caption.text for caption in runs[0].captions])


if __name__ == "__main__":
    main()
