"""Prefill attention over 8-bit pages on Hopper: parity with the reference, and independence of company (on a GPU)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.kernels.cuda import chunk_hopper, driver
from core.kernels.cuda.chunk_kernel import chunks, tiles
from core.kernels.cuda.chunk_source import ChunkVariant, source
from core.kernels.cuda.decode_source import SHARED_BYTES
from tests.core.kernels.cuda.device import DEVICE, draw, ints, normal
from tests.core.kernels.cuda.test_decode_kernel import PAGED, check_levels, exact, spoiled

REASON = driver.unsupported_reason(torch.device(DEVICE))
hopper = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def test_variants_fit_the_multiprocessor() -> None:
    for head in (64, 128):
        variant = ChunkVariant(head, 7, 8, int8=False)
        assert variant.shared_bytes <= SHARED_BYTES and "#define SPREAD 8\n" in source(variant)


@hopper
@pytest.mark.parametrize(("group", "kv_heads", "d", "kind", "window", "cap"), [*PAGED, (2, 2, 128, "int8", 300, 30.0)])
def test_chunks(group: int, kv_heads: int, d: int, kind: str, window: int, cap: float) -> None:
    g = draw(2)
    runs = [(40, 200), (33, 33), (7, 1000), (160, 1445), (5, 5), (300, 2048)]  # rows, and tokens up to the last one
    cache = spoiled([end for _, end in runs], kv_heads, d, kind, 2048)
    counted = [(torch.arange(end - rows, end), torch.full((rows,), s)) for s, (rows, end) in enumerate(runs)]
    positions, sequences = (torch.cat(columns).int().to(DEVICE) for columns in zip(*counted, strict=True))
    q = normal(g, len(positions), group * kv_heads, d).bfloat16()
    firsts = [sum(rows for rows, _ in runs[:s]) for s in range(len(runs))]
    layer = (*cache.layer(0), cache.table)

    def run(parts: list[int], out: Tensor, inverse: Tensor | None = None) -> Tensor:
        cut = [*tiles([(firsts[s], runs[s][0], s) for s in parts], group), (0, 0, 0)]
        on_device = ints(cut)
        return chunks(q, *layer, positions, on_device, d**-0.5, out, inverse=inverse, window=window, cap=cap)

    assert chunk_hopper.unsupported_reason(q, layer[0], q) is None
    result = run([*range(len(runs))], torch.full_like(q, torch.nan))
    expected = exact(q, cache, positions, sequences, window=window, cap=cap)
    assert float((result.double() - expected).norm() / expected.norm()) < 4e-3  # bf16 is off by 2e-3
    for parts in ([0], [5, 2], [3, 1, 4]):
        alone = run(parts, torch.zeros_like(q))
        rows = [firsts[s] + i for s in parts for i in range(runs[s][0])]
        assert torch.equal(alone[rows], result[rows])
    check_levels(lambda inverse, out: run([*range(len(runs))], out, inverse), expected, kind, 0.6)
