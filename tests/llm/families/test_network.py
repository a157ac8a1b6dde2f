"""The decoder as a walk on CPU kernels: rows have the same bits in any step. test_load.py has its parity."""

from __future__ import annotations

import pytest
import torch

from core.kernels.kv_cache import Kind
from llm.backends.select import select
from llm.checkpoints.load import load
from llm.families import tiny
from tests.llm import stage

TEXTS = [[1, *range(40, 75)], [1, 9, 9, 30], [1, *range(100, 119)]]


@pytest.mark.parametrize("kv", ["float", "int8"])
def test_qwen3s_rows_keep_their_bits_in_any_step(kv: Kind) -> None:
    model, logits = load(tiny.QWEN3_TINY), []
    for cuts in ([20, 1, 7], [36, 4, 20]):
        execution = select(model, kernels=stage.kernels(), kv=kv, pages=9, sequences=3, context=48)
        for s in range(3):
            execution.cache.place(s, [3 * s, 3 * s + 2, 3 * s + 1])
        logits.append(stage.read(execution, TEXTS, cuts))
    assert all(map(torch.equal, *logits))
