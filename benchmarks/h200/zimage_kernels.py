"""Measures the kernels at Z-Image's shapes: correctness, products by tile, attention and norms.

`python -m benchmarks.h200.zimage_kernels [part ...] [--out folder]` runs each part in a process of its own with a time
limit, so that one that fails or hangs costs only its own figures; all of them take about two minutes. It prints each
figure as it is found, then the entries for `core/kernels/cuda/nvidia_h200.json` and an estimate of a forward, and
writes JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import provenance, record
from benchmarks.h200.kernels import BF16, E4M3, INT8, draw
from benchmarks.h200.timing import milliseconds, sustained
from benchmarks.h200.zimage_check import HEADS, WIDTH, Note, by_triton, candidates, check, key, variants
from core.kernels.cuda import attention_source, driver, flash_attention, gemm, gemm_source, layer_norm, rms_norm, tiles
from core.kernels.cuda.attention import attention
from core.kernels.cuda.linear import linear_geglu_int8, linear_int8
from core.kernels.cuda.quantize import quantize
from core.kernels.cuda.rotary import rotate_heads

TOKENS = 4096 + 128  # of 1024 × 1024 pixels and a prompt of 128 tokens
LAYERS = 32  # over all tokens: 30, and the refiners as two
IMAGES = (1, 2, 4, 8)
PRODUCTS = {
    "qkv": ("linear", 3 * WIDTH, WIDTH),
    "out": ("linear", WIDTH, WIDTH),
    "swiglu": ("geglu", 20480, WIDTH),
    "down": ("linear", WIDTH, 10240),
}
FLASH = ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2))  # as `flash_attention.shapes`
NORMS = ((4, 512), (8, 512), (4, 256), (1, 512))  # `rms_norm.ROWS` and `rms_norm.CHANNELS`
LIMITS = {"compile": 45, "check": 75, "products": 60, "attention": 45, "memory": 35}  # seconds
_AWAY = 200e6  # bytes, several times the L2
_LINES = "zimage-kernels.jsonl"


def compile_all(note: Note) -> None:
    """Compile the CUDA programs of all other parts on all cores."""

    def product(tile: tiles.Tile, gated: bool, fp8: bool) -> str:
        depth = gemm.stages(tile.rows, tile.columns)
        variant = gemm_source.GemmVariant(
            tile.blocks, tile.columns, tile.cluster, depth, fp8, gated, turns=bool(tile.turns), silu=gated,
            group=tile.group,
        )  # fmt: skip
        return gemm_source.source(variant)

    programs = [product(t, gated, False) for gated in (False, True) for t in candidates(gated)]
    programs += [product(t, gated, True) for gated in (False, True) for t in candidates(gated) if t.group == 8]
    for output, lengths in itertools.product(("int8", "bf16"), (False, True)):
        programs += [attention_source.source(variant) for variant in variants(output, lengths)]
    with get_context("fork").Pool() as pool:
        sizes = pool.map(driver.compiled, programs, chunksize=1)
    note("compile", "programs", count=len(sizes), bytes=sum(map(len, sizes)))


def _attempt(note: Note, part: str, name: str, run: Callable[[], dict[str, Any]]) -> None:
    try:
        note(part, name, **run())
    except Exception as failure:
        note(part, name, failure=str(failure)[:120])


class Product:
    """One of Z-Image's products for so many images, with inputs and weights that no cache holds."""

    def __init__(self, name: str, images: int, kind: torch.dtype = INT8) -> None:
        self.kernel, n, k = PRODUCTS[name]
        rows = images * TOKENS
        self.flop = 2.0 * rows * n * k
        self._xs = [draw(kind, rows, k) for _ in range(2)]
        self.weights = [draw(kind, n, k) for _ in range(max(2, math.ceil(_AWAY / (n * k))))]
        self._scale, self._inverse = torch.full((n,), 1e-5, device="cuda"), torch.full((1,), 20.0, device="cuda")

    def __call__(self, i: int, tile: tiles.Tile | None) -> Tensor:
        x, weight = self._xs[i % 2], self.weights[i % len(self.weights)]
        if self.kernel == "geglu":
            return linear_geglu_int8(x, weight, self._scale, None, self._inverse, act="silu", tile=tile)
        return linear_int8(x, weight, self._scale, tile=tile)

    def briefly(self, tile: tiles.Tile | None) -> float:
        """Milliseconds at full clock."""
        return milliseconds(lambda i: self(i, tile), sets=len(self.weights), warm=2, repeats=8)

    def longer(self, tile: tiles.Tile | None) -> float:
        """Milliseconds over a tenth of a second, in a CUDA graph, near the power limit."""
        self(0, tile)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(len(self.weights)):
                self(i, tile)
        repeats = max(2, int(0.1 / (self.flop / 1.2e15) / len(self.weights)))
        return sustained(graph.replay, repeats) / len(self.weights)


