"""Evaluates `emoji-xl` on scenes: right subject, count, colour and place, of held-out families and of trained ones.

Two judges: `evaluation.composition`, which matches sprites, and `emoji-clip`, which must prefer the caption to captions
with one thing wrong. Run by `python -m training.judge_scenes`; writes `judge/scenes-NAME.json` and contact sheets.
"""

from __future__ import annotations

import json
import random
from typing import Any

import torch

from evaluation import bootstrap
from evaluation.composition import Checker, Sprite, summary
from training import pictures, sheet
from training.judge_pictures import FeatureExtractor, PictureGenerator
from training.render import Renderer, pack
from training.run import TrainingRun, from_options, parser
from training.scenes import HELD_SHARES, Composer, Prompt
from training.stream import World

_FOILS = 8  # captions with one thing wrong for each prompt


def judge(run: TrainingRun, count: int, steps: int, guidance: float, model: str = "emoji-xl") -> dict[str, Any]:
    """Figures, by kind of family and by whether training saw it; `count` prompts of each.

    Written after each kind, so that a judge that is ended early leaves what it has. Each figure
    is (value, low, high). `drawn_by_renderer` are the same checks of true scenes: the checker's own errors.
    """
    world = World.read(run)
    composer = world.composer
    checker = checker_of(world, run.device)
    painter = PictureGenerator(run, model, steps, guidance)
    renderer = Renderer(world.images, run.device)
    reader = FeatureExtractor(run) if (run.models / "emoji-clip" / "config.json").exists() else None
    figures: dict[str, Any] = {"model": model, "steps": steps, "guidance": guidance, "prompts": count}
    folder = run.folder("judge")
    for kind in HELD_SHARES:
        for seen in (False, True):
            prompts = composer.prompts(kind, count, seen=seen, size=(run.size, run.size))
            made = ((painter.draw([prompt.caption for prompt in prompts]) + 1) / 2).clamp(0, 1)
            true = ((renderer.draw(pack([prompt.scene for prompt in prompts])) + 1) / 2).cpu()
            name = f"{kind}_{'seen' if seen else 'held_out'}"
            figures[name] = _checked(checker, made, prompts)
            figures[f"{name}_drawn_by_renderer"] = _checked(checker, true, prompts)
            if reader is not None:
                figures[name]["clip_prefers_caption"] = _preferred(reader, composer, made, prompts)
                figures[f"{name}_drawn_by_renderer"]["clip_prefers_caption"] = _preferred(
                    reader, composer, true, prompts
                )
            sheet.save(
                folder / f"{model}-{name}.png",
                pictures.to_images(made[:64] * 2 - 1),
                [prompt.caption for prompt in prompts[:64]],
            )
            print(name, json.dumps(figures[name]), flush=True)
            (folder / f"scenes-{model}.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


def checker_of(world: World, device: torch.device | str = "cpu") -> Checker:
    """A checker that knows all subjects of the world."""
    subjects = world.composer.subjects
    return Checker({one.noun: Sprite(world.images[one.row], bool(one.colours)) for one in subjects}, device)


def _checked(checker: Checker, made: torch.Tensor, prompts: list[Prompt]) -> dict[str, Any]:
    return summary([checker.check(picture, prompt.truth) for picture, prompt in zip(made, prompts, strict=True)])


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
    """`python -m training.judge_scenes [--count N] [--steps N] [--guidance G] [--model NAME]`."""
    options = parser(__doc__ or "")
    options.add_argument("--count", type=int, default=150, help="prompts of each kind")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--guidance", type=float, default=4.0)
    options.add_argument("--model", default="emoji-xl")
    found = options.parse_args()
    judge(from_options(found), found.count, found.steps, found.guidance, found.model)


if __name__ == "__main__":
    main()
