"""Evaluates `emoji-xl` on scenes: right subject, count, colour and place, of held-out families and of trained ones.

Two judges: `evaluation.composition`, which matches sprites, and `emoji-clip`, which must prefer the caption to captions
with one thing wrong. Writes `judge/scenes-NAME.json` and contact sheets. To judge what ships:

    python -m training.scene_prompts --data DATA --work WORK --count 150 --out scenes.tsv
    diptych evaluate --prompts scenes.tsv --precision int8 --out RUN
    python -m training.judge_scenes --data DATA --work WORK --count 150 --drawn RUN

With `--again`, another run of the same prompts with other seeds, also how much two pictures of one prompt differ.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from evaluation import bootstrap, pairs
from evaluation.composition import Checker, Sprite, Verdict, summary
from evaluation.lpips import ClipLayers
from evaluation.pixels import Pixels
from evaluation.run import EvaluationRun
from training import pictures, sheet
from training.judge_pictures import FeatureExtractor, PictureGenerator
from training.render import Renderer, pack
from training.run import TrainingRun, from_options, parser
from training.scene_prompts import groups, true_pictures
from training.scenes import Composer, Prompt
from training.stream import World

Draw = Callable[[str, list[Prompt]], torch.Tensor]
"""Pictures [N, 3, H, W] in 0..1 of a group's name and its prompts."""

_SETTINGS = ("precision", "steps", "guidance_scale")  # of a run, that its figures name
_FOILS = 8  # captions with one thing wrong for each prompt


class Known(NamedTuple):
    """What a judge reads once: the world, and a checker that knows its subjects."""

    world: World
    checker: Checker

    @classmethod
    def read(cls, run: TrainingRun) -> Known:
        """Of the run's data."""
        world = World.read(run)
        return cls(world, checker_of(world, run.device))


def judge(
    run: TrainingRun,
    count: int,
    draw: Draw,
    about: dict[str, Any],
    again: Draw | None = None,
    *,
    truth: bool = True,
    unseen: bool = False,
    known: Known | None = None,
) -> dict[str, Any]:
    """Figures by group, of `count` prompts each; `about` says what was drawn how.

    Written after each group, so that a judge that is ended early leaves what it has. Each figure is (value, low, high),
    and `right` tells of each prompt whether all is. With `truth`, `drawn_by_renderer` are the same checks of true
    scenes: the checker's own errors. `again` draws the same prompts from other seeds: of its pairs, both right,
    `two_seeds` tells how much the pictures of one prompt differ, beside `two_true`, the same of two true scenes of each
    prompt. `known` serves several runs.
    """
    world, checker = known or Known.read(run)
    composer = world.composer
    renderer = Renderer(world.images, run.device)
    clip = run.models / "emoji-clip"
    reader = FeatureExtractor(run) if (clip / "config.json").exists() else None
    layers = ClipLayers(clip, device=run.device) if again is not None and reader is not None else None
    figures: dict[str, Any] = {**about, "prompts": count}
    folder = run.folder("judge")

    def looked_at(made: torch.Tensor, prompts: list[Prompt]) -> tuple[list[Verdict], dict[str, Any]]:
        verdicts = _checked(checker, made, prompts)
        preferred = {} if reader is None else {"clip_prefers_caption": _preferred(reader, composer, made, prompts)}
        return verdicts, {**summary(verdicts), **preferred}

    for name, prompts in groups(run, composer, count, unseen=unseen).items():
        made = draw(name, prompts)
        verdicts, figures[name] = looked_at(made, prompts)
        figures[name]["right"] = [verdict.right for verdict in verdicts]
        if truth:
            true = ((renderer.draw(pack([prompt.scene for prompt in prompts])) + 1) / 2).cpu()
            figures[f"{name}_drawn_by_renderer"] = looked_at(true, prompts)[1]
        if again is not None:
            other = again(name, prompts)
            right = [v.right and w.right for v, w in zip(verdicts, _checked(checker, other, prompts), strict=True)]
            figures[name]["two_seeds"] = _difference(made, other, right, layers)
            both = true_pictures(composer, renderer, name, prompts, (run.size, run.size))
            own, others = ((both[half] + 1) / 2 for half in ("own", "other"))
            figures[name]["two_true"] = _difference(own, others, [True] * len(prompts), layers)
        sheet.save(
            folder / f"{about['name']}-{name}.png",
            pictures.to_images(made[:64] * 2 - 1),
            [prompt.caption for prompt in prompts[:64]],
        )
        print(name, json.dumps(figures[name]), flush=True)
        (folder / f"scenes-{about['name']}.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


def drawn_by(found: EvaluationRun) -> Draw:
    """Takes the pictures from a finished run of `diptych evaluate` on a table of `training.scene_prompts`."""
    files = {caption.id: file for caption, file in zip(found.captions, found.files(), strict=True)}

    def draw(name: str, prompts: list[Prompt]) -> torch.Tensor:
        made = []
        for number in range(len(prompts)):
            with Image.open(files[f"{name}-{number}"]) as image:
                made.append(torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1) / 255)
        return torch.stack(made)

    return draw


