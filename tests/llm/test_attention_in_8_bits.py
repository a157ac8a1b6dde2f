"""Prefill attention in E4M3, as `chunk_kernel` computes it on a GPU: what it costs a trained model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from core.kernels.cuda.quantize import to_levels
from core.kernels.kv_cache import Kind, TokenBatch
from llm import attention
from llm.execution import TextExecution
from tests.llm import stage
from tests.llm.test_quantized import TEXTS

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


def perplexity(kv: Kind) -> float:
    """On captions, each read at once, by torch."""
    model = stage.emoji()
    texts = [stage.plain(model, text) for text in TEXTS[:32]]
    execution = TextExecution(model, pages=4 * len(texts), sequences=len(texts), context=64, kv=kv)
    rows = [(s, p) for s, ids in enumerate(texts) for p in range(len(ids) - 1)]
    for s in range(len(texts)):
        execution.cache.place(s, [*range(4 * s, 4 * s + 4)])
    tokens, following = ([texts[s][p + i] for s, p in rows] for i in (0, 1))
    step = TokenBatch.of(tokens, [p for _, p in rows], [s for s, _ in rows], [*range(len(rows))])
    logs = execution(step).log_softmax(-1)
    return math.exp(-float(logs.gather(1, torch.tensor(following)[:, None]).mean()))


def test_perplexity_changes_by_less_than_one_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, cached = perplexity("float"), perplexity("fp8")
    monkeypatch.setattr(attention, "_attend", in_8_bits)
    computed = perplexity("fp8")
    print(f"perplexity: fp32 {exact:.3f}, cache in E4M3 {cached:.3f}, and computed so {computed:.3f}")
    assert computed != cached and abs(computed / exact - 1) < 0.01
