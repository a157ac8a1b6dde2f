"""Measures the text kernels alone, at the shapes of Llama-3.1-8B: correctness, speed, tiles, programmatic launch.

Called by `benchmarks.h200.text`. Weights are in several copies, so that no cache helps.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.h200.timing import milliseconds, sustained, table
from core.kernels.cuda import decode_kernel
from core.kernels.cuda.decode_kernel import decode, decode_reference, reach
from core.kernels.cuda.launching import EAGER, LATE
from core.kernels.cuda.linear import linear_int8
from core.kernels.cuda.stream_kernel import StreamTile, choose, gated, gated_reference, stream, stream_reference
from core.kernels.kv_cache import Kind, KVCache, TokenBatch

SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
_AWAY = 300e6  # bytes, several times the L2


def drawn(kind: str, *shape: int) -> Tensor:
    dtype = TYPES[kind]
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device="cuda")
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)


def check(_: str) -> dict[str, Any]:
    """Largest errors against references in higher precision, relative to the largest value, on poisoned outputs."""
    found: dict[str, Any] = {}
    for kind in TYPES:
        for name, (columns, depth) in (("qkv", (6144, 4096)), ("down", (4096, 14336)), ("odd", (4096 + 40, 1000))):
            for rows in (1, 64, 256):
                x, weight = drawn(kind, rows, depth), drawn(kind, columns, depth)
                made, wanted = stream(x, weight).sum(0).double(), stream_reference(x, weight)[0].double()
                found[f"stream {kind} {name} {rows}"] = (
                    f"{((made - wanted).abs().max() / wanted.abs().max()).item():.1e}"
                )
        for rows in (1, 64, 256):
            x, weight = drawn(kind, rows, 4096), drawn(kind, 28672, 4096)
            eight = kind != "bf16"
            scale = torch.full((28672,), 3e-6 if kind == "int8" else 0.02, device="cuda") if eight else None
            inverse = torch.full((14336,), 20.0, device="cuda") if eight else None
            if not eight:
                weight = weight * 0.02
            made = gated(x, weight, scale, None, inverse, TYPES[kind]).float()
            wanted = gated_reference(x, weight, scale, None, inverse, TYPES[kind]).float()
            error = (made - wanted).norm() / wanted.norm()
            found[f"gated {kind} {rows}"] = f"{error.item():.1e}"
    kinds: tuple[Kind, ...] = ("float", "int8", "fp8")
    for cached in kinds:
        cache = KVCache(layers=1, kv_heads=8, head_dim=128, pages=8 * 96, sequences=8, context=1536,
                        dtype=torch.bfloat16, device="cuda", kind=cached)  # fmt: skip
        order = torch.randperm(8 * 96).tolist()
        for s in range(8):
            cache.place(s, order[s * 96 : (s + 1) * 96])
            cache.settle()
            every = torch.arange(1536, dtype=torch.int32, device="cuda")
            keys, values = (torch.randn(1536, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            cache.write(0, keys, values, TokenBatch(every, every, torch.full_like(every, s), every[:0]))
        positions = torch.tensor([0, 15, 100, 255, 256, 700, 1023, 1535], dtype=torch.int32, device="cuda")
        sequences = torch.arange(8, dtype=torch.int32, device="cuda")
        q = torch.randn(8, 32, 128, device="cuda", dtype=torch.bfloat16)
        given = (q, *cache.layer(0), cache.table, positions, sequences, 128**-0.5)
        out = torch.full_like(q, torch.nan)
        made, wanted = decode(*given, out=out).float(), decode_reference(*given).float()
        found[f"decode {cached}"] = f"{((made - wanted).norm() / wanted.norm()).item():.1e}"
    worst = max(found, key=lambda name: float(found[name]) if found[name] != "nan" else math.inf)
    return {"worst": f"{worst}: {found[worst]}", **found}


def products(_: str) -> dict[str, Any]:
    """µs and GB/s of each product at each number of rows, compared with the kernel for many rows and cuBLAS in bf16."""
    found: dict[str, Any] = {}
    lines = []
    for (name, (columns, depth)), kind in itertools.product(SHAPES.items(), TYPES):
        if (name == "head") != (kind == "bf16"):
            continue
        weights = _copies(kind, columns, depth)
        for rows in (1, 16, 64, 128, 256):
            x = drawn(kind, rows, depth)
            ours = _ms(x, weights, gate_up=name == "gate_up")
            other = _other_ms(x, weights) if rows >= 64 else math.nan
            rate = weights[0].nbytes / ours / 1e6
            work = 2 * rows * columns * depth / ours / 1e9
            found[f"{name} {kind} {rows}"] = {
                "us": round(ours * 1e3, 1),
                "other_us": round(other * 1e3, 1),
                "gb_per_s": round(rate),
            }
            lines.append((name, kind, rows, f"{ours * 1e3:.1f}", f"{other * 1e3:.1f}", f"{rate:.0f}", f"{work:.0f}"))
    table(("product", "type", "rows", "µs", "other µs", "GB/s", "TFLOP/s"), lines)
    return found


def _copies(kind: str, columns: int, depth: int) -> list[Tensor]:
    return [
        drawn(kind, columns, depth) for _ in range(max(1, math.ceil(_AWAY / (columns * depth * TYPES[kind].itemsize))))
    ]


def _ms(x: Tensor, weights: list[Tensor], *, gate_up: bool, tile: StreamTile | None = None) -> float:
    """Of our product for few rows."""
    if not gate_up:
        return milliseconds(lambda i: stream(x, weights[i], tile=tile), sets=len(weights))
    columns = len(weights[0])
    scale, inverse = torch.ones(columns, device="cuda"), torch.ones(columns // 2, device="cuda")
    return milliseconds(lambda i: gated(x, weights[i], scale, None, inverse, x.dtype, tile=tile), sets=len(weights))


def _other_ms(x: Tensor, weights: list[Tensor]) -> float:
    if x.dtype == torch.bfloat16:
        return milliseconds(lambda i: F.linear(x, weights[i]), sets=len(weights))
    scale = torch.ones(len(weights[0]), device="cuda")
    return milliseconds(lambda i: linear_int8(x, weights[i], scale), sets=len(weights))


def step_of(batch: int, context: int) -> TokenBatch:
    """One row of each sequence, the `context`-th token of each."""
    every = list(range(batch))
    return TokenBatch.of([3 + i for i in every], [context - 1] * batch, every, every)


def graph_size(batch: int, context: int) -> tuple[int, int]:
    """Rows and maximum context of the recorded graph that runs such a step."""
    from llm.decode_graphs import bucket, rung

    size = bucket(batch)
    assert size is not None
    return size, rung(reach(context))


def early(bench: Any) -> dict[str, Any]:
    """ms of a step with kernels launched normally, early, and eagerly (`launching`); checks that bits are equal."""
    found: dict[str, Any] = {}
    for batch in (1, 64, 256):
        made: list[Tensor] = []
        for mode in (0, LATE, EAGER):
            run = bench.execution("int8", batch, 256)
            run._fused.model.ops.early = mode
            step = step_of(batch, 192)
            made.append(run(step).clone())
            graph = run._fused.graphs._graph(*graph_size(batch, 192))
            found[f"{batch} rows, {('usual', 'late', 'eager')[mode]}"] = round(sustained(graph, 60), 3)
        found[f"{batch} rows, equal"] = all(torch.equal(made[0], other) for other in made)
    return found


def attention(bench: Any) -> dict[str, Any]:
    """µs of one layer's attention of decoding rows, and GB/s, for each shape of the kernel; the best is kept for the
    parts that follow, and belongs into `decode_kernel.shapes`."""
    found: dict[str, Any] = {}
    for kind in ("int8", "bf16"):
        size = TYPES[kind].itemsize
        timed: list[tuple[float, tuple[int, int, int]]] = []
        given = []
        for batch, context in ((64, 1500), (256, 192)):
            cache = bench.execution(kind, batch, context, fill=True).cache
            q = torch.randn(batch, 32, 128, device="cuda", dtype=torch.bfloat16)
            positions = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
            sequences = torch.arange(batch, dtype=torch.int32, device="cuda")
            cache.settle()
            given.append((cache, q, positions, sequences, context))
        for shape in itertools.product((32, 64, 128), (1, 2, 4, 8), (2, 3)):
            block, warps, _ = shape
            if block * 2 < warps * 32 or (warps == 1 and block == 128) or (block, warps) == (64, 8):
                continue
            decode_kernel.shapes[size] = shape
            us = []
            try:
                for cache, q, positions, sequences, context in given:
                    layers = len(cache.keys)

                    places, parts = (positions, sequences, 128**-0.5), reach(context)

                    def run(i: int, c: Any = cache, q: Any = q, places: Any = places, n: int = parts) -> Tensor:
                        layer: Any = (*c.layer(i), c.table)
                        return decode(q, *layer, *places, parts=n)

                    us.append(1e3 * milliseconds(run, sets=min(8, layers)))
            except Exception as error:  # too large for this card
                print(f"{kind} {shape}: {str(error)[:100]}")
                continue
            found[f"{kind} {shape}"] = [round(one, 1) for one in us]
            timed.append((us[0] + us[1], shape))
        _, decode_kernel.shapes[size] = min(timed)
        bytes_of = [len(q) * n * c.size_bytes / len(c.keys) / (c.keys.shape[1] * 16) for c, q, _, _, n in given]
        best = found[f"{kind} {decode_kernel.shapes[size]}"]
        found[f"{kind}, best"] = {
            "shape": decode_kernel.shapes[size],
            "gb_per_s": [round(b / us / 1e3) for b, us in zip(bytes_of, best, strict=True)],
        }
        print(kind, found, flush=True)
    return found


def sampling(bench: Any) -> dict[str, Any]:
    """ms to sample 256 tokens from logits on the device."""
    from llm.choose import SampleRequest, choose, greedy_tokens
    from llm.parameters import TextParameters
    from llm.sequence import SequenceState

    model = bench.models["bf16"]
    logits = 3 * torch.randn(256, model.vocabulary, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    found = {}
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "temperature 1": {"seed": 1},
        "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9, "seed": 1},
        "top_p 0.9": {"top_p": 0.9, "temperature": 0.3, "seed": 1},
    }
    for name, options in kinds.items():
        given = TextParameters((1, 2, 3), 9, **options)
        works = [SequenceState(given, model.tokenizer, model.vocabulary, None, lookup=False) for _ in range(256)]
        asked = [SampleRequest(work, i) for i, work in enumerate(works)]
        for turn in range(6):
            if turn == 1:
                started = time.perf_counter()
            choose(logits, asked, greedy_tokens(logits, asked))
        found[name] = round((time.perf_counter() - started) / 5 * 1e3, 2)
    return found


def tiles(_: str, until: float) -> dict[str, Any]:
    """Finds the fastest tile of each product, to verify `stream_kernel.choose`. Ends at the time limit."""
    found: dict[str, Any] = {}
    for rows, (name, (columns, depth)) in itertools.product((1, 64, 256, 128, 16), list(SHAPES.items())[:4]):
        fused = name == "gate_up"
        weights = _copies("int8", columns, depth)
        x = drawn("int8", rows, depth)
        usual = choose(rows, columns // (2 if fused else 1), depth, 1, gated=fused)
        timed: list[tuple[float, StreamTile]] = []
        for tile in [usual, *_variants(usual, depth, fused)]:
            if time.monotonic() > until:
                return found
            try:
                ms = _ms(x, weights, gate_up=fused, tile=tile)
            except Exception as error:  # too large a tile for this card
                print(f"{name} {rows} {tile}: {str(error)[:100]}")
                continue
            timed.append((ms, tile))
        first = timed[0][0]
        timed.sort(key=lambda pair: pair[0])
        found[f"{name} {rows}"] = {"usual_us": round(first * 1e3, 1), "usual": str(usual),
                                   "best": [(round(ms * 1e3, 1), str(tile)) for ms, tile in timed[:4]]}  # fmt: skip
        print(name, rows, found[f"{name} {rows}"], flush=True)
    return found


def _variants(usual: StreamTile, depth: int, fused: bool) -> list[StreamTile]:
    """Valid tiles around the default one, with enough loads in flight."""
    made = []
    for columns, (deep, stages), splits in itertools.product(
        (64, 128), ((128, 4), (128, 6), (256, 3)), (1,) if fused else (1, 2, 4, 7, 8, 14, 16)
    ):
        shared = (columns * (2 if fused else 1) + usual.rows) * deep * stages
        near = usual.splits / 2 <= splits <= usual.splits * 2
        if depth // deep % splits or not 60_000 < shared < 220_000 or not near:
            continue
        tile = StreamTile(usual.rows, columns, deep, splits, usual.warps, stages)
        if tile != usual:
            made.append(tile)
    return made
