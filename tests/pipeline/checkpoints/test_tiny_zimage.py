"""Random-weight Z-Images: equal seeds give equal weights, and the tokenizer knows the template."""

from __future__ import annotations

import pytest
import torch

from pipeline.checkpoints import tiny_zimage
from pipeline.checkpoints.tiny_zimage import SHAPES, TINY_Z, ZImageShape


def test_equal_seeds_give_equal_weights() -> None:
    pipeline = tiny_zimage.make(SHAPES[TINY_Z])
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
