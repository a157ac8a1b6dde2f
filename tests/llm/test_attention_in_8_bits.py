"""Prefill attention in E4M3, as `chunk_kernel` computes it on a GPU: what it costs a trained model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.kernels.cuda.quantize import to_levels
from core.kernels.kv_cache import Kind
from llm import attention
from tests.llm import stage
from tests.llm.test_quantized import TEXTS, perplexity

E4M3 = torch.float8_e4m3fn


def in_8_bits(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, cap: float) -> Tensor:
    """Queries in E4M3 by row, and weights times the values' scales, on keys and values that are in E4M3 already."""
    largest = query.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    levels = to_levels(query * 448 / largest, E4M3).float()
    scores = (levels @ keys.mT * (largest * scale / 448)).masked_fill(~seen, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    units = values.abs().amax(-1)[..., None, :] / 448
    units = torch.where(units > 0, units, 1)
    most = units.amax(-1, keepdim=True)
    scaled = to_levels(weights * (units * 448 / most), E4M3).float() * (most / 448)
    return (scaled @ (values / units.mT)) / weights.sum(-1, keepdim=True)


def test_perplexity_changes_by_less_than_one_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch."""

    def measured(kv: Kind) -> float:
        return perplexity(stage.emoji(), TEXTS[:32], kv=kv, kernels=None)

    exact, cached = measured("float"), measured("fp8")
    monkeypatch.setattr(attention, "_attend", in_8_bits)
    computed = measured("fp8")
    print(f"perplexity: fp32 {exact:.3f}, cache in E4M3 {cached:.3f}, and computed so {computed:.3f}")
    assert computed != cached and abs(computed / exact - 1) < 0.01
