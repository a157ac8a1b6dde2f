"""Measures the GPU kernels alone at the shapes of SDXL, Z-Image and Llama-3.1-8B: every variant, and torch's own.

    python -m lab.bench.kernels [part ...] [--models sdxl,zimage,llama]

Parts: `compile` (all programs, on all cores), `products`, `attention`, `decode`, `memory`; gpu.sh runs one in a process
of its own, with a time limit. Of a shape every variant is timed at full clock, and the best four for longer, in a
graph, since the power limit favours others; variants of a product must agree in all bits.
`diptych tune-kernels` writes the best tiles of a device. The shapes are those of `lab/bench/kernel_shapes.py`.
`--device cpu --tiny` rehearses it on the kernels' references.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from core.kernels.cuda import (
    attention_source,
    conv,
    decode_hopper,
    decode_kernel,
    driver,
    flash_attention,
    gemm,
    gemm_source,
    group_norm,
    layer_norm,
    linear,
    quantize,
    rms_norm,
    rotary,
    tiles,
)  # fmt: skip
from core.kernels.cuda.attention import attention, attention_reference
from core.kernels.cuda.stream_kernel import StreamTile, choose, gated, gated_reference, stream, stream_reference
from core.kernels.kv_cache import KVCache
from lab.bench.harness import command, record
from lab.bench.harness.timing import Clocks, milliseconds, window_ms
from lab.bench.kernel_shapes import ATTENTION, DECODE, MEMORY, PRODUCTS, SMALL, VARIANTS, ProductShape

INT8, BF16 = torch.int8, torch.bfloat16
_AWAY = 200e6  # bytes of weights, several times the L2
Run = Callable[..., Any]


class Case(NamedTuple):
    """One shape: the operations or bytes of a call, and calls by variant; "default" is what is chosen unmeasured.

    `tile` is its place in a table of tiles: kernel, shape and bucket of rows.
    """

    name: str
    work: float
    runs: dict[str, Run]
    sets: int = 2
    tile: tuple[str, str, str] | None = None


def draw(kind: torch.dtype, *shape: int, device: str) -> Tensor:
    """Levels like those of activations: normally distributed, the largest magnitude at the maximum level."""
    x = torch.randn(shape, device=device, dtype=BF16)
    return (x * (127 / 4.5)).round().clamp(-127, 127).to(INT8) if kind == INT8 else (x * 100).clamp(-448, 448).to(kind)


# -- products ----------------------------------------------------------------------------------------------------------


def products(model: str, device: str, *, small: bool) -> Iterator[Case]:
    counts, shapes = PRODUCTS[model]
    kernels = {"llama": ("stream", "gated"), "zimage": ("swiglu",), "sdxl": ("linear", "geglu", "conv", "upsample")}
    selected = [product for product in SMALL if product.kernel in kernels[model]] if small else shapes
    for product, count in itertools.product(selected, (2,) if small else counts):
        yield _product(product, count, device)


# Shape of the weight by columns and depth, taps of a pixel, and the function with its reference.
_WEIGHTS: dict[str, tuple[Callable[[int, int], tuple[int, ...]], int, Run, Run]] = {
    "linear": (lambda n, k: (n, k), 1, linear.linear_int8, linear.linear_int8_reference),
    "geglu": (lambda n, k: (n, k), 1, linear.linear_geglu_int8, linear.linear_geglu_int8_reference),
    "swiglu": (lambda n, k: (n, k), 1, linear.linear_geglu_int8, linear.linear_geglu_int8_reference),
    "conv": (lambda n, k: (n, 3, 3, k), 9, conv.conv3x3_int8, conv.conv3x3_int8_reference),
    "upsample": (lambda n, k: (4, n, 2, 2, k), 4, conv.upsample_conv3x3_int8, conv.upsample_conv3x3_int8_reference),
    "stream": (lambda n, k: (n, k), 1, stream, stream_reference),
    "gated": (lambda n, k: (n, k), 1, gated, gated_reference),
}  # fmt: skip


def _epilogue(product: ProductShape, count: int, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a product's function beside operands: scales, bias, residual, and how to write."""
    kernel, n, _, rows, side, stride = product
    scale = torch.full((4, n) if kernel == "upsample" else (n,), 1e-5, device=device)
    bias, inverse = torch.zeros(n, device=device), torch.full((1,), 20.0, device=device)
    shape = (count, side, side, n) if side else (count * rows, n)
    residual = torch.zeros(shape, device=device, dtype=BF16) if (side and stride == 1) or n in (640, 1280) else None
    epilogues: dict[str, tuple[Any, ...]] = {
        "linear": (scale, bias, None, residual), "geglu": (scale, bias, inverse), "swiglu": (scale, bias, inverse),
        "conv": (scale, bias, None, residual if stride == 1 else None, stride), "upsample": (scale, bias), "stream": (),
        "gated": (scale, None, inverse, INT8),
    }  # fmt: skip
    return epilogues[kernel], {"act": "silu"} if kernel == "swiglu" else {}


