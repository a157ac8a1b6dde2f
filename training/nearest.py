"""Finds for drawn pictures the nearest training pictures by emoji-clip's features, and shows them side by side.

A model that repeats its training data draws pictures that lie nearer to it than true pictures of the same unseen
prompts do. Writes `judge/nearest-NAME.json` and a sheet of pairs, sample and nearest, `judge/nearest-NAME.png`.

    diptych evaluate --prompts models/emoji-xl/unseen.tsv --precision int8 --out RUN
    python -m training.nearest --data DATA --work WORK --variants 24 --drawn RUN
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from evaluation import bootstrap, pairs, pixels
from evaluation.run import EvaluationRun, RunError
from training import captions, pictures, scenes, sheet
from training.judge_pictures import FeatureExtractor
from training.layout import Square
from training.render import Renderer, pack
from training.run import TrainingRun, from_options, parser
from training.scene_prompts import groups
from training.scenes import Composer, Prompt, Scene
from training.stream import World

SCENES = 6000  # of the training stream, beside all of its single emoji
SHOWN = 64
_CHUNK = 256
_NEAR = 0.05  # quantile of the distances that tells of copies among few


@dataclass(frozen=True)
class Nearest:
    """Of each of N pictures the nearest training picture: its number, 1 - cosine of features, and PSNR in dB."""

    rows: list[int]
    distance: Tensor
    psnr: Tensor


def training_scenes(run: TrainingRun, world: World, count: int) -> list[Scene]:
    """Every emoji of the stream in the middle of a white ground, then the first `count` scenes of the stream."""
    size = (run.size, run.size)
    hidden = captions.held_out(world.rows, run.held_out)
    known = [row for row in range(len(world.rows)) if row not in hidden]
    ground, full = scenes.Backdrop(), Square(run.size / 2, run.size / 2, float(run.size))
    single = [Scene(world.rows[row].name, (scenes.Layer(row, full),), ground, size) for row in known]
    return single + [world.scene(index, size)[0] for index in range(count)]


class TrainingPictures:
    """Training pictures and their features; pixels are drawn again where they are asked for."""

    def __init__(self, found: Sequence[Scene], renderer: Renderer, reader: FeatureExtractor) -> None:
        self.scenes = found
        self._renderer = renderer
        self._reader = reader
        parts = (self._drawn(range(n, min(n + _CHUNK, len(found)))) for n in range(0, len(found), _CHUNK))
        self.features = torch.cat([reader.see(part) for part in parts])

    def _drawn(self, rows: Sequence[int]) -> Tensor:
        return self._renderer.draw(pack([self.scenes[row] for row in rows]))

    def images(self, rows: Sequence[int]) -> list[Image.Image]:
        """These training pictures."""
        chunks = (self._drawn(rows[start : start + _CHUNK]) for start in range(0, len(rows), _CHUNK))
        return [image for chunk in chunks for image in pictures.to_images(chunk)]

    def nearest(self, made: Sequence[Image.Image]) -> Nearest:
        """The nearest of all to each picture."""
        stacked = torch.stack([torch.from_numpy(np.array(image)) for image in made])
        seen = self._reader.see(stacked.permute(0, 3, 1, 2).float() / 127.5 - 1)
        cosine, rows = (seen.double() @ self.features.double().T).max(1)
        shown = self.images(rows.tolist())
        psnr = [pairs.psnr(np.asarray(a), np.asarray(b)) for a, b in zip(made, shown, strict=True)]
        return Nearest(rows.tolist(), 1 - cosine, torch.tensor(psnr, dtype=torch.float64))


def prompts_of(run: TrainingRun, composer: Composer, found: EvaluationRun) -> list[Prompt]:
    """The prompts of a run's captions, in their order. Raises `RunError` where they are not `scene_prompts`'."""
    numbers = [int(number) for _, _, number in (one.id.rpartition("-") for one in found.captions) if number.isdigit()]
    unseen = all("held_out" in one.id for one in found.captions)
    every = groups(run, composer, max(numbers, default=0) + 1, unseen=unseen)
    known = {f"{name}-{number}": one for name, group in every.items() for number, one in enumerate(group)}
    for one in found.captions:
        if one.id not in known or known[one.id].caption != one.text:
            raise RunError(f"{found.folder}: {one.id} ({one.text!r}) is no prompt of training.scene_prompts")
    return [known[one.id] for one in found.captions]


def judge(run: TrainingRun, found: EvaluationRun, count: int, *, shown: int = SHOWN) -> dict[str, Any]:
    """How near a run's pictures, and true pictures of its prompts, are to `count` training scenes and all single emoji.

    Distances are 1 - cosine by emoji-clip; figures are (value, low, high). `less_than_true` is the mean of samples'
    distances less those of true pictures, by prompt: where it is below 0 with its interval, samples are nearer to
    training than true pictures are. Of the first `shown` pictures the pairs are listed and put on the sheet.
    """
    world = World.read(run)
    renderer, reader = Renderer(world.images, run.device), FeatureExtractor(run)
    prompts = prompts_of(run, world.composer, found)
    training = TrainingPictures(training_scenes(run, world, count), renderer, reader)
    made = [Image.fromarray(pixels.read(file)) for file in found.files()]
    real = [prompt.scene for prompt in prompts]
    drawn = training.nearest(made)
    true = training.nearest(TrainingPictures(real, renderer, reader).images(range(len(real))))
    counts = bootstrap.resamples(len(made))
    rows = drawn.rows[:shown]
    figures = {
        "name": found.name,
        "training_pictures": len(training.scenes),
        "samples": _summary(drawn, counts),
        "true": _summary(true, counts),
        "less_than_true": bootstrap.mean(drawn.distance - true.distance, counts).interval,
        "share_nearer_than_true": bootstrap.share(int((drawn.distance < true.distance).sum()), len(made)),
        "shown": [
            {"caption": caption.text, "nearest": training.scenes[row].caption, "distance": float(far)}
            for caption, row, far in zip(found.captions, rows, drawn.distance, strict=False)
        ],
    }
    both = zip(made, training.images(rows), strict=False)
    save(run.folder("judge") / f"nearest-{found.name}.png", list(chain.from_iterable(both)))
    (run.folder("judge") / f"nearest-{found.name}.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return figures


def _summary(found: Nearest, counts: Tensor) -> dict[str, Any]:
    return {
        "distance": bootstrap.mean(found.distance, counts).interval,
        "distance_5_percent": float(found.distance.quantile(_NEAR)),
        "least_distance": float(found.distance.min()),
        "psnr_db": bootstrap.mean(found.psnr, counts).interval,
        "most_psnr_db": float(found.psnr.max()),
    }


def save(path: Path, images: list[Image.Image]) -> None:
    """Pairs side by side, eight in a line, with a gap between pairs."""
    sheet.tile(path, images, columns=16, cell=72, group=2)


def main() -> None:
    """`python -m training.nearest --drawn RUN [--scenes N] [--sheet FILE]`."""
    options = parser(__doc__ or "")
    options.add_argument("--drawn", type=Path, required=True, metavar="RUN", help="of `diptych evaluate`")
    options.add_argument("--scenes", type=int, default=SCENES, help="of the training stream; default: %(default)s")
    options.add_argument("--sheet", type=Path, metavar="FILE", help="put the sheet of pairs there too")
    given = options.parse_args()
    run = from_options(given)
    found = EvaluationRun.read(given.drawn)
    figures = judge(run, found, given.scenes)
    if given.sheet is not None:
        given.sheet.write_bytes((run.folder("judge") / f"nearest-{found.name}.png").read_bytes())
    print(json.dumps({name: value for name, value in figures.items() if name != "shown"}, indent=1))


if __name__ == "__main__":
    main()
