"""Stage `export`: writes the trained models in the formats of diffusers and transformers, with their cards."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lab.training import (
    cards,
    clip,
    draft,
    latents,
    lm,
    phrases,
    stream,
    tiny_vae,
    tokens,
    unet,
)
from lab.training.run import TrainingRun, from_options, parser
from llm.drafts import dflash
from pipeline import sizes

SHARD = "14MB"


def export_pictures(run: TrainingRun) -> Path:
    """`emoji-xl`, as `StableDiffusionXLPipeline.save_pretrained` lays it out, in float16; with the tiny codec if
    that is trained.
    """
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    parts = unet.load(run)
    pipeline = StableDiffusionXLPipeline(
        vae=latents.load_codec(run).half(),
        text_encoder=parts.text.half(),
        text_encoder_2=parts.text_2.half(),
        tokenizer=tokens.clip_tokenizer(run),
        tokenizer_2=tokens.clip_tokenizer(run, second=True),
        unet=parts.unet.half(),
        scheduler=EulerDiscreteScheduler(**run.picture.sampling()),
        force_zeros_for_empty_prompt=run.picture.force_zeros,
        add_watermarker=False,
    )
    folder = _fresh(run, "emoji-xl")
    pipeline.save_pretrained(folder, max_shard_size=SHARD, safe_serialization=True)
    for name, trained in (("tokenizer", "clip"), ("tokenizer_2", "clip_2")):
        _add_slow_files(run, folder / name, trained)
    with contextlib.suppress(FileNotFoundError):
        tiny_vae.load(run).half().save_pretrained(folder / "vae-tiny")
    sizes.write(folder, stream.buckets(run))
    return folder


def export_clip(run: TrainingRun) -> Path:
    """`emoji-clip`, a `CLIPModel` with its processor, in float16."""
    from transformers import CLIPImageProcessor, CLIPProcessor

    towers = clip.load(run)
    tokenizer = tokens.clip_tokenizer(run, second=True)
    side = {"height": run.size, "width": run.size}
    image = CLIPImageProcessor(
        size=side, crop_size=side, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    folder = _fresh(run, "emoji-clip")
    towers.clip.half().save_pretrained(folder, max_shard_size=SHARD)
    CLIPProcessor(image_processor=image, tokenizer=tokenizer).save_pretrained(folder)
    _add_slow_files(run, folder, "clip_2")
    return folder


def export_lm(run: TrainingRun) -> Path:
    """`emoji-lm`, in float16, with its tokenizer and chat template."""
    model = lm.load(run)
    folder = _fresh(run, "emoji-lm")
    tokenizer = tokens.lm_tokenizer(run)
    model.generation_config.update(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=48,
    )
    model.config.expansion_instruction = phrases.SYSTEM
    model.half().save_pretrained(folder, max_shard_size=SHARD)
    tokenizer.save_pretrained(folder)
    return folder


def export_draft(run: TrainingRun) -> Path:
    """`emoji-lm-draft`, in float16, in the layout of published DFlash checkpoints."""
    model = draft.load(run)
    folder = _fresh(run, "emoji-lm-draft")
    tensors = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    write_weights(folder / "model.safetensors", tensors, {"format": "pt"}, 2**24)
    config = model.config.to_diff_dict() | {
        "architectures": [dflash.ARCHITECTURE], "block_size": run.shapes.draft_block, "dtype": "float16",
        "num_target_layers": run.shapes.lm.layers,
        "dflash_config": {
            "mask_token_id": tokens.lm_tokenizer(run).pad_token_id, "target_layer_ids": list(model.sources),
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder


MODELS: dict[str, Callable[[TrainingRun], Path]] = {
    "emoji-xl": export_pictures,
    "emoji-clip": export_clip,
    "emoji-lm": export_lm,
    "emoji-lm-draft": export_draft,
}


def export(run: TrainingRun, only: list[str] | None = None) -> list[Path]:
    """Export every stage that has been trained (or those named), and write their cards; returns the folders."""
    folders = []
    for name in only or MODELS:
        try:
            folders.append(MODELS[name](run))
        except FileNotFoundError as missing:
            if only:
                raise
            print(f"{name}: not exported, {missing}", flush=True)
    for folder in folders:
        _tidy(folder)
        cards.write(folder, run)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{folder}: {size / 1e6:.1f} MB", flush=True)
    return folders


def write_weights(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str], limit: int) -> None:
    """Write a file of weights with its metadata; raises ValueError for one of more than `limit` bytes."""
    from safetensors.torch import save

    data = save(tensors, metadata)
    if len(data) > limit:
        raise ValueError(f"{path}: has {len(data)} bytes, more than {limit}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def rewrite_cards(run: TrainingRun) -> None:
    """Write the cards of the exported models again, now with what the judge has measured."""
    for name in MODELS:
        if (run.models / name / "README.md").exists():
            cards.write(run.models / name, run)


def _fresh(run: TrainingRun, name: str) -> Path:
    folder = run.models / name
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _add_slow_files(run: TrainingRun, folder: Path, trained: str) -> None:
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(run.work / "tokens" / trained / name, folder / name)


def _tidy(folder: Path) -> None:
    """Removes the trainer's own folder from configurations, and has transformers load float32 unless told otherwise.

    Weights are kept in 16 bits, but a pipeline opened without a type must not mix the two: diffusers loads
    float32.
    """
    for path in folder.rglob("*.json"):
        if path.name.endswith(".index.json") or path.name in ("tokenizer.json", "vocab.json"):
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(config, dict):
            path.write_text(json.dumps(_tidied(config), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tidied(config: dict[str, Any]) -> dict[str, Any]:
    tidied = {key: value for key, value in config.items() if key not in ("_name_or_path", "name_or_path")}
    for key, value in tidied.items():
        if key in ("dtype", "torch_dtype"):
            tidied[key] = "float32"
        elif isinstance(value, dict):
            tidied[key] = _tidied(value)
    return tidied


def main() -> None:
    """`python -m lab.training.export [--only NAME ...] [--cards]`."""
    options: argparse.ArgumentParser = parser(__doc__ or "")
    options.add_argument("--only", nargs="+", choices=tuple(MODELS))
    options.add_argument("--cards", action="store_true", help="write the cards again and nothing else")
    arguments = options.parse_args()
    run = from_options(arguments)
    if arguments.cards:
        rewrite_cards(run)
        return
    with torch.no_grad():
        export(run, arguments.only)


if __name__ == "__main__":
    main()
