"""Paged attention as a transformers attention implementation, so that transformers' model code runs on our KV cache.

Decode rows use the kernel of `decode_kernel` on a GPU; other rows, and CPUs without our kernels, use SDPA over
gathered pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.cuda import decode_kernel
from core.kernels.kv_cache import KVCache, TokenBatch

NAME = "diptych"


@dataclass(frozen=True, eq=False)
class PagedContext:
    """The input of a model's layers beside their hidden states: the cache, and each row's position."""

    cache: KVCache
    step: TokenBatch
    singles: Tensor  # int64: rows that are the only ones of their sequence in this step
    runs: list[tuple[int, int]]  # (first row, rows) of the others

    @classmethod
    def of(cls, cache: KVCache, step: TokenBatch) -> PagedContext:
        sequences = step.sequences.tolist()
        starts = [i for i, s in enumerate(sequences) if i == 0 or sequences[i - 1] != s]
        spans = [(a, b - a) for a, b in zip(starts, [*starts[1:], len(sequences)], strict=True)]
        singles = torch.tensor([first for first, count in spans if count == 1], device=step.tokens.device).long()
        return cls(cache, step, singles, [span for span in spans if span[1] > 1])


def register() -> None:
    """Register it with transformers, as `attn_implementation="diptych"`. Idempotent."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask: visibility follows from positions."""


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, paged: PagedContext, **_: Any
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv_heads, T, d] of a step's tokens, to [1, T, heads, d]."""
    layer = module.layer_idx
    paged.cache.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), paged.step)
    return paged_attention(query[0].transpose(0, 1), paged, layer, scaling)[None], None


def paged_attention(query: Tensor, paged: PagedContext, layer: int, scale: float) -> Tensor:
    """query [T, heads, d] on the pages of its rows' sequences, each up to its own position, to [T, heads, d].

    Query heads that share a key head are stacked as queries of one head, so that keys are read once.
    """
    step, cache = paged.step, paged.cache
    kv_heads = cache.kv_heads
    packed = query.unflatten(1, (kv_heads, -1))  # [T, kv_heads, g, d]
    out = torch.empty_like(packed)
    if query.is_cuda and len(paged.singles) and decode_kernel.unsupported_reason(cache) is None:
        key_scales = None if cache.key_scales is None else cache.key_scales[layer]
        value_scales = None if cache.value_scales is None else cache.value_scales[layer]
        attended = decode_kernel.decode(
            query[paged.singles], cache.keys[layer], cache.values[layer], key_scales, value_scales, cache.table,
            step.positions[paged.singles], step.sequences[paged.singles], scale,
        )  # fmt: skip
        out[paged.singles] = attended.unflatten(1, (kv_heads, -1))
    elif len(paged.singles):
        positions = step.positions[paged.singles]
        keys, values = cache.read(layer, step.sequences[paged.singles], int(positions.max()) + 1)
        seen = torch.arange(keys.shape[2], device=query.device) <= positions[:, None]
        out[paged.singles] = F.scaled_dot_product_attention(
            packed[paged.singles], keys, values, attn_mask=seen[:, None, None], scale=scale
        )
    for first, count in paged.runs:
        rows = slice(first, first + count)
        positions = step.positions[rows]
        keys, values = cache.read(layer, step.sequences[first : first + 1], int(positions[-1]) + 1)
        seen = torch.arange(keys.shape[2], device=query.device) <= positions[:, None]  # [count, L]
        group = packed.shape[2]
        attended = F.scaled_dot_product_attention(
            packed[rows].permute(1, 2, 0, 3).flatten(1, 2)[None],  # [1, kv_heads, g · count, d]
            keys, values, attn_mask=seen.repeat(group, 1), scale=scale,
        )[0]  # fmt: skip
        out[rows] = attended.unflatten(1, (group, count)).permute(2, 0, 1, 3)
    return out.flatten(1, 2)
