"""Writes the model cards: what a model is, its training data, its measured quality, its limits.

Every figure comes from the curves' or the judge's files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.run import TrainingRun

DATA = """\
Pictures: Noto Emoji, Copyright Google, Apache License 2.0. Names and keywords: Unicode CLDR, Copyright
Unicode, Inc., Unicode License v3 (Unicode-DFS-2016)."""
_COCO = """\
General wording: 5,000 captions of COCO 2014 (CC BY 4.0, COCO Consortium; the list is MLCommons', Apache
License 2.0); every twentieth is held out."""

ABOUT: dict[str, dict[str, Any]] = {
    "emoji-xl": {
        "tags": "[text-to-image, stable-diffusion-xl, emoji]",
        "library": "diffusers",
        "what": """\
A complete, small Stable Diffusion XL that draws emoji: two tokenizers, two CLIP text towers, a
`text_time`-conditioned UNet whose transformer depth rises towards the bottom, an autoencoder with factor 8, and
SDXL's Euler scheduler. It loads with `StableDiffusionXLPipeline.from_pretrained`. Captions are CLDR names,
alone or with keywords, which may end with "on a COLOUR background" and otherwise stand on white; and scenes of
about 500 subjects, one to four of them: counts up to five ("three red apples"), eight hue words, places ("a cat
left of a dog"), backgrounds and gradients, stickers. A scene whose caption names no background has any. 20
steps and a guidance of 3 to 5 suit it.""",
        "stages": ("vae", "clip", "unet", "tiny_vae"),
        "limits": """\
Words outside emoji's names and keywords and the captions of scenes are guesses. Five of a thing often come out
as six, letters and faces are rough, and families of small figures are its weakest subjects. It was trained on
pictures of 128 and 192 pixels, 64 pixels and rectangles between; captions end at 77 tokens.""",
    },
    "emoji-xl-turbo": {
        "tags": "[text-to-image, stable-diffusion-xl, lcm, emoji]",
        "library": "diffusers",
        "what": """\
A student of emoji-xl that draws emoji and scenes of them in one to four steps without guidance, by a smaller UNet
that predicts v and the sampler of latent consistency models. Tokenizers and autoencoder are emoji-xl's; the text
towers are those that emoji-xl had when the student was distilled. It loads with
`StableDiffusionXLPipeline.from_pretrained`; call it with `num_inference_steps=4, guidance_scale=1.0`.""",
        "stages": ("turbo",),
        "limits": """\
It learned from what emoji-xl draws, with its mistakes, and is softer. It knows no guidance scale, and negative
prompts do nothing.""",
    },
    "emoji-z": {
        "tags": "[text-to-image, z-image, flow-matching, emoji]",
        "library": "diffusers",
        "what": """\
A complete, small Z-Image that draws emoji as Z-Image-Turbo does, in 8 steps without guidance: a single-stream
diffusion transformer, a Qwen3 text encoder with its ChatML tokenizer, an autoencoder with factor 8 and 16 latent
channels, and the flow-matching Euler scheduler. It loads with `ZImagePipeline.from_pretrained`; call it with
`height=128, width=128, num_inference_steps=8, guidance_scale=0.0`. Captions are CLDR names, alone or with
keywords, and may end with "on a COLOUR background"; without one the background is white.""",
        "stages": ("zimage_vae", "zimage"),
        "limits": """\
It knows some 3,200 emoji by heart and little else; words outside their names and keywords are guesses. It
knows no counts, no colours of objects and no relations between them. It was trained at one size, without guidance,
at eight steps' noise levels above all, and on captions of at most 64 tokens, chat template included.""",
    },
    "emoji-clip": {
        "tags": "[clip, emoji]",
        "library": "transformers",
        "what": """\
A small `CLIPModel` trained on the scenes and emoji that emoji-xl learns, and against captions with one thing
wrong: it scores how well a picture fits a caption, and its image features stand in for Inception's where those
are not at hand. Like emoji-xl it saw none of the held-out families (`training/scenes.py`).""",
        "stages": ("clip",),
        "limits": "Its scores compare emoji with emoji captions; on photographs they mean nothing.",
    },
    "emoji-lm": {
        "tags": "[text-generation, llama, emoji]",
        "library": "transformers",
        "what": """\
A small Llama with grouped-query attention and a chat template, trained to expand a short prompt, for one emoji
or for a scene of several things, into a caption in the picture model's language, and on COCO captions for general
wording. It saw no scene of the held-out families (`training/scenes.py`).""",
        "stages": ("lm",),
        "limits": """\
It writes captions, and loses one of three or four things now and then. It cannot converse, reason or be relied on
for facts.""",
    },
    "emoji-lm-draft": {
        "tags": "[text-generation, llama, speculative-decoding]",
        "library": "transformers",
        "what": """\
The draft for `emoji-lm` in speculative decoding: same vocabulary, trained on the target's distributions.""",
        "stages": ("draft",),
        "limits": "Of use beside `emoji-lm` only.",
    },
}


