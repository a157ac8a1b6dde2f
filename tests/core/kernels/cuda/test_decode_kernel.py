"""The GPU's kernel of attention over pages against its plain twin: on a GPU, else in Triton's interpreter.

`COMPILE` are all kernels of the text panel, for test_hopper.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.core.kernels.cuda.device import CUDA, DEVICE, EIGHT, draw, ints, normal, seeded

# isort: split
from core.kernels.cuda.decode_kernel import decode, decode_reference, unsupported_reason
from core.kernels.kv_cache import KVCache, TokenBatch


def filled(lengths: list[int], kv_heads: int, d: int, dtype: torch.dtype, kind: Any, context: int) -> KVCache:
    """A cache with sequences of these lengths, in pages that lie in no order; behind them lies what must not matter."""
    each = -(-context // 16)
    cache = KVCache(layers=1, kv_heads=kv_heads, head_dim=d, pages=each * len(lengths), sequences=len(lengths),
                    context=context, dtype=dtype, device=DEVICE, kind=kind, turned=True)  # fmt: skip
    g = draw(0)
    order = torch.randperm(each * len(lengths), generator=g, device=DEVICE).tolist()
    for s, length in enumerate(lengths):
        cache.place(s, order[s * each : (s + 1) * each])
        cache.settle()
        positions = torch.arange(length, dtype=torch.int32, device=DEVICE)
        step = TokenBatch(positions, positions, torch.full_like(positions, s), positions[:0])
        keys, values = (normal(g, length, kv_heads, d).to(dtype) for _ in range(2))
        cache.write(0, keys, values, step)
    return cache


def spoiled(lengths: list[int], kv_heads: int, d: int, kind: str, context: int) -> KVCache:
    """Such a cache in 8 bits, in which scales of what no sequence has reached are NaN."""
    cache = filled(lengths, kv_heads, d, torch.bfloat16, kind, context)
    assert cache.key_scales is not None and cache.value_scales is not None
    for scales in (cache.key_scales, cache.value_scales):
        scales[scales == 1] = torch.nan
    return cache


def exact(
    q: torch.Tensor, cache: KVCache, positions: torch.Tensor, sequences: torch.Tensor, **options: Any
) -> torch.Tensor:
    """What attention over a `spoiled` cache is in 64 bits."""
    keys, values, *scales = cache.layer(0)
    finite = (scale.nan_to_num(1.0) for scale in scales if scale is not None)
    given: Any = (q, keys, values, *finite, cache.table, positions, sequences, q.shape[-1] ** -0.5)
    return decode_reference(*given, **options, dtype=torch.float64)


def check_levels(
    run: Callable[[torch.Tensor, torch.Tensor], object], expected: torch.Tensor, kind: str, slack: float
) -> None:
    """What `run` writes as 8 bits with the inverse scales that it is given."""
    levels = torch.empty(expected.shape, dtype=torch.int8 if kind == "int8" else torch.float8_e4m3fn, device=DEVICE)
    run(torch.full((expected[0].numel(),), 50.0, device=DEVICE), levels)
    top, bound = (127, slack) if kind == "int8" else (448, 0.05 * float(levels.float().abs().max()))
    assert float((levels.double() - (expected * 50).clamp(-top, top)).abs().max()) < bound


def ends(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and sequences of the last token of each."""
    positions = ints(lengths) - 1
    return positions, torch.arange(len(lengths), dtype=torch.int32, device=DEVICE)


# Heads in a group, heads of keys, their width, the kind of pages, a window and a cap of scores: for Hopper's kernels.
PAGED = [
    (4, 8, 128, "int8", 0, 0.0), (4, 2, 128, "fp8", 0, 0.0), (8, 1, 128, "int8", 0, 0.0), (7, 2, 64, "fp8", 0, 0.0),
    (1, 3, 64, "int8", 0, 0.0),
]  # fmt: skip
KINDS = ("int8", "float", "fp8") if CUDA and len(EIGHT) > 1 else ("int8", "float")
HEADS = [(4, 2, 16), (8, 1, 64), (3, 3, 32), (8, 2, 128)]
# In the interpreter, where each program is dear, each kind of heads has one kind of cache.
CASES = [(*heads, kind) for n, heads in enumerate(HEADS) for kind in (KINDS if CUDA else KINDS[1 - n % 2 :: 2])]


