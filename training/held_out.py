"""Writes captions that the embedded image models were never trained on, for `diptych evaluate --prompts`.

Usage:

    python -m training.held_out --data data --out models/emoji-xl/held-out.tsv
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from evaluation.scenes import emoji
from evaluation.scenes.emoji import PictureRow
from training import captions, zimage_tokens

TONES, COLOURED, PHRASINGS = 48, 4, 272  # skin-tone variants, captions of each with a background, and new wordings
VARIANTS, SEED = 24, 0  # of the training of emoji-xl and emoji-z
_DRAWS = 8  # wordings of a picture, of which a new one is taken


class HeldOutCaption(NamedTuple):
    """A row of the table: a caption, and the file of the picture that it asks for."""

    id: str
    caption: str
    file: str


def compose(
    rows: list[PictureRow],
    *,
    tones: int = TONES,
    coloured: int = COLOURED,
    phrasings: int = PHRASINGS,
    variants: int = VARIANTS,
    seed: int = SEED,
) -> list[HeldOutCaption]:
    """Compose the same captions for the same rows.

    First the skin-tone variants whose pictures are never trained on, each plain and on `coloured` backgrounds; then so
    many wordings of other pictures, at most one for each subject, that training with `variants` and `seed` draws for no
    picture. Half of the latter have a background. Raises `ValueError` where the rows give fewer.
    """
    hidden = captions.held_out(rows, tones)
    draw = random.Random(f"held out {seed}")
    composed = []
    for index in sorted(hidden):
        name = rows[index].name
        colours = draw.sample([colour for colour in captions.COLOUR_NAMES if colour != "white"], coloured)
        texts = [name, *(captions.with_background(name, colour) for colour in colours)]
        composed += [(f"tone-{index:05d}-{number}", text, rows[index].file) for number, text in enumerate(texts)]
    new = list(islice(_new_wordings(rows, hidden, variants, seed, draw), phrasings))
    if len(new) < phrasings:
        raise ValueError(f"only {len(new)} of {phrasings} wordings are new")
    for index, text in new:
        if draw.random() < 0.5:
            text = captions.with_background(text, draw.choice(captions.COLOUR_NAMES))
        composed.append((f"words-{index:05d}", text, rows[index].file))
    return [HeldOutCaption(*caption) for caption in composed]


def trained(rows: list[PictureRow], variants: int, seed: int) -> set[str]:
    """All wordings that the training of emoji-xl and emoji-z draws, without backgrounds, as `_plain` has them."""
    every = (captions.wordings(rows, variants, seed), zimage_tokens.wordings(rows, variants, seed))
    return {_plain(text) for wordings in every for wording in wordings for text in wording}


def _new_wordings(
    rows: list[PictureRow], hidden: set[int], variants: int, seed: int, draw: random.Random
) -> Iterator[tuple[int, str]]:
    """(row, wording) for subjects in random order."""
    trained_wordings = trained(rows, variants, seed)
    order = [index for index in range(len(rows)) if index not in hidden]
    draw.shuffle(order)
    bases: set[str] = set()
    for index in order:
        base = captions.split_tone(rows[index].name)[0]
        if base in bases:
            continue
        for text in captions.subjects(rows[index], _DRAWS, draw):
            if _plain(text) not in trained_wordings:
                bases.add(base)
                yield index, text
                break


def _plain(text: str) -> str:
    """The text without case and spacing, which the tokenizers ignore."""
    return " ".join(text.lower().split())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write captions that were never trained on.")
    parser.add_argument("--data", type=Path, required=True, help="folder with emoji/")
    parser.add_argument("--out", type=Path, required=True, help="a .tsv")
    options = parser.parse_args()
    try:
        composed = compose(emoji.read_rows(options.data))
        options.out.write_text("".join("\t".join(row) + "\n" for row in (HeldOutCaption._fields, *composed)), "utf-8")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{len(composed)} captions in {options.out}")


if __name__ == "__main__":
    main()
