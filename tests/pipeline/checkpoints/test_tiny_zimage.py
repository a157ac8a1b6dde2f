"""Random-weight Z-Images run in diffusers' own pipeline, follow prompt and seed, and survive being saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.checkpoints import tiny_zimage
from pipeline.checkpoints.tiny_zimage import SHAPES, TINY_Z, ZImageShape


@pytest.fixture(scope="module")
def pipeline() -> Any:
    made = tiny_zimage.make(SHAPES[TINY_Z])
    made.set_progress_bar_config(disable=True)
    return made


def draw(pipeline: Any, prompt: str, seed: int = 3) -> torch.Tensor:
    """[3, 32, 48] in 0..1."""
    found: torch.Tensor = pipeline(
        prompt,
        height=32,
        width=48,
        num_inference_steps=3,
        guidance_scale=0.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    ).images[0]
    return found


def test_prompt_and_seed_are_seen_in_the_picture(pipeline: Any) -> None:
    one = draw(pipeline, "a cat")
    torch.testing.assert_close(one, draw(pipeline, "a cat"), atol=1e-4, rtol=0)
    assert one.std() > 0.1
    assert (one - draw(pipeline, "a dog")).abs().mean() > 1 / 255
    assert (one - draw(pipeline, "a cat", seed=4)).abs().mean() > 0.02


def test_equal_seeds_give_equal_weights(pipeline: Any) -> None:
    again, other = tiny_zimage.parts(SHAPES[TINY_Z]), tiny_zimage.parts(SHAPES[TINY_Z], seed=1)
    for name in ("transformer", "text_encoder", "vae"):
        weights, different = again[name].state_dict(), other[name].state_dict()
        assert all(torch.equal(value, weights[key]) for key, value in getattr(pipeline, name).state_dict().items())
        assert any(not torch.equal(value, weights[key]) for key, value in different.items())


def test_the_byte_tokenizer_reads_any_text_and_knows_the_template() -> None:
    tokenizer = tiny_zimage.byte_tokenizer()
    message = {"role": "user", "content": "a café"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert text == "<|im_start|>user\na café<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode()) - len("<|im_start|>") * 2 - len("<|im_end|>") + 3


def test_levels_must_give_the_factor() -> None:
    with pytest.raises(ValueError, match="2 levels do not give factor 8"):
        ZImageShape(vae_channels=(8, 8)).vae()
