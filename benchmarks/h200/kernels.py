"""Measures the kernels alone at SDXL's shapes: correctness, speed, and the best tiles.

`python -m benchmarks.h200.kernels compile|check|linear|conv|attention|memory [--out folder]` measures one kind of
kernel, prints a table and writes JSON; `linear` and `conv` also find the tiles that `core/kernels/cuda/tiles.py`
reads.
"""

# ruff: noqa: B023 -- what closes over a loop's variables here runs within the same turn
from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import provenance, record
from benchmarks.h200.timing import Clocks, milliseconds, table
from core.kernels.cuda import (
    attention,
    attention_source,
    conv,
    driver,
    gemm,
    gemm_source,
    group_norm,
    layer_norm,
    linear,
    quantize,
    tiles,
)

INT8, E4M3, BF16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16
ROWS = (16, 8, 4, 2)
# (kernel, N, K, tokens a row): SDXL's linear layers.
LINEARS = [
    ("linear", 1920, 640, 4096),
    ("linear", 640, 640, 4096),
    ("geglu", 5120, 640, 4096),
    ("linear", 640, 2560, 4096),
    ("linear", 3840, 1280, 1024),
    ("linear", 1280, 1280, 1024),
    ("geglu", 10240, 1280, 1024),
    ("linear", 1280, 5120, 1024),
]
# (kernel, Cout, Cin, side of the input, stride): SDXL's convolutions.
CONVS = [
    ("conv", 320, 320, 128, 1),
    ("conv", 320, 640, 128, 1),
    ("conv", 320, 960, 128, 1),
    ("conv", 320, 320, 128, 2),
    ("conv", 640, 320, 64, 1),
    ("conv", 640, 640, 64, 1),
    ("conv", 640, 960, 64, 1),
    ("conv", 640, 1280, 64, 1),
    ("conv", 640, 1920, 64, 1),
    ("conv", 640, 640, 64, 2),
    ("conv", 1280, 640, 32, 1),
    ("conv", 1280, 1280, 32, 1),
    ("conv", 1280, 1920, 32, 1),
    ("conv", 1280, 2560, 32, 1),
    ("upsample", 1280, 1280, 32, 1),
    ("upsample", 640, 640, 64, 1),
]


def draw(kind: torch.dtype, *shape: int) -> Tensor:
    """Integer levels like those of activations: normally distributed, the largest magnitude at the maximum level."""
    x = torch.randn(shape, device="cuda", dtype=BF16)
    return (x * (127 / 4.5)).round().clamp(-127, 127).to(INT8) if kind == INT8 else (x * 100).clamp(-448, 448).to(E4M3)


def compile_all() -> dict[str, Any]:
    """Compile every variant on all cores before the measurements; in processes, since NVRTC may hold a lock."""
    products = [
        gemm_source.source(
            gemm_source.GemmVariant(
                b, n, c, gemm.stages(tiles.Tile(b, n, c, t).rows, n), fp8=fp8, geglu=gated, turns=bool(t)
            )
        )
        for fp8 in (False, True)
        for b, n, t in tiles.SHAPES
        for c in (1, 2)
        for gated in (False, True)
        if not (gated and n % 64)
    ]
    with multiprocessing.get_context("fork").Pool() as pool:
        sizes = pool.map(driver.compiled, products, chunksize=1)
    return {"programs": len(sizes), "bytes": sum(map(len, sizes))}


class Note(Protocol):  # keeps a kernel's largest error; prints those above `most` (default: the type's)
    def __call__(self, name: str, actual: Tensor, expected: Tensor, most: float | None = None) -> None: ...


def error(actual: Tensor, expected: Tensor) -> float:
    a, e = actual.double().flatten(), expected.double().flatten()
    return float((a - e).norm() / e.norm())


