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
from llm.families import family

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


def cacheless(network: Any) -> str:
    """transformers' own attention for whole texts: SDPA, or eager where that lacks what the model does (Gemma 2).

    transformers 5.17 says that SDPA has Gemma 2's caps, and leaves them out.
    """
    capped = getattr(network.config, "attn_logit_softcapping", None) is not None
    return "sdpa" if network._supports_sdpa and not capped else "eager"


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask: visibility follows from positions."""


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    scaling: float,
    paged: PagedContext,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv_heads, T, d] of a step's tokens, to [1, T, heads, d]."""
    layer = module.layer_idx
    paged.cache.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), paged.step)
    if getattr(module, "tempered", False):
        query = (query * family.temperatures(module, paged.step.positions)[:, None]).to(query.dtype)
    chunk = family.chunk(module.config, layer)
    out = paged_attention(query[0].transpose(0, 1), paged, layer, scaling, sliding_window or 0, softcap or 0.0, chunk)
    return out[None], None


def paged_attention(
    query: Tensor, paged: PagedContext, layer: int, scale: float, window: int = 0, cap: float = 0.0, chunk: int = 0
) -> Tensor:
    """query [T, heads, d] on the pages of its rows' sequences, each up to its own position, to [T, heads, d].

    Query heads that share a key head are stacked as queries of one head, so that keys are read once. `window` and `cap`
    as in `core.ops.ops.TokenOps.attend_paged`; `chunk` as in `family.chunk`.
    """
    step, cache = paged.step, paged.cache
    kv_heads = cache.kv_heads
    packed = query.unflatten(1, (kv_heads, -1))  # [T, kv_heads, g, d]
    out = torch.empty_like(packed)
    if query.is_cuda and not chunk and len(paged.singles) and decode_kernel.unsupported_reason(cache) is None:
        key_scales = None if cache.key_scales is None else cache.key_scales[layer]
        value_scales = None if cache.value_scales is None else cache.value_scales[layer]
        attended = decode_kernel.decode(
            query[paged.singles], cache.keys[layer], cache.values[layer], key_scales, value_scales, cache.table,
            step.positions[paged.singles], step.sequences[paged.singles], scale, window=window, cap=cap,
        )  # fmt: skip
        out[paged.singles] = attended.unflatten(1, (kv_heads, -1))
    elif len(paged.singles):
        positions = step.positions[paged.singles]
        keys, values = cache.read(layer, step.sequences[paged.singles], positions + 1)
        seen = _seen(keys, positions, window, chunk)
        out[paged.singles] = _attend(packed[paged.singles], keys, values, seen[:, None, None], scale, cap)
    for first, count in paged.runs:
        rows = slice(first, first + count)
        positions = step.positions[rows]
        keys, values = cache.read(layer, step.sequences[first : first + 1], positions[-1:] + 1)
        group = packed.shape[2]
        stacked = packed[rows].permute(1, 2, 0, 3).flatten(1, 2)[None]  # [1, kv_heads, g · count, d]
        seen = _seen(keys, positions, window, chunk).repeat(group, 1)
        attended = _attend(stacked, keys, values, seen, scale, cap)[0]
        out[rows] = attended.unflatten(1, (group, count)).permute(2, 0, 1, 3)
    return out.flatten(1, 2)


def _seen(keys: Tensor, positions: Tensor, window: int, chunk: int) -> Tensor:
    """Which of L keys [..., L, d] rows at these positions [T] attend to: bool [T, L]."""
    places = torch.arange(keys.shape[2], device=positions.device)
    seen = places <= positions[:, None]
    if chunk:
        seen &= places >= (positions // chunk * chunk)[:, None]
    return seen & (places > positions[:, None] - window) if window else seen


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, cap: float) -> Tensor:
    """SDPA; with `cap`, which that does not have, step by step.

    Keys that are not finite make NaN of the rows that see them, and of no others: SDPA adds its mask to the scores.
    """
    strange = ~keys.isfinite().all(-1)[..., None, :]
    keys = keys.masked_fill(strange.mT, 0)
    if cap:
        scores = cap * torch.tanh(query @ keys.mT * scale / cap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32)
        out = weights.to(query.dtype) @ values
    else:
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scale)
    return out.masked_fill((seen & strange).any(-1, keepdim=True), torch.nan)
