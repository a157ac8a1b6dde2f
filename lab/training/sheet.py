"""Contact sheets: images in a grid, with a line of text under each, a name before each row, or neither.

The README's, of the first 64 prompts of families that training never saw:

    diptych evaluate --prompts models/emoji-xl/unseen.tsv --limit 64 --precision int8 --out RUN
    python -m lab.training.sheet RUN docs/emoji-xl.png

Several runs of the same prompts, a row for each: `python -m lab.training.sheet RUN RUN … FILE --first 8`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from core import pictures
from evaluation.run import EvaluationRun

GAP = 6
_LINE, _LINES = 13, 2


def save(
    path: Path,
    images: Sequence[Image.Image],
    texts: Sequence[str] = (),
    *,
    names: Sequence[str] = (),
    columns: int = 8,
    cell: int = 128,
) -> None:
    """Write a PNG of square cells, in 256 colours to be small.

    `texts` stand below the images, cut to two lines; `names` before the rows. Raises ValueError where counts differ.
    """
    rows = math.ceil(len(images) / columns)
    if (texts and len(texts) != len(images)) or (names and len(names) != rows):
        raise ValueError(f"{path.name}: {len(images)} images, {len(texts)} texts and {len(names)} names")
    font = ImageFont.load_default(11)
    margin = 10 + round(max(map(font.getlength, names))) if names else 0
    cell_height = cell + GAP + (_LINES * _LINE if texts else 0)
    width = margin + columns * (cell + GAP) - GAP
    grid = Image.new("RGB", (width, rows * cell_height - GAP), "white")
    pen = ImageDraw.Draw(grid)
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        x, y = margin + column * (cell + GAP), row * cell_height
        grid.paste(pictures.on_white(image).resize((cell, cell), Image.Resampling.LANCZOS), (x, y))
        for line, words in enumerate(_wrapped(texts[number], font, cell)[:_LINES] if texts else ()):
            pen.text((x, y + cell + line * _LINE), words, fill=(40, 40, 40), font=font)
    for row, name in enumerate(names):
        pen.text((2, row * cell_height + cell // 2 - 7), name, fill=(40, 40, 40), font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        lines[-1:] = [longer] if font.getlength(longer) <= width or not lines[-1] else [lines[-1], word]
    return lines


def main() -> None:
    """`python -m lab.training.sheet RUN… FILE`: of the images of finished runs of `diptych evaluate`."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    options.add_argument("file", type=Path, metavar="FILE")
    options.add_argument("--first", type=int, default=8, metavar="N", help="images of each of several runs")
    arguments = options.parse_args()
    runs = [EvaluationRun.read(folder) for folder in arguments.runs]
    if len(runs) == 1:
        save(
            arguments.file,
            [pictures.decode(file) for file in runs[0].files()],
            [caption.text for caption in runs[0].captions],
        )
        return
    columns = min(arguments.first, len(runs[0].captions))
    images = [pictures.decode(file) for run in runs for file in run.files()[:columns]]
    save(arguments.file, images, names=[run.name for run in runs], columns=columns, cell=96)


if __name__ == "__main__":
    main()
