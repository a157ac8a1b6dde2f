"""Stage `export`: writes the trained models in the formats of diffusers and transformers, with their cards."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llm import dflash
from training import cards, draft, lm, phrases, tokens
from training.run import TrainingRun, from_options, parser

SHARD = "14MB"


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
    """`python -m training.export [--only NAME ...] [--cards]`."""
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
