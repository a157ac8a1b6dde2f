"""Decode attention over 8-bit pages on Hopper: variants fit the multiprocessor, and results are right (on a GPU)."""

from __future__ import annotations

import pytest
import torch

from core.kernels.cuda import decode_hopper, driver
from core.kernels.cuda.decode_kernel import decode, decode_reference
from core.kernels.cuda.decode_source import SHARED_BYTES, DecodeVariant, source
from tests.core.kernels.cuda.device import DEVICE, draw, ints, normal
from tests.core.kernels.cuda.test_decode_kernel import PAGED, check_levels, ends, exact, filled, spoiled

REASON = driver.unsupported_reason(torch.device(DEVICE))
hopper = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 5, 8])
@pytest.mark.parametrize(("warps", "resident"), [(4, 1), (4, 2), (8, 1)])
def test_variants_fit_the_multiprocessor(head: int, group: int, warps: int, resident: int) -> None:
    variant = DecodeVariant(head, group, warps=warps, resident=resident)
    assert resident * (variant.shared_bytes + 1024) <= SHARED_BYTES + 1024 and variant.stages >= warps
    assert f"#define STAGES {variant.stages}\n" in source(variant, 16, 128)


def test_what_it_is_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "unsupported_reason", lambda device: None)
    keys = torch.zeros(1, 2, 16, 64, dtype=torch.int8)
    for heads, width, dtype, expected in (
        (8, 64, torch.bfloat16, None), (18, 64, torch.bfloat16, "too many"), (8, 32, torch.bfloat16, "width"),
        (8, 64, torch.float32, "queries"),
    ):  # fmt: skip
        q = torch.zeros(3, heads, width, dtype=dtype)
        reason = decode_hopper.unsupported_reason(q, keys, q)
        assert reason is None if expected is None else expected in str(reason)
    q = torch.zeros(3, 8, 64, dtype=torch.bfloat16)
    assert "8 bits" in str(decode_hopper.unsupported_reason(q, keys.bfloat16(), q))


@hopper
@pytest.mark.parametrize(
    ("group", "kv_heads", "d", "kind", "window", "cap"),
    [*PAGED, (2, 2, 256, "int8", 300, 30.0), (8, 1, 256, "int8", 0, 0.0), (3, 2, 128, "int8", 20, 0.0)],
)
def test_decode(group: int, kv_heads: int, d: int, kind: str, window: int, cap: float) -> None:
    """Against the reference, and bit for bit as alone, in other company and on a grid of another reach."""
    g = draw(2)
    lengths = [1, 16, 17, 256, 300, 5000, 513, 1500, 40]
    cache = spoiled(lengths, kv_heads, d, kind, 5120)
    q = normal(g, len(lengths), group * kv_heads, d).bfloat16()
    positions, sequences = ends(lengths)
    given = (*cache.layer(0), cache.table, positions, sequences, d**-0.5)
    result = decode(q, *given, window=window, cap=cap, out=q.half())  # finer than the rounding of bf16
    expected = exact(q, cache, positions, sequences, window=window, cap=cap)
    assert float((result.double() - expected).norm() / expected.norm()) < 2e-3
    assert decode_hopper.unsupported_reason(q, given[0], q) is None
    check_levels(
        lambda inverse, out: decode(q, *given, window=window, cap=cap, inverse=inverse, out=out), expected, kind, 0.55
    )
    for rows, parts in (([5], 16), ([4, -1, 0], 4), ([8, 3, 2, 1, 0], 1), ([7, 6, 5, 7], 16)):
        index = ints(rows)
        again = torch.zeros_like(result)
        for early in (0, 1):
            decode(q, *given, window=window, cap=cap, parts=parts, index=index, out=again, early=early)
        real = [row for row in rows if row >= 0]
        assert torch.equal(again[real], result[real]) and not again[[r for r in range(9) if r not in rows]].any()


@hopper
@pytest.mark.parametrize("rows", [1, 40, 256])
def test_many_rows(rows: int) -> None:
    """More parts than blocks, some rows of nobody, and a graph whose kernels start early."""
    g = draw(3)
    lengths = torch.randint(1, 1200, (rows,), generator=g, device=DEVICE).tolist()
    cache = filled(lengths, 8, 128, torch.bfloat16, "int8", 1280)
    q = normal(g, rows, 32, 128).bfloat16()
    positions, sequences = ends(lengths)
    positions[3::7] = -1
    given = (*cache.layer(0), cache.table, positions, sequences, 128**-0.5)
    result = torch.full_like(q, torch.nan)
    decode(q, *given, parts=16, out=result)
    real = [row for row in range(rows) if positions[row] >= 0]
    assert not result[3::7].any()
    expected = decode_reference(q[real], *given[:5], positions[real], sequences[real], 128**-0.5, dtype=torch.float64)
    assert float((result[real].double() - expected).norm() / expected.norm()) < 4e-3
    again = [torch.full_like(q, torch.nan) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in again:
            decode(q, *given, parts=16, out=out, early=1)
    graph.replay()
    assert all(torch.equal(out, result) for out in again)
