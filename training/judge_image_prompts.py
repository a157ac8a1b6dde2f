"""Measures the exported IP-Adapter of emoji-xl: how often an image shows the subject and the colour of its prompt.

Prompts are of one thing each in a colour that training never saw of it. Drawn by the stock pipeline: from nothing
(chance), from the text, from the picture, and from a text with the picture of the next prompt at half its strength,
which is checked for both. Writes `judge/image-prompts.json` and a contact sheet.

    python -m training.judge_image_prompts --data DATA --work WORK --models models --count 100
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from PIL import Image

from evaluation import bootstrap
from evaluation.pixels import Pixels
from training import sheet
from training.ip_adapter import FOLDER, NAME, PLAIN
from training.judge import scene_judge
from training.render import Renderer, images_of
from training.run import TrainingRun, from_options, parser
from training.stock import StockPipeline
from training.stream import World

Draw = Callable[[Sequence[str], Sequence[Image.Image], float], list[Pixels]]
"""Draws images of texts, of image prompts, and of their strength."""

_SHOWN = 8  # prompts on the sheet


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


def judge(run: TrainingRun, count: int, draw: Draw, result: dict[str, Any]) -> dict[str, Any]:
    """Shares by source, with Wilson's intervals, of `count` prompts, kept after each; `result` says how was drawn."""
    world, context = World.read(run), scene_judge(run)
    prompts = world.composer.prompts("colour", count, size=(run.size, run.size))
    prompt_images = images_of(Renderer(world.images, run.device), [prompt.scene for prompt in prompts])
    captions = [prompt.caption for prompt in prompts]
    path = run.folder("judge") / "image-prompts.json"
    figures: dict[str, Any] = {**result, "prompts": len(prompts)}
    rows: list[Image.Image] = prompt_images[:_SHOWN]

    def shares(images: Sequence[Pixels], prompts: Sequence[str]) -> dict[str, bootstrap.Interval]:
        verdicts = [context.verdict(*pair) for pair in zip(images, prompts, strict=True)]
        parts = {"subject": [v.subject for v in verdicts], "subject_in_colour": [v.right for v in verdicts]}
        return {name: bootstrap.share(sum(right), len(right)) for name, right in parts.items()}

    for name, source in SOURCES.items():
        texts = captions if source.captions else [PLAIN] * len(captions)
        images = draw(texts, prompt_images[source.shift :] + prompt_images[: source.shift], source.strength)
        figures[name] = shares(images, captions)
        if source.shift:
            figures[f"{name}_as_the_image"] = shares(images, captions[source.shift :] + captions[: source.shift])
        rows += [Image.fromarray(image) for image in images[:_SHOWN]]
        print(name, json.dumps(figures[name]), flush=True)
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    columns = min(_SHOWN, len(captions))
    titles = captions[:columns] + [name.replace("_", " ") for name in SOURCES for _ in range(columns)]
    sheet.save(path.with_suffix(".png"), rows, titles, columns=columns)
    return figures


def main() -> None:
    """`python -m training.judge_image_prompts [--count N]`."""
    options = parser(__doc__ or "")
    options.add_argument("--count", type=int, default=100, help="prompts")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--guidance", type=float, default=4.0)
    arguments = options.parse_args()
    run = from_options(arguments)
    pipeline = StockPipeline(run, "emoji-xl", arguments.steps, arguments.guidance)
    pipeline.adapt(run, FOLDER, NAME)
    judge(run, arguments.count, pipeline.draw, {"steps": arguments.steps, "guidance_scale": arguments.guidance})


if __name__ == "__main__":
    main()