def check() -> dict[str, Any]:
    """Compare every tile, every epilogue and odd shapes with exact references, on poisoned outputs."""
    worst: dict[str, float] = {}
    torch.manual_seed(0)

    def note(name: str, actual: Tensor, expected: Tensor, most: float | None = None) -> None:
        e = error(actual, expected)
        worst[name] = max(worst.get(name, 0.0), e if math.isfinite(e) else 1e9)
        # One E4M3 level is 6-12%: where the accumulators' last bits decide, a norm of 2% is nothing but such flips.
        if not e < (most or (0.04 if actual.dtype == E4M3 else 0.02)):
            print("WRONG", name, e, tuple(actual.shape), flush=True)

    _check_products(note)
    _check_norms(note)
    _check_attention(note)
    table(("kernel", "worst relative error"), [(name, f"{e:.2e}") for name, e in worst.items()])
    return worst


def _check_products(note: Note) -> None:
    for kind in (INT8, E4M3):
        for blocks, columns, turns in tiles.SHAPES:
            for cluster in (1, 2):
                tile = tiles.Tile(blocks, columns, cluster, turns)
                tag = f"{kind} {_key(tile)}"
                for m, n, k in ((300, 2 * columns, 208), (1000, 4 * columns, 640)):
                    x, w = draw(kind, m, k), draw(kind, n, k)
                    s, b, r = (
                        torch.rand(n, device="cuda") * 1e-3,
                        torch.randn(n, device="cuda"),
                        torch.rand(m, device="cuda"),
                    )
                    wide = torch.randn(m, n + 64, device="cuda", dtype=BF16)[:, 32:-32]
                    out = torch.full((m, n), float("nan"), device="cuda", dtype=BF16)
                    y = linear.linear_int8(x, w, s, b, r, wide, out=out, tile=tile)
                    note(f"linear {tag}", y, linear.linear_int8_reference(x, w, s, b, r, wide))
                    if n % 64 == 0 and columns % 64 == 0:
                        inverse = torch.rand(n // 2, device="cuda") * 4
                        expected = linear.linear_geglu_int8_reference(x, w, s * 30, b, inverse)
                        note(f"geglu {tag}", linear.linear_geglu_int8(x, w, s * 30, b, inverse, tile=tile), expected)
                for h, width, c, stride in ((9, 21, 80, 1), (32, 32, 320, 1), (17, 40, 192, 2)):
                    x, n = draw(kind, 3, h, width, c), 2 * columns
                    w, s, b = draw(kind, n, 3, 3, c), torch.rand(n, device="cuda") * 1e-3, torch.randn(n, device="cuda")
                    rb = torch.randn(3, n + 8, device="cuda")[:, 4:-4]
                    shape = (3, -(-h // stride), -(-width // stride), n)
                    res = torch.randn(shape, device="cuda", dtype=BF16)
                    out = torch.full(shape, float("nan"), device="cuda", dtype=BF16)
                    y = conv.conv3x3_int8(x, w, s, b, rb, res, stride, out=out, tile=tile)
                    note(f"conv {stride} {tag}", y, conv.conv3x3_int8_reference(x, w, s, b, rb, res, stride))
                    if stride == 1:
                        w, s4 = draw(kind, 4, n, 2, 2, c), torch.rand(4, n, device="cuda") * 1e-3
                        expected = conv.upsample_conv3x3_int8_reference(x, w, s4, b)
                        note(f"upsample {tag}", conv.upsample_conv3x3_int8(x, w, s4, b, tile=tile), expected)


def _check_norms(note: Note) -> None:
    for kind in (INT8, E4M3):
        for m, c in ((1000, 640), (4099, 1280), (7, 320), (513, 2048)):
            x = (torch.randn(m, c + 64, device="cuda") * 3 + 1).to(BF16)[:, 32:-32]
            w, b = (torch.randn(c, device="cuda").to(BF16) for _ in range(2))
            for inverse in (torch.full((1,), 25.0, device="cuda"), torch.rand(c, device="cuda") * 40):
                y = layer_norm.layer_norm_int8(x, w, b, 1e-5, inverse, kind)
                note(f"layer_norm {kind}", y, layer_norm.layer_norm_int8_reference(x, w, b, 1e-5, inverse, kind))


def _check_attention(note: Note) -> None:
    for consumers, keys, emulated in ((3, 128, 0), (2, 128, 0), (3, 128, 2), (2, 80, 0)):
        for output, dtype in (("bf16", BF16), ("int8", INT8), ("e4m3", E4M3)):
            for sq, sk in ((200, 300), (1024, 1024), (129, 77)):
                qkv = torch.randn(2, max(sq, sk), 3, 5, 64, device="cuda", dtype=BF16) * 2
                query, key, value = qkv[:, :sq, 0], qkv[:, :sk, 1], qkv[:, :sk, 2]
                given = None if dtype == BF16 else torch.rand(320, device="cuda") * 60
                variant = attention_source.AttentionVariant(consumers, keys, 2, output, emulated)
                y = attention.attention(query, key, value, given, dtype, variant=variant)
                expected = attention.attention_reference(query, key, value, given, dtype)
                note(f"attention {consumers}x{keys} {output} emulated {emulated}", y, expected, 0.04)


def _key(tile: tiles.Tile) -> str:
    return f"{tile.blocks},{tile.columns},{tile.cluster},{tile.turns}"


def _sweep(
    kernel: str, columns: int, depth: int, rows: int, run: Callable[[tiles.Tile | None], Callable[[int], Any]]
) -> dict[str, float]:
    found = {}
    for tile in tiles.candidates(columns, gated=kernel == "geglu"):
        found[_key(tile)] = milliseconds(run(tile), sets=2, warm=3, repeats=8)
    return found


def _record(
    results: dict[str, Any],
    best: dict[str, Any],
    key: str,
    kernel: str,
    n: int,
    depth: int,
    rows: int,
    flop: float,
    times: dict[str, float],
) -> tuple[str, ...]:
    winner = min(times, key=lambda t: times[t])
    results[key] = {"ms": times, "tflops": flop / times[winner] / 1e9}
    best.setdefault(kernel, {}).setdefault(f"{n},{depth}", {})[str(tiles.bucket(rows))] = [
        int(v) for v in winner.split(",")
    ]
    chosen = tiles.choose("untuned", kernel, rows, n, depth, driver.multiprocessors(0))
    guess = times[_key(chosen)]
    return key, winner, f"{times[winner]:.3f}", f"{flop / times[winner] / 1e9:.0f}", f"{guess / times[winner]:.2f}"


def measure_linear() -> dict[str, Any]:
    results: dict[str, Any] = {}
    best: dict[str, Any] = {}
    lines = []
    for kernel, n, k, tokens in LINEARS:
        for count in ROWS:
            m = count * tokens
            xs, w = [draw(INT8, m, k) for _ in range(2)], draw(INT8, n, k)
            s, b, inverse = (
                torch.full((n,), 1e-4, device="cuda"),
                torch.zeros(n, device="cuda"),
                torch.ones(1, device="cuda"),
            )
            residual = torch.zeros(m, n, device="cuda", dtype=BF16) if n in (640, 1280) else None

            def run(tile: tiles.Tile | None, xs: list[Tensor] = xs, w: Tensor = w) -> Callable[[int], Any]:
                if kernel == "geglu":
                    return lambda i: linear.linear_geglu_int8(xs[i], w, s, b, inverse, tile=tile)
                return lambda i: linear.linear_int8(xs[i], w, s, b, None, residual, tile=tile)

            flop = 2.0 * m * n * k
            times = _sweep(kernel, n, k, m, run)
            line = _record(results, best, f"{kernel} {m}x{n}x{k}", kernel, n, k, m, flop, times)
            if count == 16:
                tile = tiles.Tile(*(int(v) for v in line[1].split(",")))
                f8, w8 = [draw(E4M3, m, k) for _ in range(2)], draw(E4M3, n, k)
                xb, wb, one = (
                    torch.randn(m, k, device="cuda", dtype=BF16),
                    torch.randn(n, k, device="cuda", dtype=BF16),
                    torch.ones((), device="cuda"),
                )
                others = {
                    "own fp8": milliseconds(run(tile, f8, w8), sets=2),
                    "scaled_mm": milliseconds(
                        lambda i: torch._scaled_mm(f8[i], w8.t(), one, one, out_dtype=BF16, use_fast_accum=True), sets=2
                    ),
                    "bf16": milliseconds(lambda i: F.linear(xb, wb)),
                    "int_mm": milliseconds(lambda i: torch._int_mm(xs[i], w.t()), sets=2),
                }
                results[line[0]] |= others
                line += tuple(f"{flop / ms / 1e9:.0f}" for ms in others.values())
            lines.append(line + ("",) * (9 - len(line)))
    table(("linear", "tile", "ms", "TFLOP/s", "guess", "fp8", "scaled_mm", "bf16", "int_mm"), lines)
    return {"results": results, "tiles": best}


def measure_conv() -> dict[str, Any]:
    results: dict[str, Any] = {}
    best: dict[str, Any] = {}
    lines = []
    for kernel, n, c, side, stride in CONVS:
        for count in ROWS:
            up = kernel == "upsample"
            xs = [draw(INT8, count, side, side, c) for _ in range(2)]
            w = draw(INT8, 4, n, 2, 2, c) if up else draw(INT8, n, 3, 3, c)
            s, b = torch.full((4, n) if up else (n,), 1e-5, device="cuda"), torch.zeros(n, device="cuda")
            out = side * 2 if up else side // stride
            pixels, depth = count * out * out, (4 if up else 9) * c
            residual = None if up or stride == 2 else torch.zeros(count, side, side, n, device="cuda", dtype=BF16)

            def run(tile: tiles.Tile | None) -> Callable[[int], Any]:
                if up:
                    return lambda i: conv.upsample_conv3x3_int8(xs[i], w, s, b, tile=tile)
                return lambda i: conv.conv3x3_int8(xs[i], w, s, b, None, residual, stride, tile=tile)

            flop = 2.0 * pixels * n * depth
            times = _sweep(kernel, n, depth, pixels, run)
            line = _record(
                results, best, f"{kernel}{stride} {count}x{side}x{side} {c}->{n}", kernel, n, depth, pixels, flop, times
            )
            if count == 16:
                big = side * 2 if up else side
                xb = torch.randn(count, c, big, big, device="cuda", dtype=BF16).contiguous(
                    memory_format=torch.channels_last
                )
                wb = torch.randn(n, c, 3, 3, device="cuda", dtype=BF16).contiguous(memory_format=torch.channels_last)
                ms = milliseconds(lambda i: F.conv2d(xb, wb, None, stride, 1))
                results[line[0]]["cudnn bf16"] = ms
                line += (f"{2.0 * pixels * n * 9 * c / ms / 1e9:.0f}", f"{ms / float(line[2]):.2f}")
            lines.append(line + ("",) * (7 - len(line)))
    table(("conv", "tile", "ms", "TFLOP/s", "guess", "cudnn bf16", "times"), lines)
    return {"results": results, "tiles": best}


def measure_attention() -> dict[str, Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    results: dict[str, Any] = {}
    lines = []
    for sq, sk, heads in ((4096, 4096, 10), (1024, 1024, 20), (4096, 77, 10), (1024, 77, 20)):
        for count in (16, 2):
            qkv = torch.randn(count, sq, 3, heads, 64, device="cuda", dtype=BF16)
            kv = qkv[:, :, 1:] if sk == sq else torch.randn(count, sk, 2, heads, 64, device="cuda", dtype=BF16)
            q, k, v = qkv[:, :, 0], kv[:, :, 0], kv[:, :, 1]
            one = torch.full((1,), 30.0, device="cuda")
            times = {}
            variants = [(3, 128, 2, 0), (3, 128, 3, 0), (2, 128, 3, 0), (3, 128, 3, 1), (3, 64, 4, 0)]
            short = [(2, 80, 2, 0), (2, 80, 4, 0), (3, 80, 2, 0), (3, 80, 4, 0)]
            for consumers, keys, stages, emulated in variants if sk == sq else short:
                for output, dtype in (("int8", INT8), ("bf16", BF16)):
                    variant = attention_source.AttentionVariant(consumers, keys, stages, output, emulated)
                    name = f"{consumers}x{keys} s{stages} e{emulated} {output}"
                    given = one if dtype == INT8 else None
                    times[name] = milliseconds(lambda i: attention.attention(q, k, v, given, dtype, variant=variant))
            q_, k_, v_ = (t.transpose(1, 2) for t in (q, k, v))
            for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
                try:
                    with sdpa_kernel(backend):
                        times[name] = milliseconds(lambda i: F.scaled_dot_product_attention(q_, k_, v_))
                except RuntimeError as failure:
                    print(name, str(failure)[:100])
            flop = 4.0 * count * heads * sq * sk * 64
            key = f"{count}x{heads}x{sq}x{sk}"
            results[key] = {"ms": times, "tflops": {n: flop / ms / 1e9 for n, ms in times.items()}}
            lines += [(key, name, f"{ms:.3f}", f"{flop / ms / 1e9:.0f}") for name, ms in times.items()]
    table(("attention", "variant", "ms", "TFLOP/s"), lines)
    return results


def measure_memory() -> dict[str, Any]:
    """Measure memory-bound kernels: GB/s of the bytes that must be read and written once."""
    results: dict[str, Any] = {}
    lines = []

    def note(name: str, size: float, run: Callable[[int], Any]) -> None:
        ms = milliseconds(run, sets=2)
        results[name] = {"ms": ms, "gb_s": size / ms / 1e6}
        lines.append((name, f"{ms:.4f}", f"{size / ms / 1e6:.0f}"))

    one = torch.ones(1, device="cuda")
    big = [torch.randn(1 << 28, device="cuda", dtype=BF16) for _ in range(2)]
    to = torch.empty_like(big[0])
    note("copy", big[0].numel() * 4, lambda i: to.copy_(big[i]))
    for m, c in ((65536, 640), (16384, 1280)):
        xs = [torch.randn(m, c, device="cuda", dtype=BF16) for _ in range(2)]
        w = torch.ones(c, device="cuda", dtype=BF16)
        note(f"layer_norm {m}x{c}", m * c * 3, lambda i: layer_norm.layer_norm_int8(xs[i], w, w, 1e-5, one))
        note(f"F.layer_norm {m}x{c}", m * c * 4, lambda i: F.layer_norm(xs[i], (c,), w, w))
        note(f"quantize {m}x{c}", m * c * 3, lambda i: quantize.quantize(xs[i], one))
        note(f"quantize_rows {m}x{c}", m * c * 3, lambda i: quantize.quantize_rows(xs[i]))
    for side, c in ((128, 320), (128, 640), (128, 960), (64, 640), (64, 1920), (32, 1280), (32, 2560)):
        xs = [torch.randn(16, side, side, c, device="cuda", dtype=BF16) for _ in range(2)]
        w = torch.ones(c, device="cuda", dtype=BF16)
        size = 16 * side * side * c
        note(
            f"group_norm {side}x{side}x{c}",
            size * 5,
            lambda i: group_norm.group_norm_int8(xs[i], 32, w, w, 1e-5, one, True),
        )
    table(("memory", "ms", "GB/s"), lines)
    return results


def main() -> None:
    kinds = {
        "check": check,
        "linear": measure_linear,
        "conv": measure_conv,
        "attention": measure_attention,
        "memory": measure_memory,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["compile", *kinds])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    given = parser.parse_args()
    if given.what == "compile":
        print(compile_all())
        return
    torch.manual_seed(0)
    with Clocks() as clocks:
        found = kinds[given.what]()
    found = {"clocks": clocks.summary(), given.what: found}
    record.write(given.what, found, given.out, rooms=(*provenance.QUANTIZATION, "benchmarks/h200/kernels.py"))
    print(json.dumps(found["clocks"]))


if __name__ == "__main__":
    main()
