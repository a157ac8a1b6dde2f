"""A reference for prompts of several chunks: transformers' text encoders, chunk by chunk, and diffusers' pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from contract.image import ImageParameters
from tests.pipeline.worlds import stock, stock_options

ROOM = 75  # tokens of a chunk, without its start and end


def words(count: int, start: int = 0) -> str:
    """So many tokens: the tiny tokenizer's are single letters."""
    return " ".join("abcdefghijklmnopqrstuvwxyz"[(start + i) % 26] for i in range(count))


def chunked(tokenizer: Any, text: str, least: int = 1) -> list[list[int]]:
    """Ids of each chunk, padded, at least so many chunks."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    parts = [ids[at : at + ROOM] for at in range(0, max(1, len(ids)), ROOM)]
    parts += [[]] * (least - len(parts))
    pad = tokenizer.pad_token_id
    return [[tokenizer.bos_token_id, *part, tokenizer.eos_token_id, *[pad] * (ROOM - len(part))] for part in parts]


def chunks(name: str, *texts: str) -> int:
    return max(len(chunked(stock(name).tokenizer, text)) for text in texts)


@torch.inference_mode()
def embeddings(name: str, texts: Sequence[str], least: int = 1, skip: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """[C · 77, D] and [P] of a text for each encoder."""
    pipeline, sides = stock(name), []
    for number, text in enumerate(texts):
        tokenizer = (pipeline.tokenizer, pipeline.tokenizer_2)[number]
        encoder = (pipeline.text_encoder, pipeline.text_encoder_2)[number]
        made = [encoder(torch.tensor([ids]), output_hidden_states=True) for ids in chunked(tokenizer, text, least)]
        sides.append(torch.cat([one.hidden_states[-(skip + 2)][0] for one in made]))
        pooled = made[0][0][0]
    return torch.cat(sides, dim=-1), pooled


@torch.inference_mode()
def picture(name: str, wanted: ImageParameters) -> np.ndarray:
    """What diffusers draws of the reference's embeddings, [H, W, 3] in levels."""
    pipeline = stock(name)
    positive = wanted.prompt, wanted.prompt_2 or wanted.prompt
    negative = wanted.negative_prompt or "", wanted.negative_prompt_2 or wanted.negative_prompt or ""
    least = chunks(name, *positive, *negative)
    hidden, pooled = embeddings(name, positive, least, wanted.clip_skip or 0)
    other, other_pooled = embeddings(name, negative, least)
    if wanted.negative_prompt is None and pipeline.config.force_zeros_for_empty_prompt:
        other, other_pooled = torch.zeros_like(hidden), torch.zeros_like(pooled)
    embedded = {
        "prompt": None, "prompt_embeds": hidden[None], "pooled_prompt_embeds": pooled[None], "negative_prompt": None,
        "negative_prompt_embeds": other[None], "negative_pooled_prompt_embeds": other_pooled[None],
    }  # fmt: skip
    return np.asarray(pipeline(**stock_options(wanted) | embedded).images[0]).astype(int)
