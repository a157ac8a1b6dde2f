"""Int8 products of few rows on Hopper: variants fit the multiprocessor, and sums are exact (on a GPU)."""

from __future__ import annotations

from typing import Annotated

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.kernels.cuda import driver, stream
from core.kernels.cuda.stream import scaled_reference
from core.kernels.cuda.stream_kernel import MOST_ROWS, gated_reference, stream_reference
from core.kernels.cuda.stream_source import SHARED_BYTES, StreamVariant, source
from tests.core.kernels.cuda.device import DEVICE, draw, levels, normal, uniform

_PROCESSORS = 132
_REGISTERS = 65_536  # of a multiprocessor
REASON = driver.unsupported_reason(torch.device(DEVICE))
hopper = pytest.mark.skipif(REASON is not None, reason=str(REASON))
SHAPES = ((6144, 4096), (4096, 4096), (4096, 14336), (64, 128), (192, 640))


@given(...)
def test_variants_fit_the_multiprocessor(
    rows: Annotated[int, st.integers(1, MOST_ROWS)], tiles: Annotated[int, st.integers(1, 256)],
    steps: Annotated[int, st.integers(1, 128)], gated: bool,
) -> None:  # fmt: skip
    columns, depth = 128 * tiles, 128 * steps
    variant = stream.choose(rows, columns, depth, _PROCESSORS, gated=gated)
    assert rows <= variant.tokens <= max(8, 2 * rows) and variant.tokens % (8 * variant.consumers) == 0
    assert steps % variant.splits == 0 and columns % (64 * variant.blocks) == 0
    assert variant.stages >= 3 and variant.resident * (variant.shared_bytes + 1024) <= SHARED_BYTES + 1024
    sums = variant.tokens * variant.blocks // variant.consumers // 2  # registers of a thread
    assert sums <= 128 and variant.resident * variant.threads * (sums + 40) <= _REGISTERS
    assert f"#define STAGES {variant.stages}\n" in source(variant)


def test_a_vocabularys_tiles_are_two_products_high_where_they_fit() -> None:
    assert [stream.choose(1, n, 4096, _PROCESSORS).blocks for n in (128_256, 64_128, 32_064, 6144)] == [2, 2, 1, 1]
    assert [stream.choose(n, 4096, 4096, _PROCESSORS).splits for n in (1, 64, 65)] == [4, 4, 2]


def test_other_products_are_refused_by_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "unsupported_reason", lambda device: None)
    weight = torch.zeros(64, 128, dtype=torch.int8)
    for rows, expected in ((0, "rows"), (257, "rows"), (1, None)):
        reason = stream.unsupported_reason(torch.zeros(rows, 128, dtype=torch.int8), weight)
        assert reason is None if expected is None else expected in str(reason)
    x = torch.zeros(2, 128, dtype=torch.int8)
    assert "int8" in str(stream.unsupported_reason(x.float(), weight))
    assert "multiple" in str(stream.unsupported_reason(x, weight, gated=True))
    assert "contiguous" in str(stream.unsupported_reason(torch.zeros(2, 256, dtype=torch.int8)[:, :128], weight))


@hopper
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_sums_are_exact(columns: int, depth: int) -> None:
    g = draw(0)
    weight = levels(g, columns, depth)
    x = levels(g, 256, depth)
    expected = stream_reference(x, weight)[0]
    for rows in (1, 7, 8, 9, 33, 64, 100, 129, 256):
        for early in (False, True):
            assert torch.equal(stream.stream(x[:rows], weight, early=early).sum(0), expected[:rows])
    for splits in (n for n in (2, 4, 7) if depth // 128 % n == 0):
        variant = StreamVariant(8, splits=splits, resident=2, apart=True)
        parts = stream.stream(x[:5], weight, variant=variant, early=True)
        assert len(parts) == splits and torch.equal(parts.sum(0), expected[:5])


@hopper
@pytest.mark.parametrize(("columns", "depth"), [(64, 128), (1088, 1024), (128_256, 4096), (32_064, 4096)])
def test_scaled_products_do_not_depend_on_their_company(columns: int, depth: int) -> None:
    g = draw(2)
    weight = levels(g, columns, depth)
    x = levels(g, 256, depth)
    rows, scale = uniform(g, 256), uniform(g, columns)
    bias = normal(g, columns)
    for added in (None, bias) if columns < 2000 else (None,):
        whole = stream.scaled(x, rows, weight, scale, added, torch.empty(256, columns, device=DEVICE))
        assert torch.equal(whole[::37], scaled_reference(x[::37], rows[::37], weight, scale, added))
        for count in (1, 2, 7, 8, 33, 64, 100, 129, 256):
            out = torch.full((count, columns), torch.nan, device=DEVICE)
            stream.scaled(x[:count], rows, weight, scale, added, out, early=True)
            assert torch.equal(out, whole[:count]), count


@hopper
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_products_do_not_depend_on_their_company(dtype: torch.dtype, gelu: bool) -> None:
    g = draw(1)
    weight = levels(g, 512, 1024)
    x = levels(g, 256, 1024)
    scale = uniform(g, 512) * 1e-5
    bias, inverse = normal(g, 512), torch.full((256,), 20.0, device=DEVICE)
    arguments = (scale, bias, inverse if dtype == torch.int8 else None, dtype)
    whole = stream.gated(x, weight, *arguments, gelu=gelu)
    expected = gated_reference(x, weight, *arguments, gelu=gelu)
    difference = (whole.float() - expected.float()).abs()
    if dtype == torch.int8:
        assert difference.max() <= 1 and (difference > 0).float().mean() <= 0.02
    else:
        torch.testing.assert_close(whole.float(), expected.float(), rtol=2e-2, atol=2e-2)
    for rows in (1, 16, 64, 100):
        assert torch.equal(stream.gated(x[:rows], weight, *arguments, gelu=gelu), whole[:rows])