@pytest.mark.quick("8-2-128-int8", "4-2-16-float")
@pytest.mark.parametrize(("heads", "kv_heads", "d", "kind"), CASES)
def test_decode(heads: int, kv_heads: int, d: int, kind: str) -> None:
    # In parts of 256: three, or two in the interpreter, but for one kind of heads.
    lengths = [1, 16, 17, 256, 520 if CUDA or kv_heads == 3 else 300]
    dtype = torch.bfloat16 if CUDA else torch.float32
    cache = filled(lengths, kv_heads, d, dtype, kind, lengths[-1] // 256 * 256 + 256)
    g = draw(1)
    q = normal(g, len(lengths), heads, d).to(dtype)
    given = (*cache.layer(0), cache.table, *ends(lengths), d**-0.5)
    found = decode(q, *given)
    wanted = decode_reference(q, *given)
    slack = 2e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found, wanted, rtol=slack, atol=slack)
    # Whatever the most that any row may come to, and whoever is beside it: the same bits.
    assert torch.equal(decode(q, *given, parts=16 if CUDA else 5), found)
    short = ints([3, 0, 2])
    for parts in (1, 4):
        out = torch.zeros_like(q)
        decode(q, *given, parts=parts, index=short, out=out)
        assert torch.equal(out[short.long()], found[short.long()]) and not out[1].any()