def drawn_by_pipeline(run: TrainingRun, model: str, steps: int, guidance: float) -> Draw:
    """Draws with the stock pipeline over an exported folder."""
    painter = PictureGenerator(run, model, steps, guidance)

    def draw(_: str, prompts: list[Prompt]) -> torch.Tensor:
        return ((painter.draw([prompt.caption for prompt in prompts]) + 1) / 2).clamp(0, 1)

    return draw


def _difference(
    made: torch.Tensor, other: torch.Tensor, right: list[bool], layers: ClipLayers | None
) -> dict[str, Any]:
    """How far two pictures of a prompt are from one another where both are right: means, PSNR in dB."""
    ours, theirs = (_levels(each, right) for each in (made, other))
    if not ours:
        return {"pairs": 0}
    counts = bootstrap.resamples(len(ours))

    def told(values: list[float] | torch.Tensor) -> bootstrap.Interval:
        return bootstrap.mean(torch.as_tensor(values), counts).interval

    decibels = [pairs.psnr(a, b) for a, b in zip(ours, theirs, strict=True)]
    found = {
        "pairs": len(ours),
        "psnr_db": told(decibels),
        "share_under_30_db": bootstrap.share(sum(db < 30 for db in decibels), len(ours)),
        "ssim": told([pairs.ssim(a, b) for a, b in zip(ours, theirs, strict=True)]),
    }
    return found if layers is None else found | {layers.figure: told(layers.between(ours, theirs))}


def _levels(made: torch.Tensor, which: list[bool]) -> list[Pixels]:
    """Those of [N, 3, H, W] in 0..1 that `which` says, as uint8 [H, W, 3]."""
    images = pictures.to_images(made * 2 - 1)
    return [np.asarray(image) for image, wanted in zip(images, which, strict=True) if wanted]


def checker_of(world: World, device: torch.device | str = "cpu") -> Checker:
    """A checker that knows all subjects of the world."""
    subjects = world.composer.subjects
    return Checker({one.noun: Sprite(world.images[one.row], bool(one.colours)) for one in subjects}, device)


def _checked(checker: Checker, made: torch.Tensor, prompts: list[Prompt]) -> list[Verdict]:
    return [checker.check(picture, prompt.truth) for picture, prompt in zip(made, prompts, strict=True)]


def _preferred(
    reader: FeatureExtractor, composer: Composer, made: torch.Tensor, prompts: list[Prompt]
) -> bootstrap.Interval:
    """The share of pictures to which their caption is nearer than every caption with one thing wrong."""
    seen = reader.see(made * 2 - 1)
    right = []
    for number, prompt in enumerate(prompts):
        captions = [prompt.caption, *composer.wrong_captions(prompt.truth, _FOILS, random.Random(number))]
        scores = reader.read(captions) @ seen[number]
        right.append(bool(scores.argmax() == 0))
    return bootstrap.share(sum(right), len(right))


def main() -> None:
    """`python -m training.judge_scenes [--count N] [--drawn RUN… [--again RUN] | --model NAME]`."""
    options = parser(__doc__ or "")
    options.add_argument("--count", type=int, default=150, help="prompts of each kind")
    options.add_argument("--unseen", action="store_true", help="only prompts of families that training never saw")
    options.add_argument(
        "--drawn",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="judge what `diptych evaluate` drew of them, in several ways",
    )
    options.add_argument(
        "--again", type=Path, metavar="RUN", help="the first of other seeds, to tell how pictures differ"
    )
    options.add_argument("--model", default="emoji-xl", help="without --drawn: draw with this model's stock pipeline")
    options.add_argument(
        "--no-truth", action="store_true", help="leave out the checks of true scenes, half of the work"
    )
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--guidance", type=float, default=4.0)
    found = options.parse_args()
    run, how = from_options(found), {"truth": not found.no_truth, "unseen": found.unseen}
    if not found.drawn:
        about = {"name": found.model, "steps": found.steps, "guidance_scale": found.guidance}
        judge(run, found.count, drawn_by_pipeline(run, found.model, found.steps, found.guidance), about, **how)
        return
    known = Known.read(run)
    for number, folder in enumerate(found.drawn):
        own = EvaluationRun.read(folder)
        about = {"name": own.name, **{key: own.settings[key] for key in _SETTINGS}, "pictures": own.digest()}
        again = drawn_by(EvaluationRun.read(found.again)) if found.again and number == 0 else None
        judge(run, found.count, drawn_by(own), about, again, known=known, **how)


if __name__ == "__main__":
    main()
