"""A small emoji-like data set in the format of the real one, painted with plain forms; and tiny runs."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from lab.training.run import TrainingRun
from lab.training.shapes import SMOKE

HUES = {"red": (220, 40, 40), "blue": (40, 80, 220), "green": (40, 160, 60), "purple": (130, 60, 190)}
FORMS = ("circle", "square", "ring", "cross", "bar")
THINGS = {
    "ball": ("circle", (240, 140, 20)), "crate": ("square", (90, 200, 110)), "hoop": ("ring", (70, 130, 240)),
    "plank": ("bar", (150, 80, 40)), "sign": ("cross", (235, 90, 50)),
}  # fmt: skip
"""Nouns that scenes are composed of."""
HANDS = ("waving hand", "raised fist", "nose", "leg", "ear", "foot")
SIDES = {"square": (16, 112), "bar": (44, 74), "raised fist": (26, 98), "leg": (16, 60), "foot": (60, 112)}
TONES = {
    "light": (250, 220, 190), "medium-light": (225, 185, 145), "medium": (190, 140, 100), "medium-dark": (145, 95, 60),
    "dark": (90, 60, 45),
}  # fmt: skip
SCENES = (
    "A man riding a wave on top of a surfboard.", "Two dogs sleep on a red couch.", "A plate of food on a table.",
)  # fmt: skip


def paint(form: str, colour: tuple[int, int, int]) -> Image.Image:
    """One 128 x 128 RGBA picture with a transparent background."""
    image = Image.new("RGBA", (128, 128), (0, 0, 0, 0))
    pen = ImageDraw.Draw(image)
    if form in ("circle", "ring", "nose", "ear"):
        pen.ellipse((16, 16, 112, 112), fill=colour)
        if form in ("ring", "ear"):
            pen.ellipse((44, 44, 84, 84), fill=(0, 0, 0, 0))
    elif form in ("cross", "waving hand"):
        pen.rectangle((52, 10, 76, 118), fill=colour)
        pen.rectangle((10, 52, 118, 76), fill=colour)
    else:
        left, right = SIDES[form]
        pen.rectangle((left, 16, right, 112), fill=colour)
    return image


def write_data(folder: Path) -> Path:
    """Writes the data set under `folder`: 20 plain symbols, 5 things, and 6 body parts in no and in five tones."""
    rows = [("Symbols", f"{hue} {form}", [hue, form], paint(form, HUES[hue])) for hue in HUES for form in FORMS]
    rows += [("Objects", noun, ["thing"], paint(form, colour)) for noun, (form, colour) in THINGS.items()]
    for hand in HANDS:
        rows.append(("People & Body", hand, ["body", hand.split()[-1]], paint(hand, (250, 200, 40))))
        for tone, colour in TONES.items():
            name = f"{hand}: {tone} skin tone"
            rows.append(("People & Body", name, ["body", f"{tone} skin tone"], paint(hand, colour)))
    (folder / "emoji").mkdir(parents=True)
    (folder / "coco").mkdir()
    lines = ["file\temoji\tname\tkeywords\tgroup\tsubgroup"]
    with zipfile.ZipFile(folder / "emoji" / "images.zip", "w") as archive:
        for number, (group, name, keys, image) in enumerate(rows):
            out = io.BytesIO()
            image.save(out, "png")
            archive.writestr(f"emoji_{number}.png", out.getvalue())
            lines.append(f"emoji_{number}.png\t{number}\t{name}\t{'|'.join([*keys, name])}\t{group}\tany")
    (folder / "emoji" / "captions.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    head = "id\timage_id\tcaption\theight\twidth\tfile_name\tcoco_url"
    scenes = [f"{n}\t{n}\t{SCENES[n % 3]}\t1\t1\tx\tx" for n in range(60)]
    (folder / "coco" / "captions_source.tsv").write_text("\n".join([head, *scenes]) + "\n", encoding="utf-8")
    return folder


def tiny(data: Path, folder: Path) -> TrainingRun:
    """A run of the smoke shapes at 32 pixels."""
    few = {"size": 32, "iterations": 20, "batch": 16, "held_out": 3, "variants": 3}
    return TrainingRun(data, folder / "work", folder / "models", shapes=SMOKE, **few)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished run and what the judge measured."""

    run: TrainingRun
    figures: dict[str, Any]
