"""The embedded models as they are shipped: standard formats, sizes, and pictures that are what was asked for."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.image import ImageParameters
from core.batching.runner import Lane
from llm.drafts.block_drafter import BlockDraft
from llm.checkpoints.load import load as load_text
from pipeline.checkpoints.load import load
from pipeline.checkpoints.tiny_zimage import STEPS
from tests.pipeline.worlds import Crank, Watching, apart, levels

MODELS = Path(__file__).resolve().parents[2] / "models"
ASKED = (
    "pizza", "red heart on a blue background", "cat face", "thumbs up: dark skin tone", "rocket on a navy background",
    "rose",
)  # fmt: skip
# Stock diffusers hands torch tensors to numpy in a way that numpy 2 complains about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


@functools.cache
def drawn() -> dict[str, Any]:
    """The asked pictures, all in one mixed batch of the engine's own runner."""
    runner = Watching(load(str(MODELS / "emoji-xl")), lane=Lane("embedded"))
    crank = Crank(runner)
    for seed, prompt in enumerate(ASKED):
        crank.submit(prompt, ImageParameters(prompt, seed, 128, 128, steps=8 + seed, guidance_scale=4.0))
        crank.turn()
    return crank.pictures()


@functools.cache
def drawn_by_emoji_z() -> dict[str, np.ndarray]:
    """The asked pictures [128, 128, 3] in levels, by diffusers' own pipeline."""
    from diffusers import ZImagePipeline

    pipeline = ZImagePipeline.from_pretrained(MODELS / "emoji-z", local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    generator = [torch.Generator().manual_seed(seed) for seed in range(len(ASKED))]
    options: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": 0.0, "generator": generator}
    images = pipeline(list(ASKED), height=128, width=128, **options).images
    return {prompt: np.asarray(image).astype(int) for prompt, image in zip(ASKED, images, strict=True)}


def shown(name: str) -> dict[str, np.ndarray]:
    return drawn_by_emoji_z() if name == "emoji-z" else {prompt: levels(drawn()[prompt]) for prompt in ASKED}


def test_files_are_small_and_complete() -> None:
    sizes = {path: path.stat().st_size for path in MODELS.rglob("*") if path.is_file()}
    assert max(sizes.values()) <= 15e6
    for name, most in (
        ("emoji-xl", 48e6), ("emoji-xl-turbo", 21e6), ("emoji-z", 24e6), ("emoji-clip", 48e6), ("emoji-lm", 12e6),
        ("emoji-lm-draft", 4e6),
    ):  # fmt: skip
        assert sum(size for path, size in sizes.items() if name in path.parts) <= most, name
        card = (MODELS / name / "README.md").read_text()
        assert "Not measured" not in card and "## Limits" in card


def test_the_stock_pipeline_loads_it_and_draws_the_same_picture() -> None:
    from diffusers import StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline.from_pretrained(MODELS / "emoji-xl")
    pipeline.set_progress_bar_config(disable=True)
    assert 15e6 <= sum(p.numel() for p in pipeline.unet.parameters()) <= 20e6
    prompt = ASKED[1]
    image = pipeline(
        prompt, num_inference_steps=9, guidance_scale=4.0, generator=torch.Generator().manual_seed(1)
    ).images[0]
    assert apart(drawn()[prompt], np.asarray(image).astype(int)) <= 1


@pytest.mark.quick("emoji-xl")
@pytest.mark.parametrize("name", ["emoji-xl", "emoji-z"])
def test_emoji_clip_finds_the_caption_of_each_picture(name: str) -> None:
    from transformers import CLIPModel, CLIPProcessor

    model = CLIPModel.from_pretrained(MODELS / "emoji-clip").eval()
    processor = CLIPProcessor.from_pretrained(MODELS / "emoji-clip")
    with torch.inference_mode():
        inputs = processor(
            text=list(ASKED),
            images=[picture.astype(np.uint8) for picture in shown(name).values()],
            return_tensors="pt",
            padding="max_length",
        )
        best = model(**inputs).logits_per_image.argmax(1)
    assert best.tolist() == list(range(len(ASKED)))


@pytest.mark.parametrize("name", ["emoji-xl", "emoji-z"])
def test_backgrounds_are_of_the_colour_that_was_named(name: str) -> None:
    corner = {prompt: picture[:6, :6].mean(axis=(0, 1)) for prompt, picture in shown(name).items()}
    assert np.abs(corner["pizza"] - 255).max() < 12, "without a background named it is white"
    red, green, blue = corner["red heart on a blue background"]
    assert blue > 150 and blue > red + 80 and blue > green + 80
    navy = corner["rocket on a navy background"]
    assert navy[2] > navy[0] + 30 and navy.max() < 140


def test_emoji_lm_expands_a_prompt_and_its_draft_fits_it() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = MODELS / "emoji-lm"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    config = json.loads((folder / "config.json").read_text())
    assert config["num_key_value_heads"] < model.config.num_attention_heads
    chat = [{"role": "user", "content": "an emoji of cry sad"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 30}
    with torch.inference_mode():
        said = model.generate(ids, **options)[0, ids.shape[1] :]
    answer = tokenizer.decode(said, skip_special_tokens=True)
    assert any(name in answer for name in ("crying", "tears")), "what has both keywords"
    assert answer.endswith("background")
    assert BlockDraft.read(MODELS / "emoji-lm-draft", load_text(str(folder))).features == (2, 4, 5)
