"""Stage `judge`: measures the exported models, by stock diffusers and transformers; writes `judge/figures.json`.

Images are checked by `evaluation.scenes`: emoji-xl's and its student's of scenes of families that training saw or never
saw; those of emoji-xl with its IP-Adapter of one thing each in a colour that training never
saw of it. Texts: see `judge_text`. Uses only the exported folders and the data.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from evaluation import bootstrap
from evaluation.clip import Clip
from evaluation.pixels import Pixels
from evaluation.scenes.judge import SceneJudge
from training import judge_text, sheet
from training.ip_adapter import FOLDER, NAME, PLAIN
from training.render import Renderer, images_of
from training.run import TrainingRun, from_options, parser
from training.scene_prompts import groups
from training.stock import StockPipeline
from training.stream import World

TURBO_STEPS = 4
_SHOWN, _SHOWN_PROMPTS = 64, 8

Draw = Callable[[Sequence[str]], Sequence[Any]]
"""Draws images, uint8 [H, W, 3], of texts."""
DrawLike = Callable[[Sequence[str], Sequence[Image.Image], float], list[Pixels]]
"""Draws images of texts, of image prompts, and of their strength."""


class Source(NamedTuple):
    """A source of images: captions or the plain text, and which image prompt (so many further) how strongly."""

    captions: bool
    shift: int = 0
    strength: float = 0.0


SOURCES = {
    "nothing": Source(False),
    "text": Source(True),
    "image": Source(False, strength=1.0),
    "text_and_other_image": Source(True, shift=1, strength=0.5),
}
"""By name; images of the last are checked against the text and the image prompt."""


@dataclasses.dataclass(frozen=True)
class SampleSizes:
    """The sizes of the samples; less is a quick look. `steps` and `guidance` are emoji-xl's."""

    prompts: int = 150
    expansions: int = 200
    steps: int = 20
    guidance: float = 4.0


def judge(run: TrainingRun, sizes: SampleSizes, only: list[str] | None = None) -> dict[str, Any]:
    """Measure every exported model that is there (or those named); returns and keeps the figures by model.

    Figures of models that are not measured now stay as they were.
    """
    path = run.folder("judge") / "figures.json"
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, measure in MODELS.items():
        if (only and name not in only) or not (run.models / name / "README.md").exists():
            continue
        figures[name] = measure(run, sizes)
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(name, json.dumps(figures[name]), flush=True)
    return figures


def scene_judge(run: TrainingRun) -> SceneJudge:
    """The judge of the run's data, with the exported emoji-clip if there is one."""
    folder = run.models / "emoji-clip"
    clip = Clip(folder, device=run.device) if (folder / "config.json").exists() else None
    return SceneJudge(run.data, clip, device=run.device)


def judge_images(
    prompts: Mapping[str, Mapping[str, str]], draw: Draw, scorer: SceneJudge, folder: Path
) -> dict[str, Any]:
    """Shares by group with 95% intervals; `prompts` has texts to draw and the captions that they are judged by.

    A contact sheet of each group goes into `folder`.
    """
    figures: dict[str, Any] = {}
    for name, group in prompts.items():
        if group:
            images = draw([*group])
            figures[name] = scorer.figures(images, [*group.values()])
            del figures[name]["right"]
            sheet.save(folder / f"{name}.png", [Image.fromarray(image) for image in images[:_SHOWN]], [*group][:_SHOWN])
    return figures


def _scenes(run: TrainingRun, sizes: SampleSizes, name: str, steps: int, guidance: float) -> dict[str, Any]:
    every = groups(run, World.read(run).composer, sizes.prompts)
    prompts = {kind: {prompt.caption: prompt.caption for prompt in group} for kind, group in every.items()}
    draw = StockPipeline(run, name, steps, guidance).draw
    figures = judge_images(prompts, draw, scene_judge(run), run.folder("judge") / name)
    return {"prompts": sizes.prompts, "steps": steps, "guidance_scale": guidance, **figures}


def judge_image_prompts(run: TrainingRun, count: int, draw: DrawLike) -> dict[str, dict[str, bootstrap.Interval]]:
    """Shares by source of images that show the subject, and it in its colour, with Wilson's intervals, of `count`
    prompts. A contact sheet goes into the judge's folder.
    """
    world, scorer = World.read(run), scene_judge(run)
    prompts = world.composer.prompts("colour", count, size=(run.size, run.size))
    prompt_images = images_of(Renderer(world.images, run.device), [prompt.scene for prompt in prompts])
    texts = [prompt.caption for prompt in prompts]
    figures: dict[str, dict[str, bootstrap.Interval]] = {}
    rows: list[Image.Image] = prompt_images[:_SHOWN_PROMPTS]

    def shares(images: Sequence[Pixels], prompts: Sequence[str]) -> dict[str, bootstrap.Interval]:
        verdicts = [scorer.verdict(*pair) for pair in zip(images, prompts, strict=True)]
        parts = {"subject": [v.subject for v in verdicts], "subject_in_colour": [v.right for v in verdicts]}
        return {name: bootstrap.share(sum(right), len(right)) for name, right in parts.items()}

    for name, source in SOURCES.items():
        shifted = prompt_images[source.shift :] + prompt_images[: source.shift]
        images = draw(texts if source.captions else [PLAIN] * len(texts), shifted, source.strength)
        figures[name] = shares(images, texts)
        if source.shift:
            figures[f"{name}_as_the_image"] = shares(images, texts[source.shift :] + texts[: source.shift])
        rows += [Image.fromarray(image) for image in images[:_SHOWN_PROMPTS]]
    columns = min(_SHOWN_PROMPTS, len(texts))
    titles = texts[:columns] + [name.replace("_", " ") for name in SOURCES for _ in range(columns)]
    sheet.save(run.folder("judge") / "image-prompts.png", rows, titles, columns=columns)
    return figures


def _image_prompts(run: TrainingRun, sizes: SampleSizes) -> dict[str, Any]:
    pipeline = StockPipeline(run, "emoji-xl", sizes.steps, sizes.guidance)
    pipeline.adapt(run, FOLDER, NAME)
    figures = judge_image_prompts(run, sizes.prompts, pipeline.draw)
    return {"prompts": sizes.prompts, "steps": sizes.steps, "guidance_scale": sizes.guidance, **figures}


MODELS: dict[str, Callable[[TrainingRun, SampleSizes], dict[str, Any]]] = {
    "emoji-xl": lambda run, sizes: _scenes(run, sizes, "emoji-xl", sizes.steps, sizes.guidance),
    "emoji-xl-turbo": lambda run, sizes: _scenes(run, sizes, "emoji-xl-turbo", TURBO_STEPS, 1.0),
    FOLDER: _image_prompts,
    "emoji-lm": lambda run, sizes: judge_text.judge_lm(run, sizes.expansions),
    "emoji-lm-draft": lambda run, sizes: judge_text.judge_draft(run, sizes.expansions),
}


def main() -> None:
    """`python -m training.judge [--prompts N] [--steps N] [--guidance G] [--only NAME ...]`."""
    options: argparse.ArgumentParser = parser(__doc__ or "")
    fields = dataclasses.fields(SampleSizes)
    for field in fields:
        options.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options.add_argument("--only", nargs="+", choices=tuple(MODELS))
    arguments = options.parse_args()
    sizes = SampleSizes(**{field.name: getattr(arguments, field.name) for field in fields})
    judge(from_options(arguments), sizes, arguments.only)


if __name__ == "__main__":
    main()
