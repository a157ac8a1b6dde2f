"""Norm and rotation of heads against their plain twin, diffusers' Z-Image and transformers' Qwen3."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.core.kernels.cuda.device import CUDA, DEVICE, DTYPE, seeded

# isort: split
from core.kernels.cuda.rotary import rotate_heads, rotate_heads_reference
from tests.core.quant.stage import Few, Seed, Several

SLACK = 2e-2 if CUDA else 2e-5


def turns(seed: int, rows: int, d: int) -> Tensor:
    angle = 10 * seeded(seed, rows, d // 2)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


@settings(max_examples=15)
@given(...)
def test_rotate_heads(
    rows: Several, heads: Literal[1, 3, 20], kv_heads: Few,
    d: Literal[16, 24, 128], interleaved: bool, normed: bool, placed: bool, seed: Seed,
) -> None:  # fmt: skip
    x = (3 * seeded(seed, rows, (heads + 2 * kv_heads) * d + 32)).to(DTYPE)
    before, columns = x.clone(), (heads + kv_heads) * d
    positions = torch.arange(rows, dtype=torch.int32, device=DEVICE).flip(0) * 2 if placed else None
    angles = turns(seed, 2 * rows if placed else rows, d)
    given = {
        "norms": (1 + 0.3 * seeded(seed + 1, 2, d)).to(DTYPE) if normed else None,
        "eps": 1e-5,
        "positions": positions,
    }
    wanted = rotate_heads_reference(x, angles, heads, kv_heads, **given, interleaved=interleaved)
    apart = torch.full((rows, columns + 8), 7.0, dtype=DTYPE, device=DEVICE)
    found = rotate_heads(x, angles, heads, kv_heads, **given, interleaved=interleaved, out=apart)
    assert found is apart and torch.equal(x, before) and (apart[:, columns:] == 7).all()
    torch.testing.assert_close(apart[:, :columns], wanted, rtol=SLACK, atol=SLACK)
    assert rotate_heads(x, angles, heads, kv_heads, **given, interleaved=interleaved) is x
    assert torch.equal(x[:, :columns], apart[:, :columns]) and torch.equal(x[:, columns:], before[:, columns:])


def test_shapes_that_disagree_are_refused() -> None:
    x, angles = torch.zeros(4, 6 * 16, device=DEVICE), turns(0, 4, 16)
    for rows, heads, some in ((4, 6, angles), (4, 3, angles[:3]), (3, 3, angles)):
        with pytest.raises(ValueError, match=r"rows|heads"):
            rotate_heads(x[:rows], some, heads, 2)
    with pytest.raises(ValueError, match="norms"):
        rotate_heads(x, angles, 3, 2, norms=torch.ones(16, device=DEVICE))


COMPILE = """
from core.kernels.cuda.rotary import _rotate_heads

counts = dict.fromkeys(["stride", "out_stride", "angles_stride"], "i32")
types = {"x": "*bf16", "norms": "*bf16", "angles": "*fp32", "out": "*bf16", "eps": "fp32"}
for interleaved in (False, True):
    shape = dict(H=30, KV=30, D=128, INTERLEAVED=interleaved, HEADS=16, PAIRS=64)
    made(_rotate_heads, types | counts, shape, num_warps=4)
    made(_rotate_heads, types | counts | {"positions": "*i32"}, shape, num_warps=4)
"""
