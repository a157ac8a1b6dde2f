"""Evaluates the exported IP-Adapter of emoji-xl: how often a drawn picture shows the subject and colour of its prompt.

Prompts are of colours that training never saw of their subjects, one thing each; `evaluation.composition` checks, which
does not read emoji-clip. Drawn by the stock pipeline: from nothing (chance), from the text, from the picture, and from
a text with the picture of another one at half its strength, which is checked for both; requests need a prompt, and one
without a text says "a picture". Writes `judge/image-prompts.json` and a contact sheet: image prompts, and what each way
makes of them.

    python -m training.judge_image_prompts --data DATA --work WORK --models models --count 100
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evaluation import bootstrap
from evaluation.composition import Checker
from pipeline.ip_adapter_file import ENCODER
from training import pictures, sheet
from training.ip_adapter import FOLDER, NAME, PLAIN
from training.judge_pictures import SEED, PictureGenerator
from training.judge_scenes import Known
from training.render import Renderer, pack
from training.run import TrainingRun, from_options, parser
from training.scenes import Prompt

Draw = Callable[[list[str], Tensor, float], Tensor]
"""Pictures [N, 3, H, W] in 0..1 of texts, image prompts [N, 3, H, W] in -1..1, and their strength."""

_SHOWN = 8  # prompts on the sheet
HALF = 0.5


class Way(NamedTuple):
    """How pictures are drawn: whether from captions, from which image prompt (so many further on), and how strongly."""

    captions: bool
    shift: int = 0
    strength: float = 0.0


WAYS = {
    "nothing": Way(False),
    "text": Way(True),
    "image": Way(False, strength=1.0),
    "text_and_other_image": Way(True, shift=1, strength=HALF),
}


class ImagePrompted:
    """The stock pipeline with the exported adapter and its encoder."""

    def __init__(self, run: TrainingRun, steps: int, guidance: float) -> None:
        from transformers import CLIPImageProcessor

        folder = run.models / FOLDER
        self._painter = PictureGenerator(run, "emoji-xl", steps, guidance)
        self._pipeline: Any = self._painter.pipeline
        self._pipeline.register_modules(feature_extractor=CLIPImageProcessor.from_pretrained(folder / ENCODER))
        self._pipeline.load_ip_adapter(
            str(folder), subfolder="", weight_name=f"{NAME}.safetensors", image_encoder_folder=ENCODER
        )
        # As given: the pipeline repeats embeddings for all prompts, by which each would see all pictures.
        self._pipeline.prepare_ip_adapter_image_embeds = lambda image, embeds, *_: embeds

    def draw(self, texts: list[str], shown: Tensor, strength: float) -> Tensor:
        """Pictures [B, 3, H, W] in 0..1 of texts and image prompts [B, 3, H, W] in -1..1, each from its own seed."""
        painter, found = self._painter, []
        self._pipeline.set_ip_adapter_scale(strength)
        for start in range(0, len(texts), painter.chunk):
            own = slice(start, start + painter.chunk)
            images = pictures.to_images(shown[own])
            seen = self._pipeline.encode_image(images, self._pipeline.device, 1)
            made = self._pipeline(
                prompt=texts[own],
                ip_adapter_image_embeds=[torch.cat(seen[::-1])[:, None]],
                height=painter.side,
                width=painter.side,
                num_inference_steps=painter.steps,
                guidance_scale=painter.guidance,
                generator=[torch.Generator("cpu").manual_seed(SEED + start + n) for n in range(len(images))],
                output_type="pt",
            ).images
            found.append(made.float().cpu())
        return torch.cat(found).clamp(0, 1)


def judge(
    run: TrainingRun,
    count: int,
    draw: Draw,
    about: dict[str, Any],
    ways: Sequence[str] = tuple(WAYS),
) -> dict[str, Any]:
    """Shares by way, with Wilson's intervals, of `count` prompts, kept after each; `about` says how was drawn."""
    known = Known.read(run)
    composer = known.world.composer
    prompts = composer.prompts("colour", count, size=(run.size, run.size))
    shown = Renderer(known.world.images, run.device).draw(pack([prompt.scene for prompt in prompts])).cpu()
    path = run.folder("judge") / "image-prompts.json"
    figures: dict[str, Any] = {**about, "prompts": count}
    rows = [shown[:_SHOWN]]
    for name in ways:
        way = WAYS[name]
        texts = [prompt.caption if way.captions else PLAIN for prompt in prompts]
        made = draw(texts, shown.roll(-way.shift, 0), way.strength)
        figures[name] = _shares(known.checker, made, prompts)
        if way.shift:
            further = prompts[way.shift :] + prompts[: way.shift]
            figures[f"{name}_as_the_image"] = _shares(known.checker, made, further)
        rows.append(made[:_SHOWN] * 2 - 1)
        print(name, json.dumps(figures[name]), flush=True)
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    across = len(rows[0])
    titles = [prompt.caption for prompt in prompts[:across]]
    titles += [name.replace("_", " ") for name in ways for _ in range(across)]
    sheet.save(path.with_suffix(".png"), pictures.to_images(torch.cat(rows)), titles, columns=across)
    return figures


def _shares(checker: Checker, made: Tensor, prompts: list[Prompt]) -> dict[str, bootstrap.Interval]:
    """Which share has the subject, and which the subject in the colour."""
    found = [checker.check(picture, prompt.truth) for picture, prompt in zip(made, prompts, strict=True)]
    return {
        "subject": bootstrap.share(sum(verdict.subject for verdict in found), len(found)),
        "subject_in_colour": bootstrap.share(sum(verdict.right for verdict in found), len(found)),
    }


def main() -> None:
    """`python -m training.judge_image_prompts [--count N] [--ways WAY…]`."""
    options = parser(__doc__ or "")
    options.add_argument("--count", type=int, default=100, help="prompts")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--guidance", type=float, default=4.0)
    options.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=tuple(WAYS))
    found = options.parse_args()
    run, about = from_options(found), {"steps": found.steps, "guidance_scale": found.guidance}
    judge(run, found.count, ImagePrompted(run, found.steps, found.guidance).draw, about, ways=found.ways)


if __name__ == "__main__":
    main()
