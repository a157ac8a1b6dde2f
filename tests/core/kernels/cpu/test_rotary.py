"""Rotary embeddings and QK-norm outside of a cache: against torch in 64 bits and the libraries' own; bits."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from core.kernels.cpu.token_program import TokenProgram
from tests.core.quant.stage import Few, Seed, Several, Watched, check, kernels, normal, threads


def angles_of(seed: int, count: int, d: int) -> Tensor:
    turns = normal(seed, count, d // 2, scale=3)
    return torch.cat([turns.cos(), turns.sin()], dim=1)


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of heads [..., d] in 64 bits."""
    x = x.double()
    return x if weight is None else x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def rotated(x: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """[rows, heads, d] by angles [rows, d], in 64 bits: a complex product."""
    rows, heads, d = x.shape
    turn = torch.complex(*angles.double().chunk(2, dim=1))[:, None]
    if interleaved:
        pairs = torch.view_as_complex(x.reshape(rows, heads, d // 2, 2))
        return torch.view_as_real(pairs * turn).flatten(2)
    made = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
    return torch.cat([made.real, made.imag], dim=-1)


@settings(max_examples=60)
@given(...)
def test_rotate_heads(
    rows: Several, kv_heads: Few, group: Few, d: Literal[16, 48, 128], interleaved: bool,
    norm: bool, table: bool, fused: bool, seed: Seed,
) -> None:  # fmt: skip
    """Slices of a fused projection or tensors of their own, angles for each row or for each position."""
    heads = kv_heads * group
    given_ = normal(seed, rows, (heads + 2 * kv_heads) * d, scale=2)
    qkv = given_.clone()
    q, k = qkv[:, : heads * d], qkv[:, heads * d : (heads + kv_heads) * d]
    if not fused:
        q, k = q.clone(), k.clone()
    positions = torch.randint(0, 12, (rows,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    angles = angles_of(seed + 1, 12 if table else rows, d)
    q_norm, k_norm = (normal(seed + 2, d), normal(seed + 3, d)) if norm else (None, None)
    p = Watched()
    p.rotate_heads(
        q, k, angles, heads=heads, kv_heads=kv_heads, positions=positions if table else None, q_norm=q_norm,
        k_norm=k_norm, eps=1e-5, interleaved=interleaved,
    )  # fmt: skip
    p.run()
    own = angles[positions.long()] if table else angles
    split = given_.view(rows, -1, d)
    for found, heads_of, weight in ((q, split[:, :heads], q_norm), (k, split[:, heads : heads + kv_heads], k_norm)):
        wanted = rotated(normed(heads_of, weight, 1e-5), own, interleaved=interleaved)
        check(found, wanted.flatten(1))
    if fused:
        assert torch.equal(qkv[:, (heads + kv_heads) * d :], given_[:, (heads + kv_heads) * d :])


def test_a_rows_bits_depend_neither_on_its_companions_nor_threads() -> None:
    rows, heads, kv_heads, d = 9, 4, 2, 48
    given_ = normal(0, rows, (heads + 2 * kv_heads) * d)
    angles, q_norm, k_norm = angles_of(1, rows, d), normal(2, d), normal(3, d)

    def run(which: slice) -> Tensor:
        qkv, p = given_[which].clone(), Watched()
        q, k = qkv[:, : heads * d], qkv[:, heads * d : -kv_heads * d]
        p.rotate_heads(q, k, angles[which], heads=heads, kv_heads=kv_heads, q_norm=q_norm, k_norm=k_norm)
        p.run()
        return qkv

    together = run(slice(None))
    for row in range(rows):
        assert torch.equal(run(slice(row, row + 1))[0], together[row])
    with threads(2):
        assert torch.equal(run(slice(None)), together)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q": torch.zeros(5, 40)}, "rotate_heads: 2 heads in 40 channels"),
        ({"q": torch.zeros(5, 33)}, "rotate_heads: 2 heads in 33 channels"),
        ({"k": torch.zeros(4, 32)}, r"k: must be torch.float32 \[5, 32\]"),
        ({"kv_heads": 1}, r"k: must be torch.float32 \[5, 16\]"),
        ({"angles": torch.zeros(4, 16)}, r"angles: must be torch.float32 \[5, 16\]"),
        ({"angles": torch.zeros(9, 8), "positions": torch.zeros(5, dtype=torch.int32)}, r"angles: .* \[9, 16\]"),
        ({"positions": torch.zeros(5, dtype=torch.int64)}, "positions: must be torch.int32"),
        ({"q_norm": torch.zeros(32)}, r"q_norm: must be torch.float32 \[16\]"),
        ({"k_norm": torch.zeros(8)}, r"k_norm: must be torch.float32 \[16\]"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    options = {"q": torch.zeros(5, 32), "k": torch.zeros(5, 32), "angles": torch.zeros(5, 16), "heads": 2, **changes}
    with pytest.raises(ValueError, match=said):
        TokenProgram(kernels()).rotate_heads(**options)
