"""Products with 2:4 sparse weights have, on Hopper, the bits of the dense kernels on the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.kernels.cuda.device import CUDA, DEVICE, draw, levels, normal, uniform

# isort: split
from core.kernels.cuda import driver, sparse_gemm, stream_kernel
from core.kernels.cuda.linear import linear_geglu_int8, linear_int8
from core.kernels.cuda.sparse_gemm import SparseTile, SparseWeight, choose
from core.kernels.cuda.sparse_source import ROWS, SparseVariant, source
from core.quant import sparse

BF16, FP16 = torch.bfloat16, torch.float16
hopper = pytest.mark.skipif(
    not CUDA or driver.unsupported_reason(torch.device(DEVICE, 0)) is not None, reason="no Hopper GPU"
)


def operands(rows: int, columns: int, depth: int) -> tuple[Tensor, Tensor, SparseWeight, Tensor]:
    """Tokens, the weight with its zeros, and without, and scales."""
    g = draw(rows + columns + depth)
    x, weight = (levels(g, n, depth)
                 for n in (rows, columns))  # fmt: skip
    weight *= sparse.mask(uniform(g, *weight.shape))
    scale = uniform(g, columns) * depth**-0.5 / 5000
    return x, weight, SparseWeight(*sparse.compress(weight)), scale


@hopper
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 64, 128), (77, 640, 640), (300, 1296, 1280), (513, 512, 4096)]
)
def test_a_product_has_the_dense_products_bits(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, weight, compressed, scale = operands(rows, columns, depth)
    g = draw(1)
    bias, row_scale = normal(g, columns), uniform(g, rows) + 0.5
    residual = normal(g, rows, columns).to(dtype)
    tiles = [None, SparseTile(64, 2)]
    if dtype == BF16:
        tiles += [SparseTile(tokens, cluster) for tokens in (16, 32, 64, 128, 256) for cluster in (1, 2)]
    for tile in tiles:
        for extras in ((), (bias, row_scale, residual)):
            if dtype == FP16 or columns % 32:
                expected = (x.double() @ weight.double().T).float()
                expected = expected * row_scale[:, None] * scale + bias + residual if extras else expected * scale
                actual = sparse_gemm.product(x, compressed, scale, *extras, dtype=dtype, tile=tile)
                assert torch.allclose(actual.float(), expected, rtol=2e-2, atol=2e-2), tile
            else:
                expected = linear_int8(x, weight, scale, *extras, dtype=dtype)
                assert torch.equal(sparse_gemm.product(x, compressed, scale, *extras, dtype=dtype, tile=tile), expected)


@hopper
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 512, 512), (64, 4096, 4096), (256, 1024, 640)])
def test_sums_over_parts_are_exact(rows: int, columns: int, depth: int) -> None:
    x, weight, compressed, _ = operands(rows, columns, depth)
    expected = stream_kernel.stream(x, weight).sum(0)
    for tile in (
        None,
        SparseTile(16),
        SparseTile(32),
        SparseTile(128),
        SparseTile(64, 1, 3),
        SparseTile(256, 2, 4),
        SparseTile(256, 1, 2),
    ):
        assert torch.equal(sparse_gemm.sums(x, compressed, tile=tile).sum(0), expected), tile


@hopper
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(5, 128, 128), (300, 10240, 1280)])
def test_a_gate_has_the_dense_kernels_bits(rows: int, columns: int, depth: int, silu: bool) -> None:
    x, weight, compressed, scale = operands(rows, columns, depth)
    bias, inverse = normal(draw(2), columns), uniform(draw(3), columns // 2) * 30
    expected = linear_geglu_int8(x, weight, scale, bias, inverse, act="silu" if silu else "gelu")
    halves = [torch.cat(part.chunk(2)[::-1]) for part in (compressed.values, compressed.metadata, scale, bias)]
    for tile in (None, *map(SparseTile, (16, 32, 64, 128, 256)), SparseTile(256, 2)):
        actual = sparse_gemm.gated(x, compressed, scale, bias, inverse, silu=silu, tile=tile)
        assert torch.equal(actual, expected), tile
        swapped = SparseWeight(*halves[:2]), *halves[2:]
        assert torch.equal(sparse_gemm.gated(x, *swapped, inverse, silu=silu, gate_first=True, tile=tile), expected)


def test_rows_of_one_thread_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that TMA puts eight apart are neighbouring outputs, or hidden and gate of one."""
    maps: list[tuple[Any, ...]] = []
    monkeypatch.setattr(driver, "tensor_map", lambda part, *form, **options: maps.append(form))
    part = torch.zeros(256, 64, dtype=torch.int8)
    for gated in (False, True):
        sparse_gemm._weight_map(part, 64, 64, gated=gated)
        sizes, strides, box = maps.pop()
        assert box == (64, 8, 2, ROWS // 16) and sizes[0] * sizes[1] * sizes[2] * sizes[3] == part.numel()
        group, half, block = (step // 64 for step in strides)
        for at in range(ROWS):  # a row of the tile, of which a thread has `at` and `at + 8`
            row = at % 8 * group + at // 8 % 2 * half + at // 16 * block
            assert row == (at // 16 * 8 + at % 8 + 128 * (at // 8 % 2) if gated
                           else at // 16 * 16 + at % 8 * 2 + at // 8 % 2)  # fmt: skip


def test_tiles_fit_the_work() -> None:
    assert choose(1, 4096, 32, 132, split=True).splits > 1, "32 tiles do not fill the card"
    assert choose(8192, 28672, 32, 132) == SparseTile(256, 2)
    assert choose(8192, 640, 5, 132).cluster == 1, "five tiles are no whole clusters"
    for variant in (SparseVariant(256, 2), SparseVariant(16, sums=True), SparseVariant(256, 2, gated=True)):
        assert 4 <= variant.stages <= 16 and variant.shared_bytes <= 227 * 1024
        assert f"m64n{variant.tokens}k64.s32.s8.s8" in source(variant)