def _longer(product: Product, name: str, images: int, short: dict[tiles.Tile, float]) -> dict[str, Any]:
    order = sorted(short, key=short.__getitem__)
    best = {tile: product.longer(tile) for tile in order[:4]}
    winner = min(best, key=best.__getitem__)
    found = {
        "ms": round(best[winner], 4), "tflops": round(product.flop / best[winner] / 1e9), "tile": key(winner),
        "default_ms": round(product.longer(None), 4),
        "ungrouped_ms": round(product.longer(next(tile for tile in order if tile.group == 1)), 4),
    }  # fmt: skip
    if images == 4:
        found["fp8_ms"] = round(Product(name, images, E4M3).longer(winner), 4)
    return found | {"images": images, "product": name, "short": {key(t): round(short[t], 4) for t in order[:8]}}


def measure_products(note: Note) -> None:
    """Every tile at full clock, then the best four for longer, since the power limit favours others."""
    for images, name in itertools.product(IMAGES, PRODUCTS):
        product = Product(name, images)
        title = f"{name} {images * TOKENS}"
        short: dict[tiles.Tile, float] = {}
        for tile in candidates(product.kernel == "geglu"):
            try:
                short[tile] = product.briefly(tile)
            except Exception as failure:
                note("products", f"{title} {key(tile)}", failure=str(failure)[:120])
        _attempt(note, "products", title, partial(_longer, product, name, images, short))


def measure_attention(note: Note) -> None:
    """With lengths, as the model asks for it; torch's without, followed by `quantize`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inverse = torch.full((WIDTH,), 30.0, device="cuda")
    for images in (1, 4):
        qkvs = [torch.randn(images, TOKENS, 3, HEADS, 128, device="cuda", dtype=BF16) for _ in range(2)]
        lengths = torch.full((images,), TOKENS, dtype=torch.int32, device="cuda")
        flop = 4.0 * images * HEADS * TOKENS**2 * 128

        def timed(run: Callable[..., Any], qkvs: list[Tensor], flop: float, images: int) -> dict[str, Any]:
            ms = milliseconds(lambda i: run(*qkvs[i].unbind(2)), sets=2, repeats=7)
            return {"ms": round(ms, 4), "tflops": round(flop / ms / 1e9), "images": images}

        def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            return quantize(y.transpose(1, 2).flatten(2), inverse)

        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            with sdpa_kernel(backend):
                run = partial(timed, by_torch, qkvs, flop, images)
                _attempt(note, "attention", f"{images} torch {name}, quantize", run)
        for variant in variants("int8", lengths=True):
            ours = partial(attention, inverse=inverse, dtype=INT8, lengths=lengths, variant=variant)
            name = f"{images} hopper {variant.name}"
            _attempt(note, "attention", name, partial(timed, ours, qkvs, flop, images))
        for shape in FLASH:
            flash_attention.shapes[256] = shape
            ours = partial(by_triton, lengths=lengths, inverse=inverse, kind=INT8)
            _attempt(note, "attention", f"{images} triton {shape}", partial(timed, ours, qkvs, flop, images))


def measure_memory(note: Note) -> None:
    """GB/s of the bytes that must be read and written once."""
    weight, inverse = torch.ones(WIDTH, device="cuda", dtype=BF16), torch.full((WIDTH,), 20.0, device="cuda")
    norms = torch.ones(2, 128, device="cuda", dtype=BF16)
    for images in (1, 4):
        rows, size = images * TOKENS, images * TOKENS * WIDTH
        xs, ys, qkvs = ([torch.randn(rows, n * WIDTH, device="cuda", dtype=BF16) for _ in range(2)] for n in (1, 1, 3))
        scale, angles = torch.ones(images, WIDTH, device="cuda"), torch.randn(rows, 128, device="cuda")

        def note_ms(name: str, amount: float, run: Callable[[int], Any], images: int) -> None:
            def timed() -> dict[str, Any]:
                ms = milliseconds(run, sets=2)
                return {"ms": round(ms, 4), "gb_s": round(amount / ms / 1e6), "images": images}

            _attempt(note, "memory", f"{images} {name}", timed)

        def norm(i: int, xs: list[Tensor], scale: Tensor) -> Any:
            return rms_norm.rms_norm(xs[i], weight, 1e-5, inverse, INT8, row_scale=scale)

        def residual(i: int, xs: list[Tensor], ys: list[Tensor], scale: Tensor) -> Any:
            given: Any = (xs[i], ys[i], weight, weight, 1e-5, inverse, INT8)
            return rms_norm.residual_norm(*given, gate=scale, next_scale=scale, kept=xs[i])

        def rotate(i: int, qkvs: list[Tensor], angles: Tensor) -> Any:
            return rotate_heads(qkvs[i], angles, HEADS, HEADS, norms=norms, eps=1e-5, interleaved=True)

        def last(i: int, xs: list[Tensor], scale: Tensor) -> Any:
            return layer_norm.layer_norm_int8(xs[i], None, None, 1e-6, None, BF16, row_scale=scale)

        def copy(i: int, xs: list[Tensor], ys: list[Tensor]) -> Any:
            return ys[i].copy_(xs[i])

        note_ms("copy", 4 * size, partial(copy, xs=xs, ys=ys), images)
        note_ms("rotate_heads", 8 * size, partial(rotate, qkvs=qkvs, angles=angles), images)
        note_ms("layer_norm", 4 * size, partial(last, xs=xs, scale=scale), images)
        for shape in NORMS:
            rms_norm.ROWS, rms_norm.CHANNELS = shape
            note_ms(f"rms_norm {shape}", 3 * size, partial(norm, xs=xs, scale=scale), images)
            note_ms(f"residual_norm {shape}", 7 * size, partial(residual, xs=xs, ys=ys, scale=scale), images)


PARTS: dict[str, Callable[[Note], None]] = {
    "compile": compile_all,
    "check": check,
    "products": measure_products,
    "attention": measure_attention,
    "memory": measure_memory,
}


def summarize(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The table's entries, what is wrong, and milliseconds of a forward: all layers at each kernel's best."""

    def fastest(images: int, *words: str) -> float:
        times = [x["ms"] for x in lines if x.get("images") == images and all(word in x["name"] for word in words)]
        return min(times, default=math.nan)

    entries: dict[str, dict[str, dict[str, list[int]]]] = {}
    for line in (line for line in lines if "tile" in line):
        kernel, n, k = PRODUCTS[line["product"]]
        bucket = str(tiles.bucket(line["images"] * TOKENS))
        entries.setdefault(kernel, {}).setdefault(f"{n},{k}", {})[bucket] = [int(v) for v in line["tile"].split(",")]
    forward: dict[str, Any] = {}
    for images in (1, 4):
        parts = {name: fastest(images, f"{name} {images * TOKENS}") for name in PRODUCTS}
        parts["attention"] = fastest(images, "hopper")
        parts["norms"] = 2 * fastest(images, "residual_norm")
        parts["rotate"] = fastest(images, "rotate_heads")
        forward[f"{images} images"] = {"ms": round(LAYERS * sum(parts.values()), 2), "of a layer": parts}
    wrong = [line["name"] for line in lines if line.get("wrong") or "failure" in line]
    return {"tiles": entries, "forward": forward, "wrong": wrong}


