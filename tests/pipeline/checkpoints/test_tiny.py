"""The models made in code: equal seeds give equal weights, and stock diffusers reads what is saved."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.checkpoints.tiny import SDXLShape
from pipeline.families.sdxl.parts import tokenizers


def weights(pipeline: Any) -> dict[str, torch.Tensor]:
    modules = ("unet", "vae", "text_encoder", "text_encoder_2")
    return {f"{m}.{name}": value for m in modules for name, value in getattr(pipeline, m).state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def test_equal_seeds_give_equal_weights_and_leave_the_generator_alone() -> None:
    state = torch.random.get_rng_state()
    first = weights(tiny.make(SDXLShape(), seed=3))
    torch.manual_seed(99)
    assert equal(first, weights(tiny.make(SDXLShape(), seed=3)))
    torch.random.set_rng_state(state)
    tiny.make(SDXLShape(), seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_stock_diffusers_loads_the_saved_folder_and_draws(tmp_path: Path) -> None:
    from diffusers import StableDiffusionXLPipeline

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    folder = tiny.save(tmp_path / "m", SDXLShape())
    stock = StableDiffusionXLPipeline.from_pretrained(folder)
    assert equal(weights(stock), weights(tiny.make(SDXLShape())))
    stock.set_progress_bar_config(disable=True)
    assert stock("a fox", num_inference_steps=2, width=32, height=32).images[0].size == (32, 32)
    ours = load(str(folder))
    for tokenizer, own in zip((stock.tokenizer, stock.tokenizer_2), tokenizers(ours), strict=True):
        assert tokenizer("a fox 🦊").input_ids == own("a fox 🦊").input_ids
