"""Attention by torch over a paged cache: what a row does not see does not reach it."""

from __future__ import annotations

import pytest
import torch

from core.kernels.kv_cache import KVCache, TokenBatch
from llm.backends.attention import PagedContext, paged_attention
from tests.core.quant.stage import normal

ROWS, HEADS, KV_HEADS, WIDTH = 5, 4, 2, 16


@pytest.mark.parametrize("cap", [0.0, 4.0])
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_key_that_is_not_finite_reaches_those_that_see_it_alone(cap: float, window: int, value: float) -> None:
    """One of the first head of keys, at position 2 of a run of rows; a row of another sequence is beside them."""
    positions = torch.tensor([*range(ROWS), 0], dtype=torch.int32)
    sequences = torch.tensor([*[0] * ROWS, 1], dtype=torch.int32)
    step = TokenBatch(positions, positions, sequences, positions[:0])
    query = normal(1, ROWS + 1, HEADS, WIDTH)
    results = []
    for key in (0.5, value):
        cache = KVCache(layers=1, pages=3, kv_heads=KV_HEADS, head_dim=WIDTH, sequences=2, context=16)
        cache.place(0, [1])
        cache.place(1, [2])
        keys, values = normal(2, ROWS + 1, KV_HEADS, WIDTH), normal(3, ROWS + 1, KV_HEADS, WIDTH)
        keys[2, 0, 3] = key
        cache.write(0, keys, values, step)
        results.append(paged_attention(query, PagedContext.of(cache, step), 0, WIDTH**-0.5, window, cap))
    expected, actual = (result.view(ROWS + 1, KV_HEADS, -1) for result in results)
    sees = torch.zeros(ROWS + 1, KV_HEADS, dtype=torch.bool)
    sees[2 : min(ROWS, 2 + (window or ROWS)), 0] = True
    assert actual[sees].isnan().all()
    torch.testing.assert_close(actual[~sees], expected[~sees])