def _product(product: ProductShape, count: int, device: str) -> Case:
    kernel, n, k, rows, side, stride = product
    shape_of, taps, function, reference = _WEIGHTS[kernel]
    out, cuda = 2 * side if kernel == "upsample" else side // stride, device == "cuda"
    m, shape = count * (rows or out * out), (count, side, side, k) if side else (count * rows, k)
    copies = max(2, math.ceil(_AWAY / (n * k * taps))) if cuda else 1
    xs = [draw(INT8, *shape, device=device) for _ in range(2)]
    weights = [draw(INT8, *shape_of(n, k), device=device) for _ in range(copies)]
    epilogue, options = _epilogue(product, count, device)

    def call(i: int, run: Callable[..., Any], **more: Any) -> Any:
        return run(xs[i % 2], weights[i % copies], *epilogue, **options, **more)

    runs: dict[str, Run] = {"default": partial(call, run=function if cuda else reference)}
    if cuda:
        runs |= {_key(tile): partial(call, run=function, tile=tile) for tile in _tiles(product, m)}
        factors = [torch.randn(count, k * taps, device=device, dtype=BF16) for count in (m, n)]
        runs["bf16"] = lambda i: F.linear(*factors)
    table = {"swiglu": "geglu"}.get(kernel, kernel), f"{n},{k * taps}", str(tiles.bucket(m))
    tile_table = None if kernel in ("stream", "gated") else table
    return Case(f"{kernel} {m}x{n}x{k * taps}", 2.0 * m * n * k * taps, runs, copies, tile_table)


