"""All stages learn, and the shipped models keep to their sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints import tiny
from tests.training.world import Trained
from training import draft
from training.run import TrainingRun
from training.shapes import EMOJI

WORDS = 3072  # of emoji-xl


def test_losses_fall(trained: Trained) -> None:
    for stage, key, share in (("lm", "nats", 0.5), ("draft", "loss", 0.8)):
        lines = (trained.run.work / stage / "curve.jsonl").read_text(encoding="utf-8").splitlines()
        assert json.loads(lines[-1])[key] < share * json.loads(lines[0])[key], stage


def test_the_judge_measured_every_line(trained: Trained) -> None:
    figures = trained.figures
    assert set(figures) == {"emoji-lm", "emoji-lm-draft"}
    assert 1 < figures["emoji-lm"]["captions_perplexity"] < 50
    assert 1 <= figures["emoji-lm-draft"]["sampled_accepted_length"] <= EMOJI.draft_block
    assert figures["emoji-lm-draft"]["greedy_accepted_length"] >= 1
    card = (trained.run.models / "emoji-lm" / "README.md").read_text(encoding="utf-8")
    assert "captions perplexity" in card and "Not measured" not in card


def test_the_shipped_shapes_keep_to_their_sizes() -> None:
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        CLIPTextModelWithProjection,
        LlamaConfig,
        LlamaForCausalLM,
    )

    def count(model: Any) -> int:
        return sum(p.numel() for p in model.parameters())

    with torch.device("meta"):
        denoiser = count(UNet2DConditionModel(**tiny.EMOJI.unet()))
        codec = count(AutoencoderKL(**tiny.EMOJI.vae()))
        text = count(CLIPTextModel(CLIPTextConfig(**tiny.EMOJI.text(0, WORDS, 0))))
        text += count(CLIPTextModelWithProjection(CLIPTextConfig(**tiny.EMOJI.text(1, WORDS, 0))))
    # Not empty: tying the embeddings needs real ones.
    target = count(LlamaForCausalLM(LlamaConfig(**EMOJI.llama(EMOJI.lm, EMOJI.lm_vocab, 1, 2, 0))))
    drafter = count(draft.build(TrainingRun(Path(), Path(), Path())))
    assert 15e6 <= denoiser <= 20e6
    assert 2 * (denoiser + codec + text) + 0.6e6 <= 48e6  # tokenizers and configurations take 0.6 MB
    assert 3e6 <= target <= 6e6 and drafter <= target / 3
    assert 2 * (target + drafter) + 0.4e6 <= 16e6
