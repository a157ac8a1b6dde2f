"""Finds for images of a run the nearest training images by emoji-clip's features, and shows them side by side.

A model that repeats its training data draws images that lie nearer to it than true images of the same unseen prompts
do: `--real` names these, as `training.scene_prompts --real` wrote them. Writes `judge/nearest-NAME.json` and a sheet.

    diptych evaluate --prompts models/emoji-xl/unseen.tsv --precision int8 --out RUN
    python -m training.nearest --data DATA --work WORK --variants 24 --drawn RUN --real real/own
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
from evaluation.clip import Clip
from evaluation.pixels import Pixels
from evaluation.run import EvaluationRun
from training import captions, scenes, sheet
from training.layout import Square
from training.render import Renderer, images_of
from training.run import TrainingRun, from_options, parser
from training.scenes import Scene
from training.stream import World

SCENES = 6000  # of the training stream, beside all of its single emoji
SHOWN = 64
_NEAR = 0.05  # quantile of the distances that tells of copies among few


@dataclass(frozen=True)
class Nearest:
    """The nearest training image of each of N images: its number, 1 - cosine of features, and PSNR in dB."""

    rows: list[int]
    distance: Tensor
    psnr: Tensor

    def summary(self, counts: Tensor) -> dict[str, Any]:
        """Means with intervals, and the extremes."""
        return {
            "distance": bootstrap.mean(self.distance, counts).interval,
            "distance_5_percent": float(self.distance.quantile(_NEAR)),
            "least_distance": float(self.distance.min()),
            "psnr_db": bootstrap.mean(self.psnr, counts).interval,
            "most_psnr_db": float(self.psnr.max()),
        }


def training_scenes(run: TrainingRun, world: World, count: int) -> list[Scene]:
    """Every emoji of the stream in the middle of a white ground, then the first `count` scenes of the stream."""
    size = (run.size, run.size)
    hidden = captions.held_out(world.rows, run.held_out)
    ground, full = scenes.Backdrop(), Square(run.size / 2, run.size / 2, float(run.size))
    single = [
        Scene(row.name, (scenes.Layer(number, full),), ground, size)
        for number, row in enumerate(world.rows)
        if number not in hidden
    ]
    return single + [world.scene(index, size)[0] for index in range(count)]


def nearest(images: Sequence[Pixels], training: Sequence[Pixels], clip: Clip) -> Nearest:
    """The nearest of all training images to each image."""
    cosine, rows = (clip.see(images).double() @ clip.see(training).double().T).max(1)
    psnr = [pairs.psnr(image, training[row]) for image, row in zip(images, rows.tolist(), strict=True)]
    return Nearest(rows.tolist(), 1 - cosine, torch.tensor(psnr, dtype=torch.float64))


def judge(run: TrainingRun, evaluated: EvaluationRun, real: Path, count: int, *, limit: int = SHOWN) -> dict[str, Any]:
    """Compare a run's images, and true images of its captions, with `count` training scenes and all single emoji.

    `less_than_true` is the mean of samples' distances less those of true images, by caption: where it is below 0 with
    its interval, samples are nearer to training than true images are. The first `limit` pairs are put on the sheet.
    """
    world, clip = World.read(run), Clip(run.models / "emoji-clip", device=run.device)
    train_scenes = training_scenes(run, world, count)
    training = [np.asarray(image) for image in images_of(Renderer(world.images, run.device), train_scenes)]
    images = [pixels.read(file) for file in evaluated.files()]
    neighbours = nearest(images, training, clip)
    true = nearest([pixels.read(real / f"{caption.id}.png") for caption in evaluated.captions], training, clip)
    counts = bootstrap.resamples(len(images))
    figures = {
        "name": evaluated.name,
        "training_pictures": len(training),
        "samples": neighbours.summary(counts),
        "true": true.summary(counts),
        "less_than_true": bootstrap.mean(neighbours.distance - true.distance, counts).interval,
        "share_nearer_than_true": bootstrap.share(int((neighbours.distance < true.distance).sum()), len(images)),
        "shown": [
            {"caption": caption.text, "nearest": train_scenes[row].caption, "distance": float(far)}
            for caption, row, far in zip(evaluated.captions[:limit], neighbours.rows, neighbours.distance, strict=False)
        ],
    }
    path = run.folder("judge") / f"nearest-{evaluated.name}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    both = chain.from_iterable((images[n], training[row]) for n, row in enumerate(neighbours.rows[:limit]))
    sheet.save(path.with_suffix(".png"), [Image.fromarray(pair) for pair in both], columns=16, cell=72, group=2)
    return figures


def main() -> None:
    """`python -m training.nearest --drawn RUN --real DIR [--scenes N]`."""
    options = parser(__doc__ or "")
    options.add_argument("--drawn", type=Path, required=True, metavar="RUN", help="of `diptych evaluate`")
    options.add_argument("--real", type=Path, required=True, metavar="DIR", help="true images, named by captions' ids")
    options.add_argument("--scenes", type=int, default=SCENES, help="of the training stream; default: %(default)s")
    arguments = options.parse_args()
    figures = judge(from_options(arguments), EvaluationRun.read(arguments.drawn), arguments.real, arguments.scenes)
    print(json.dumps({name: value for name, value in figures.items() if name != "shown"}, indent=1))


if __name__ == "__main__":
    main()