def _tiles(product: ProductShape, rows: int) -> list[Any]:
    kernel, n, k, _, side, _ = product
    if kernel in ("stream", "gated"):
        return _stream_tiles(choose(rows, n // (1 + (kernel == "gated")), k, 1, gated=kernel == "gated"), product)
    plain = tiles.candidates(n, gated=kernel in ("geglu", "swiglu"))
    if side or n * k < 30e6:
        return plain
    # Weights that hardly fit the L2 are read once for several rows of tiles.
    return [replace(tile, group=group) for tile in plain for group in (1, 8, 16)]


def _stream_tiles(usual: StreamTile, product: ProductShape) -> list[StreamTile]:
    """Valid tiles around the default one, with enough loads in flight."""
    fused, valid = product.kernel == "gated", []
    for columns, (deep, stages), splits in itertools.product(
        (64, 128), ((128, 4), (128, 6), (256, 3)), (1,) if fused else (1, 2, 4, 7, 8, 14, 16)
    ):
        shared = (columns * (1 + fused) + usual.rows) * deep * stages
        near = usual.splits / 2 <= splits <= usual.splits * 2
        if product.depth // deep % splits == 0 and 60_000 < shared < 220_000 and near:
            valid.append(StreamTile(usual.rows, columns, deep, splits, usual.warps, stages))
    return valid


def _numbers(tile: Any) -> list[int]:
    return [getattr(tile, name) for name in tile.__slots__]


def _key(tile: Any) -> str:
    return ",".join(map(str, _numbers(tile)))


# -- attention and what memory bounds ----------------------------------------------------------------------------------


def attentions(model: str, device: str, *, small: bool) -> Iterator[Case]:
    """Attention that writes the next layer's int8; torch's in bf16, without that."""
    for queries, keys, heads, size, arguments, images in (
        [(64, 64, 2, 64, True, 2)] if small else ATTENTION.get(model, [])
    ):
        qkv = [torch.randn(images, queries, 3, heads, size, device=device, dtype=BF16) for _ in range(2)]
        crossed = torch.randn(images, keys, 2, heads, size, device=device, dtype=BF16)
        inverse = torch.full((heads * size,), 30.0, device=device)
        lengths = torch.full((images,), keys, dtype=torch.int32, device=device) if arguments else None

        def call(i: int, run: Callable[..., Any], qkv: Any = qkv, crossed: Any = crossed) -> Any:
            q, *kv = qkv[i % 2].unbind(2)
            return run(q, *(kv if q.shape[1] == crossed.shape[1] else crossed.unbind(2)))

        function = attention if device == "cuda" else attention_reference
        options: dict[str, Any] = {"inverse": inverse, "dtype": INT8, "lengths": lengths}
        runs: dict[str, Run] = {"default": partial(call, run=partial(function, **options))}
        if device == "cuda":
            for shape in VARIANTS[size, keys <= 80]:
                variant = attention_source.AttentionVariant(*shape[:3], "int8", shape[3], size, arguments)
                runs[variant.name] = partial(call, run=partial(attention, **options, variant=variant))
            for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
                runs[f"torch {name}"] = partial(call, run=partial(_torch_attention, backend))
            if arguments:
                out = torch.empty(images, queries, heads * size, dtype=INT8, device=device)
                flash = partial(flash_attention.flash, lengths=lengths, inverse=inverse, out=out, causal=False)
                runs["triton"] = partial(call, run=flash)
        name = f"attention {images}x{heads}x{queries}x{keys}x{size}"
        yield Case(name, 4.0 * images * heads * queries * keys * size, runs)


def _torch_attention(backend: SDPBackend, *qkv: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in qkv)
        return F.scaled_dot_product_attention(q, k, v)


def decodes(model: str, device: str, *, small: bool) -> Iterator[Case]:
    """One layer's attention of decoding rows over 8-bit pages, by warps and blocks of a multiprocessor."""
    for batch, context in ((2, 40),) if small else DECODE if model == "llama" else ():
        pages = -(-context // 16)
        heads, size = (4, 16) if small else (32, 128)
        cache = KVCache(layers=2, kv_heads=heads // 4, head_dim=size, pages=batch * pages, sequences=batch,
                        context=context, dtype=BF16, device=device, kind="int8", turned=True)  # fmt: skip
        for sequence in range(batch):
            cache.place(sequence, list(range(sequence * pages, (sequence + 1) * pages)))
        cache.settle()
        q = torch.randn(batch, heads, size, device=device, dtype=BF16)
        rows = (torch.full((batch,), context - 1, dtype=torch.int32, device=device),
                torch.arange(batch, dtype=torch.int32, device=device), size**-0.5)  # fmt: skip

        def call(i: int, shape: Any, cache: KVCache = cache, q: Tensor = q, rows: Any = rows, n: int = context) -> Any:
            if not q.is_cuda:
                return decode_kernel.decode_reference(q, *cache.layer(i % 2), cache.table, *rows)
            decode_hopper.shape = shape
            return decode_kernel.decode(q, *cache.layer(i % 2), cache.table, *rows, parts=decode_kernel.part_count(n))

        shapes = [decode_hopper.shape, (4, 1), (8, 1)]
        runs: dict[str, Run] = {
            "default" if not i else str(shape): partial(call, shape=shape) for i, shape in enumerate(shapes)
        }
        runs = runs if device == "cuda" else {"default": runs["default"]}
        yield Case(f"decode {batch}x{context}", cache.size_bytes / 2, runs)


def memory(model: str, device: str, *, small: bool) -> Iterator[Case]:
    """Kernels by the bytes that must be read and written once."""
    cuda = device == "cuda"
    for name, shape in MEMORY.get(model, []):
        shape = (*(min(size, 8) for size in shape[:-1]), 128) if small else shape
        rows, width = math.prod(shape[:-1]), shape[-1]
        xs, ys = ([torch.randn(shape, device=device, dtype=BF16) for _ in range(2)] for _ in range(2))
        weight, inverse = torch.ones(width, device=device, dtype=BF16), torch.full((width,), 20.0, device=device)
        unit, norms = torch.ones(1, device=device), torch.ones(2, 128, device=device, dtype=BF16)
        qkvs = [torch.cat([x] * 3, -1) for x in xs] if name == "rotate" else []
        angles = torch.randn(rows, 128, device=device) if name == "rotate" else unit
        heads = width // 128
        calls: dict[str, tuple[int, Callable[..., Any], Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
            "copy": (4, Tensor.copy_, Tensor.copy_, lambda i: (ys[i], xs[i])),  # noqa: B023
            "layer_norm": (3, layer_norm.layer_norm_int8, layer_norm.layer_norm_int8_reference,
                           lambda i: (xs[i], weight, weight, 1e-5, unit)),  # noqa: B023
            "quantize": (3, quantize.quantize, quantize.quantize_reference, lambda i: (xs[i], unit)),  # noqa: B023
            "quantize_rows": (3, quantize.quantize_rows, quantize.quantize_rows_reference, lambda i: (xs[i],)),  # noqa: B023
            "group_norm": (5, group_norm.group_norm_int8, group_norm.group_norm_int8_reference,
                           lambda i: (xs[i], 32, weight, weight, 1e-5, unit, True)),  # noqa: B023
            "rms_norm": (3, rms_norm.rms_norm, rms_norm.rms_norm_reference,
                         lambda i: (xs[i], weight, 1e-5, inverse, INT8)),  # noqa: B023
            "residual_norm": (7, rms_norm.residual_norm, rms_norm.residual_norm_reference,
                              lambda i: (xs[i], ys[i], weight, weight, 1e-5, inverse, INT8)),  # noqa: B023
            "rotate": (8, rotary.rotate_heads, rotary.rotate_heads_reference,
                       lambda i: (qkvs[i], angles, heads, heads)),  # noqa: B023
        }  # fmt: skip
        bytes_each, function, reference, call = calls[name]
        options = {"norms": norms, "eps": 1e-5, "interleaved": True} if name == "rotate" else {}
        run = partial(function if cuda else reference, **options)
        label = f"{name} {'x'.join(map(str, shape))}"
        yield Case(label, float(bytes_each * rows * width), {"default": lambda i, r=run, g=call: r(*g(i % 2))})


PARTS: dict[str, Callable[..., Iterator[Case]]] = {
    "products": products, "attention": attentions, "decode": decodes, "memory": memory,
}  # fmt: skip


def compile_all(models: Sequence[str]) -> int:
    """Compile the programs of all products on all cores; in processes, since NVRTC may hold a lock."""
    programs = {
        gemm_source.source(gemm_source.GemmVariant(
            tile.blocks, tile.columns, tile.cluster, gemm.stages(tile.rows, tile.columns), geglu=product.kernel in (
                "geglu", "swiglu"), turns=bool(tile.turns), silu=product.kernel == "swiglu", group=tile.group))
        for model in models if model != "llama" for product in PRODUCTS[model][1] for tile in _tiles(product, 4096)
    }  # fmt: skip
    with get_context("fork").Pool() as pool:
        return len(pool.map(driver.compiled, sorted(programs), chunksize=1))


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(case: Case) -> dict[str, Any]:
    """Milliseconds by variant at full clock; of the best four, and of the default, for longer; what fails, and why."""
    times, failed, wrong = dict[str, float](), dict[str, str](), list[str]()
    expected = case.runs["default"](0) if case.tile is not None else None
    for variant, run in case.runs.items():
        try:
            if expected is not None and variant != "bf16" and not torch.equal(run(0), expected):
                wrong.append(variant)
            times[variant] = milliseconds(run, sets=case.sets, repeats=8)
        except Exception as error:  # too large for this card
            failed[variant] = str(error)[:120]
    best = sorted((name for name in times if name != "bf16" and not name.startswith("torch")), key=times.__getitem__)
    longer = {}
    for variant in {*best[:4], "default"} & times.keys():

        def several(run: Run = case.runs[variant]) -> None:
            for i in range(case.sets):
                run(i)

        longer[variant] = window_ms(several, windows=1, window_s=0.1) / case.sets
    winner = min(longer, key=longer.__getitem__)
    return {
        "ms": longer[winner], "variant": winner, "rate": round(case.work / longer[winner] / 1e6, 1), "short_ms": times,
        "longer_ms": longer, "failed": failed, "wrong": wrong, "tile": case.tile,
    }  # fmt: skip


def run_part(
    part: str, models: Sequence[str], device: str, *, small: bool,
    each: Callable[[dict[str, Any]], object] = lambda cases: None,
) -> dict[str, Any]:  # fmt: skip
    """Measure a part's cases; `each` gets all so far after every case."""
    torch.manual_seed(0)
    measured = {}
    with Clocks() as clocks, torch.inference_mode():
        for model in models:
            for case in PARTS[part](model, device, small=small):
                measured[f"{model} {case.name}"] = figures = measure(case)
                text = f"{figures['ms']:.4f} ms, {figures['rate']:,.0f} G/s, {figures['variant']}"
                record.progress(f"{model} {case.name}: {text}{' WRONG' if figures['wrong'] else ''}")
                each(measured)
    return {"cases": measured, "clocks": clocks.summary()}


def merged(table: dict[str, Any], cases: dict[str, Any]) -> dict[str, Any]:
    """A table of tiles with the best of these cases: kernel → "N,K" → bucket of rows → tile."""
    for figures in cases.values():
        times = {name: ms for name, ms in figures["longer_ms"].items() if "," in name and name not in figures["wrong"]}
        if figures["tile"] is not None and times:  # "default" is one of the tiles, timed once more
            kernel, shape, rows = figures["tile"]
            numbers = [int(number) for number in min(times, key=times.__getitem__).split(",")]
            key = numbers if numbers[4] > 1 else numbers[:4]
            table.setdefault(kernel, {}).setdefault(shape, {})[rows] = key
    return table


def write(table: dict[str, Any], multiprocessors: int, path: Path) -> None:
    """Write a table of tiles, one line a shape."""
    kernels = [f' "multiprocessors": {multiprocessors}']
    for kernel, shapes in table.items():
        lines = ",\n".join(f'  "{shape}": {json.dumps(winners)}' for shape, winners in shapes.items())
        kernels.append(f' "{kernel}": {{\n{lines}\n }}')
    path.write_text("{\n" + ",\n".join(kernels) + "\n}\n")


TILED = ("sdxl", "zimage")  # models whose products' tiles are in tables


def tune(models: Sequence[str], path: Path) -> None:
    """Measure the products' tiles on the current GPU, and write its table with the best of them, after each shape.

    Shapes that were not measured keep what the device's table has so far.
    """
    processors = driver.multiprocessors(torch.cuda.current_device())
    table = copy.deepcopy(tiles.table(torch.cuda.get_device_name(), processors))
    record.progress(f"compiled {compile_all(models)} programs")
    run_part("products", models, "cuda", small=False, each=lambda cases: write(merged(table, cases), processors, path))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("kernels", __doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help="default: all")
    parser.add_argument("--models", default=",".join(PRODUCTS), help="default: %(default)s")
    options = parser.parse_args(arguments)
    names = ("compile", *PARTS)
    models = command.names(options.models, PRODUCTS, "--models")
    parts = command.names(",".join(options.parts or names), names, "part")
    for part in parts:
        if part == "compile":
            record.progress(f"compiled {compile_all(models) if options.device == 'cuda' else 0} programs")
            continue
        measured = run_part(part, models, options.device, small=options.tiny)
        record.publish(f"kernels-{part}", measured, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