@pytest.mark.parametrize(("window", "cap"), [(20, 0.0), (290, 1.5)])
def test_decode_in_a_window(window: int, cap: float) -> None:
    """Windows within a part and over several, of a row alone in its part or with parts behind the window."""
    lengths = [1, 30, 300, 530]
    dtype = torch.bfloat16 if CUDA else torch.float32
    cache = filled(lengths, 2, 16, dtype, "float", 768)
    q = seeded(1, 4, 4, 16).to(dtype)
    given = (*cache.layer(0), cache.table, *ends(lengths), 0.5)
    found = decode(q, *given, window=window, cap=cap)
    wanted = decode_reference(q, *given, window=window, cap=cap)
    slack = 2e-2 if CUDA else 2e-5
    torch.testing.assert_close(found, wanted, rtol=slack, atol=slack)
    for behind in (cache.keys, cache.values):  # pages of the longest row that are behind its window
        behind[:, cache.table[3, : (530 - window) // 16].long()] = 9.0
    last = ints([3])
    again = decode(q, *given, index=last, window=window, cap=cap, out=torch.zeros_like(q))
    assert torch.equal(again[3], found[3])


def test_rows_of_nobody_get_zeros() -> None:
    cache = filled([20], 2, 16, torch.float32, "float", 512)
    q = torch.ones(2, 4, 16, device=DEVICE)
    nobody = torch.full((2,), -1, dtype=torch.int32, device=DEVICE)
    for parts in (1, 2):
        out = torch.full_like(q, torch.nan)
        decode(q, *cache.layer(0), cache.table, nobody, torch.zeros_like(nobody), 0.25, parts=parts, out=out)
        assert not out.any()


COMPILE = """
from core.kernels.cuda import chunk_kernel, decode_kernel, fused_kernels, grouped_kernel, stream_kernel

shapes = ((6144, 4096), (4096, 14336))
for number, (kind, size) in enumerate((("i8", 1), ("fp8e4nv", 1), ("bf16", 2))):
    for other, rows in enumerate((1, 64, 256)):  # each with one of the shapes
        n, k = shapes[(number + other) % 2]
        t = stream_kernel.choose(rows, n, k, size)
        types = {"x": f"*{kind}", "weight": f"*{kind}", "out": "*i32" if kind == "i8" else "*fp32", "rows": "i32"}
        made(stream_kernel._stream, types, dict(N=n, K=k, STEPS=k // t.depth // t.splits, WHOLE=True,
             INT8=kind == "i8", BM=t.rows, BN=t.columns, BK=t.depth, EARLY=0), "wgmma.mma_async",
             num_warps=t.warps, num_stages=t.stages)
        if rows == 64 and kind != "i8":
            continue
        t = stream_kernel.choose(rows, 14336, 4096, size, gated=True)
        types = {"x": f"*{kind}", "weight": f"*{kind}", "out": f"*{kind}", "rows": "i32"}
        types |= {"scale": "*fp32", "inverse": "*fp32"} if size == 1 else {}
        made(stream_kernel._gated, types, dict(N=14336, K=4096, STEPS=4096 // t.depth, WHOLE=True, INT8=kind == "i8",
             BM=t.rows, BN=t.columns, BK=t.depth, GELU=kind == "bf16", EARLY=2),
             "wgmma.mma_async",
             num_warps=t.warps, num_stages=t.stages)
for kind in ("bf16", "i8", "fp8e4nv"):
    types = {"q": "*bf16", "keys": f"*{kind}", "values": f"*{kind}", "table": "*i32", "positions": "*i32",
             "sequences": "*i32", "inverse": "*fp32", "out": "*i8", "scale": "fp32", "table_stride": "i32"}
    types |= {} if kind == "bf16" else {"key_scales": "*fp32", "value_scales": "*fp32"}
    shape = dict(H=32, KV=8, G=4, M=16, D=128, PART=256, PARTS=16, UNIT=128, BLOCK=32, SIZE=16, WINDOW=0, CAP=0.0,
                 EARLY=0)
    more = {"made_parts": "*fp32", "largest": "*fp32", "sums": "*fp32"}
    limits = {"WINDOW": 4096, "CAP": 50.0} if kind == "bf16" else {}
    if kind == "bf16":
        made(decode_kernel._parts, types, shape | {"REACH": 1}, num_warps=2, num_stages=2)
    made(decode_kernel._parts, types | more, shape | limits | {"REACH": 16}, num_warps=2, num_stages=2)
    types = {name: kind for name, kind in types.items() if name != "sequences"} | {"tiles": "*i32"}
    shape = dict(H=32, KV=8, G=4, GROUP=4, M=128, D=128, BLOCK=64, SIZE=16, WINDOW=0, CAP=0.0)
    made(chunk_kernel._chunks, types, shape | limits, "wgmma.mma_async", num_warps=8, num_stages=3)
for kind, assignments, gated in (("i8", 4096, True), ("fp8e4nv", 2, False)):
    t = grouped_kernel.choose(assignments, 8, 4096, 1, gated=gated)
    types = {"x": f"*{kind}", "weight": f"*{kind}", "order": "*i32", "blocks": "*i32", "count": "i32", "scale": "*fp32"}
    types |= {"out": f"*{kind}", "inverse": "*fp32"} if gated else {"out": "*bf16", "weights": "*fp32"}
    made(grouped_kernel._grouped, types, dict(TOP=2, N=4096, K=4096, WHOLE=True, INT8=kind == "i8", GATED=gated,
         GELU=False, BM=t.rows, BN=t.columns, BK=t.depth, EARLY=1), "wgmma.mma_async", num_warps=t.warps,
         num_stages=t.stages)
types = {"x": "*bf16", "router": "*bf16", "inverse": "*fp32", "experts": "*i32", "weights": "*fp32", "levels": "*i8",
         "rows": "i32"}
made(grouped_kernel._route, types, dict(E=128, WIDTH=128, TOP=8, SLOTS=8, C=4096, NORMALIZED=True, BM=16, BK=128,
     EARLY=1), num_warps=4, num_stages=3)
types = {"experts": "*i32", "order": "*i32", "blocks": "*i32", "count": "i32", "places": "i32"}
made(grouped_kernel._sort, types, dict(E=128, WIDTH=256, BM=16, CHUNK=1024, EARLY=1))
types = {"made_parts": "*fp32", "largest": "*fp32", "sums": "*fp32", "positions": "*i32", "out": "*bf16"}
made(decode_kernel._together, types, dict(H=32, D=128, REACH=4, PART=256, PARTS=16, UNIT=128, EARLY=0))
types = {"x": "*bf16", "parts": "*i32", "scale": "*fp32", "sum_out": "*bf16", "weight": "*bf16", "inverse": "*fp32",
         "out": "*i8", "rows": "i32", "eps": "fp32"}
made(fused_kernels._add_norm, types, dict(N=4096, SPLITS=8, BLOCK=4096, EARLY=1), num_warps=16)
types = {"parts": "*i32", "scale": "*fp32", "angles": "*fp32", "positions": "*i32", "sequences": "*i32",
         "table": "*i32", "q": "*bf16", "keys": "*i8", "values": "*i8", "key_scales": "*fp32",
         "value_scales": "*fp32", "rows": "i32", "table_stride": "i32"}
shape = dict(H=32, KV=8, D=128, G=4, GROUP=4, SPLITS=4, SIZE=16, INT8=True, TOP=127.0, EARLY=1,
             LARGEST=1e38)
made(fused_kernels._rotate, types, shape, num_warps=1)
made(fused_kernels._rotate, types | {"q_norm": "*bf16", "k_norm": "*bf16", "eps": "fp32"}, shape, num_warps=1)
made(fused_kernels._gate, {"x": "*bf16", "inverse": "*fp32", "out": "*i8", "rows": "i32"}, dict(N=14336, GELU=True,
     BLOCK=1024))
"""


def test_what_it_is_not_for() -> None:
    def cache(width: int, turned: bool = True) -> KVCache:
        return KVCache(layers=1, kv_heads=1, head_dim=width, pages=1, sequences=1, context=16, turned=turned)

    assert unsupported_reason(cache(48)) == "heads of width 48 are no power of two"
    assert unsupported_reason(cache(64, turned=False)) == "its pages lie as a CPU reads them"
    assert unsupported_reason(cache(64)) is None


@pytest.mark.skipif(not CUDA, reason="the whole engine on a GPU needs one")
def test_greedy_answers_on_a_gpu() -> None:
    """fp32 on the GPU against transformers' generate there."""
    from dataclasses import replace

    from tests.llm import stage

    model = stage.emoji()
    moved = replace(model, network=model.network.to("cuda"), device=torch.device("cuda"))
    given = stage.prompts(model, 30)
    with stage.serving(moved) as (engine, _):
        made = [text.tokens for text in stage.answers(engine, [stage.greedy(p, 24) for p in given])]
    model.network.to("cpu")
    wanted = stage.generated(model, given, 24)
    assert sum(a == b for a, b in zip(made, wanted, strict=True)) >= 29
