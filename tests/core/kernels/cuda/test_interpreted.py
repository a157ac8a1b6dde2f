"""The interpreter in which tests run kernels without a GPU: no processor decides what they find."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.core.kernels.cuda.device import CUDA, INT8, draw, levels, normal

pytestmark = pytest.mark.skipif(CUDA, reason="a GPU runs the kernels itself")
DEPTH = 64


@triton.jit
def _product(x, y, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, INTEGERS: tl.constexpr, LEAKS: tl.constexpr):
    rows, depth, columns = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(x + rows[:, None] * K + depth[None, :])
    b = tl.load(y + depth[:, None] * N + columns[None, :])
    total = tl.dot(a, b, out_dtype=tl.int32) if INTEGERS else tl.dot(a, b, input_precision="ieee")
    if LEAKS:  # a row's last bit depends on the tile's largest value
        total += tl.max(tl.max(total, 1), 0) * 1e-7
    tl.store(out + rows[:, None] * N + columns[None, :], total)


def product(x: Tensor, y: Tensor, *, leaks: bool = False) -> Tensor:
    """Return x [M, K] times y [K, N], as fp32, or as int32 of int8 numbers."""
    integers = x.dtype == INT8
    out = torch.empty(len(x), y.shape[1], dtype=torch.int32 if integers else torch.float32)
    _product[(1,)](x, y, out, len(x), *y.shape, integers, leaks)
    return out


@pytest.mark.parametrize("columns", [16, 32, 128])
def test_a_products_bits_are_those_of_sums_in_order(columns: int) -> None:
    """Rounded after each product and each sum, as numpy does with single numbers on every processor."""
    x, y = normal(draw(1), 64, DEPTH), normal(draw(2), DEPTH, columns)
    total, left, right = np.zeros((64, columns), np.float32), x.numpy(), y.numpy()
    for row in range(64):
        for k in range(DEPTH):
            total[row] += left[row, k] * right[k]
    found = product(x, y)
    assert np.array_equal(found.numpy(), total)
    torch.testing.assert_close(found.double(), x.double() @ y.double(), rtol=1e-4, atol=1e-5)
    for rows in (slice(0, 16), slice(16, 48)):
        assert torch.equal(product(x[rows], y), found[rows])
    for first in range(0, columns, 16):
        assert torch.equal(product(x, y[:, first : first + 16].contiguous()), found[:, first : first + 16])


def test_a_row_that_depends_on_its_companions_is_seen() -> None:
    x, y = normal(draw(3), 64, DEPTH), normal(draw(4), DEPTH, 32)
    x[40] *= 100
    assert not torch.equal(product(x[:16], y, leaks=True), product(x, y, leaks=True)[:16])


def test_sums_of_levels_are_exact() -> None:
    x, y = levels(draw(5), 32, 512), levels(draw(6), 512, 32)
    assert torch.equal(product(x, y).long(), x.long() @ y.long())
