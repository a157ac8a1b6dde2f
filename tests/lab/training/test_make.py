"""`make train` from one end to the other, smoke-sized, and what it leaves in the stock classes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lab.training.shapes import SMOKE
from llm.checkpoints.load import load
from llm.drafts.block_drafter import BlockDraft

ROOT = Path(__file__).resolve().parents[3]
KINDS = {"emoji-xl": "F16", "emoji-clip": "F16", "emoji-lm": "F16", "emoji-lm-draft": "F16"}


@pytest.mark.long
def test_make_train_leaves_models_that_the_stock_classes_load(data: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusionXLPipeline
    from transformers import AutoProcessor, CLIPModel

    more = "--shape smoke --size 32 --iterations 1 --batch 2 --held-out 3 --variants 2 --no-judge --threads 1"
    models = tmp_path / "models"
    options = [f"DATA={data}", f"WORK={tmp_path / 'work'}", f"MODELS={models}", f"MORE={more}"]
    # -o: the environment that runs this test is the one to train in, however old its stamp.
    command = ["make", "-o", ".venv/.installed", "train", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, kind in KINDS.items():
        paths = list((models / name).rglob("*.safetensors"))
        assert paths, name
        for path in paths:
            with safe_open(path, framework="pt") as weights:
                assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {kind}, path  # noqa: SIM118
    for path in models.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".md", ".txt", ".jinja"):
            assert str(tmp_path) not in path.read_text(encoding="utf-8"), path.name
    StableDiffusionXLPipeline.from_pretrained(models / "emoji-xl", local_files_only=True)
    clip: Any = CLIPModel.from_pretrained(models / "emoji-clip", dtype=torch.float32, local_files_only=True)
    processor: Any = AutoProcessor.from_pretrained(models / "emoji-clip", local_files_only=True)
    given = processor(text=["a", "b"], images=torch.rand(2, 3, 32, 32), return_tensors="pt", padding=True)
    with torch.no_grad():
        assert bool(clip(**given).logits_per_image.isfinite().all())
    target = load(str(models / "emoji-lm"))
    assert BlockDraft.read(models / "emoji-lm-draft", target).checkpoint.block == SMOKE.draft_block