def _run_part(part: str, out: Path) -> None:
    def note(part: str, name: str, **found: Any) -> None:
        shown = {k: v for k, v in found.items() if k not in ("images", "product", "short", "wrong")}
        mark = "WRONG " if found.get("wrong") or "failure" in found else ""
        print(f"{mark + name:<58}", "  ".join(f"{k} {v}" for k, v in shown.items()), flush=True)
        with (out / _LINES).open("a") as file:
            file.write(json.dumps({"part": part, "name": name, **found}) + "\n")

    torch.manual_seed(0)
    PARTS[part](note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    parser.add_argument("--here", action="store_true", help="run one part in this process")
    given = parser.parse_args()
    parts = given.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    given.out.mkdir(parents=True, exist_ok=True)
    if given.here:
        return _run_part(parts[0], given.out)
    path = given.out / _LINES
    path.write_text("")
    for part in parts:
        start = time.monotonic()
        command = [
            sys.executable,
            "-u",
            "-m",
            "benchmarks.h200.zimage_kernels",
            part,
            "--here",
            "--out",
            str(given.out),
        ]
        try:
            ended = f"exit {subprocess.run(command, timeout=LIMITS[part], check=False).returncode}"
        except subprocess.TimeoutExpired:
            ended = "out of time"
        print(f"== {part}: {ended}, {time.monotonic() - start:.0f} s", flush=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = summarize(lines)
    print(json.dumps(found))
    rooms = (*provenance.QUANTIZATION, "core/kernels", "benchmarks/h200/zimage_kernels.py")
    record.write("zimage-kernels", {**found, "lines": lines}, given.out, rooms=rooms)
    path.unlink()


if __name__ == "__main__":
    main()