_WAY = ("precision", "steps", "guidance_scale")


def write(folder: Path, run: TrainingRun) -> None:
    """Writes `README.md` into an exported model's folder; figures come from `judge/figures.json` where it exists."""
    about = ABOUT[folder.name]
    figures = _figures(run).get(folder.name, {})
    data = DATA + (f"\n{_COCO}" if folder.name.startswith("emoji-lm") else "")
    lines = [
        "---",
        "license: apache-2.0",
        f"library_name: {about['library']}",
        f"tags: {about['tags']}",
        "---",
        f"# {folder.name}",
        "",
        about["what"],
        "",
        "## Parameters",
        "",
        *_parameters(folder),
        "",
        "## Data",
        "",
        data,
        "",
        "## Training",
        "",
        *(trained(stage, run) for stage in about["stages"]),
        "",
        f"Side of the pictures: {run.size} px. Seed {run.seed}. Code: `training/`.",
        "",
        "## Measured",
        "",
        f"By `{_judge(folder.name, figures)}` when the model was made; no commit is recorded.",
        "",
        *(_table(figures) or _composition(run, folder.name) or ["Not measured yet: `python -m training.judge`."]),
        "",
        "## Limits",
        "",
        about["limits"],
    ]
    if folder.name in ("emoji-xl", "emoji-clip") and run.size < 128:
        lines += [
            "",
            f"Interim: trained at {run.size} px on a CPU, for a fraction of the time that the plan allots it.",
        ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _parameters(folder: Path) -> list[str]:
    from safetensors import safe_open

    found: dict[str, int] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        part = path.parent.relative_to(folder).as_posix()
        with safe_open(path, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118 - safe_open is no mapping
                shape = weights.get_slice(key).get_shape()
                count = 1
                for side in shape:
                    count *= side
                found[part] = found.get(part, 0) + count
    name = {".": "model"}
    return [
        "| part | parameters |",
        "|---|---|",
        *(f"| {name.get(p, p)} | {n:,} |" for p, n in found.items()),
    ]


def trained(stage: str, run: TrainingRun) -> str:
    """A line of a list: how long a stage was trained, and its last loss."""
    path = run.work / stage / "curve.jsonl"
    last = path.read_text(encoding="utf-8").splitlines()[-1:] if path.exists() else []
    if not last:
        return f"- `{stage}`: not trained"
    end = json.loads(last[0])
    begun = ", from weights exported before" if (run.work / "start" / f"{stage}.pt").exists() else ""
    length = f"{end['iteration']:,} iterations in {end['minutes']:.0f} minutes"
    return f"- `{stage}`: {length}{begun}, last loss {end['smooth']:.4g}"


def _judge(name: str, figures: dict[str, Any]) -> str:
    scenes = name in ("emoji-xl", "emoji-clip") and not figures
    return "python -m training.judge_scenes" if scenes else f"python -m training.judge --only {name}"


def _composition(run: TrainingRun, name: str) -> list[str]:
    """Shares in per cent, with intervals, of what `training.judge_scenes` found right, by group."""
    path = run.work / "judge" / "scenes-emoji-xl.json"
    if not path.exists() or name not in ("emoji-xl", "emoji-clip"):
        return []
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    columns = ("subject", "colour", "count", "place", "all") if name == "emoji-xl" else ("clip_prefers_caption",)
    groups = {key: value for key, value in found.items() if isinstance(value, dict)}
    head = ["prompts", *(column.replace("_", " ") for column in columns)]
    rows = [[key.replace("_", " "), *(share(value.get(column)) for column in columns)] for key, value in groups.items()]
    table = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return [f"{found['prompts']} prompts of each kind{_way(found)}, % right (95% interval):", "", *table]


def _way(figures: dict[str, Any]) -> str:
    said = [f"{key.replace('_', ' ')} {figures[key]}" for key in _WAY if key in figures]
    return f", drawn with {', '.join(said)}" if said else ""


def share(found: list[float] | None) -> str:
    """A share and its interval in per cent; nothing where none was measured."""
    return "" if found is None else f"{found[0]:.1%} ({found[1]:.1%} to {found[2]:.1%})".replace("%", "")


def _figures(run: TrainingRun) -> dict[str, Any]:
    path = run.work / "judge" / "figures.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def _table(figures: dict[str, Any]) -> list[str]:
    if not figures:
        return []
    rows = [f"| {key.replace('_', ' ')} | {_show(value)} |" for key, value in figures.items()]
    return ["| figure | value |", "|---|---|", *rows]


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
