"""Measures what fewer bits of weights bring, and cost: `python -m benchmarks.weights [products step quality]`.

`products`: those of Llama-3.1-8B for 1 to 64 rows in bf16, INT8 and the three kinds of 4 bits (every tile that is near
the default), and for many rows beside cuBLAS and INT8; each agrees with a reference first. `step`: one token of one
user, whole, in a CUDA graph, on seeded weights of that shape. `quality`: the perplexity of `--text-model` on a file of
`--captions`, by way of quantization, each calibrated on the first 512 of them and measured on the next 1,000.
`--device cpu --tiny` rehearses all of it, in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import command, record
from benchmarks.harness.timing import Clocks, milliseconds, window_ms
from core.kernels.cuda import int4_kernel, stream_kernel
from core.kernels.cuda import linear as linears
from core.kernels.cuda.int4_kernel import Int4Tile, Int4Weight
from core.kernels.kv_cache import PAGE, KVCache
from core.quant.fp4 import Fp4Linear
from core.quant.int4 import Int4Linear
from core.quant.linear import quantize_weight
from core.quant.w4a8 import W4A8Linear
from pipeline.text import prompts

BF16, INT8 = torch.bfloat16, torch.int8
SHAPES = ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False))  # columns, depth, gated
ROWS, MANY = (1, 2, 4, 8, 16, 64), (256, 2048)
PARTS = ("products", "step", "quality")
PRECISIONS = ("bf16", "int8", "w4a16", "w4a8", "nvfp4")
FOUR = ("int4", "w4a8", "fp4")
_EMOJI_LM = Path(__file__).resolve().parent.parent / "models" / "emoji-lm"
_CONTEXT = 192  # tokens of the one user
_AWAY = 200e6  # bytes of weights, several times the L2
_SLACK = 0.02  # of the largest magnitude: bf16 of inputs and results
Run = Callable[[int], Any]


class Case(NamedTuple):
    """One kernel at one shape: what a call reads in bytes, or computes, and the calls by tile, "default" first."""

    kind: str
    rows: int
    shape: str
    work: float
    runs: dict[str, Run]
    expected: Tensor | None = None
    sets: int = 1


def _copies(size_bytes: int, device: str) -> int:
    return max(2, math.ceil(_AWAY / size_bytes)) if device == "cuda" else 1


def _int4(columns: int, depth: int, device: str, *, asymmetric: bool = False) -> tuple[Int4Weight, Tensor]:
    """A weight as the kernel reads it, and as bf16."""
    layer = Int4Linear.of_taps(torch.randn(columns, 1, depth, device=device) * depth**-0.5, None)
    if asymmetric:
        layer.zero = torch.randint(-8, 8, layer.scale.shape, device=device, dtype=INT8)
    return int4_kernel.packed(layer.weight, layer.scale, layer.zero), layer.dense().to(BF16)


def _weight(kind: str, columns: int, depth: int, device: str) -> tuple[Int4Weight, Tensor]:
    """A weight of any kind of 4 bits, as `_int4`."""
    if kind == "int4":
        return _int4(columns, depth, device)
    plain = torch.randn(columns, depth, device=device) * depth**-0.5
    if kind == "fp4":
        fp4 = Fp4Linear.of_taps(plain[:, None], None)
        return int4_kernel.packed_fp4(fp4.weight, fp4.scale, fp4.total), fp4.dense().to(BF16)
    w4a8 = W4A8Linear.of_taps(plain[:, None] / 30, None)  # inputs are levels, 30 times as large
    return int4_kernel.packed_w4a8(w4a8.weight, w4a8.group, w4a8.scale), w4a8.dense().to(BF16)


def _near(usual: Int4Tile, blocks: int) -> list[Int4Tile]:
    """Tiles around the default one."""
    shapes = {8: ((64, 4, 3), (64, 4, 6), (64, 2, 4), (128, 4, 3), (128, 8, 4), (32, 2, 4)),
              16: ((64, 4, 2), (64, 4, 4), (64, 2, 3), (128, 8, 3)), 32: ((64, 4, 2), (64, 4, 3), (128, 4, 2)),
              64: ((64, 4, 2), (128, 8, 3), (128, 4, 3), (64, 8, 3))}[usual.rows]  # fmt: skip
    tiles = {Int4Tile(usual.rows, columns, usual.splits, warps, stages) for columns, warps, stages in shapes}
    tiles |= {replace(usual, rows=16, stages=3)} if usual.rows == 8 else set()
    for splits in (usual.splits // 2, usual.splits * 2):
        if usual.rows <= 16 and usual.splits > 1 and blocks % splits == 0:
            tiles.add(replace(usual, splits=splits))
    return sorted(tiles - {usual}, key=str)


def products(device: str, *, small: bool) -> Iterator[Case]:
    shapes, counts = (((64, 256, False), (128, 256, True)), (2,)) if small else (SHAPES, ROWS)
    cuda = device == "cuda"
    dtype = BF16 if cuda else torch.float32  # the interpreter has no bf16
    for columns, depth, gated in shapes:
        shape = f"{depth}×{columns}{' gated' if gated else ''}"
        copies = _copies(columns * depth // 2, device)
        fours = {kind: [_weight(kind, columns, depth, device) for _ in range(copies)] for kind in FOUR}
        dense = fours["int4"][0][1].to(dtype)
        plain = [dense, *(torch.randn_like(dense) for _ in range(_copies(2 * columns * depth, device) - 1))]
        eights = [quantize_weight(dense / 30) for _ in range(_copies(columns * depth, device))]
        inverse = torch.full((columns // 2,), 20.0, device=device)
        for rows in counts:
            x = torch.randn(rows, depth, device=device, dtype=dtype)
            levels = (x * 30).round().clamp(-127, 127).to(INT8)
            expected = _expected(x, dense, gated=gated)
            runs: dict[str, tuple[int, int, Callable[..., Any], Tensor | None]] = {
                "bf16": (len(plain), 2 * columns * depth, partial(_plain, x, plain, gated), expected),
                "int8": (len(eights), columns * depth, partial(_eight, levels, eights, inverse, gated), None),
            }
            for kind, weights in fours.items():
                by = levels if kind == "w4a8" else x
                result = _expected(by, weights[0][1], gated=gated) if kind != "w4a8" or not gated else None
                runs[kind] = copies, weights[0][0].nbytes, partial(_four, by, weights, gated), result
            for kind, (sets, size, run, result) in runs.items():
                tiles = {"default": run}
                if kind in FOUR and cuda:
                    usual = int4_kernel.choose(rows, columns, depth // 256, size=1 + (kind != "w4a8"), gated=gated)
                    tiles |= {_name(tile): partial(run, tile=tile) for tile in _near(usual, depth // 256)}
                yield Case(kind, rows, shape, size, tiles, result, sets)
    yield from _others(device, dtype, small=small)


def _others(device: str, dtype: torch.dtype, *, small: bool) -> Iterator[Case]:
    """Zero points, and many rows beside cuBLAS."""
    columns, depth, few, counts = (64, 256, 2, (70,)) if small else (4096, 4096, 1, MANY)
    weight, dense = _int4(columns, depth, device, asymmetric=True)
    x = torch.randn(few, depth, device=device, dtype=dtype)
    runs: dict[str, Run] = {"default": partial(_four, x, [(weight, dense)], False)}
    yield Case("int4 zeros", few, f"{depth}×{columns}", weight.nbytes, runs, _expected(x, dense, gated=False))
    shape = f"{depth}×{columns}"
    for many, kind in itertools.product(counts, FOUR):
        x = torch.randn(many, depth, device=device, dtype=dtype)
        work = 2.0 * many * columns * depth
        weight, dense = _weight(kind, columns, depth, device)
        if kind == "w4a8":
            x = (x * 30).round().clamp(-127, 127).to(INT8)
            eight, scale = quantize_weight(dense)
            if device == "cuda":
                eights: dict[str, Run] = {"default": partial(_hopper, x, eight, scale)}
                yield Case("int8", many, shape, work, eights, _expected(x, dense, gated=False))
        elif kind == "int4":
            plain = dense.to(dtype)
            yield Case(
                "bf16", many, shape, work, {"default": partial(_cublas, x, plain)}, _expected(x, dense, gated=False)
            )
        runs = {"default": partial(_many, x, weight, dtype, None)}
        for tile in (Int4Tile(128, 128, 1, 8, 2), Int4Tile(128, 64, 1, 4, 3), Int4Tile(64, 128, 1, 4, 3),
                     Int4Tile(128, 256, 1, 8, 3), Int4Tile(256, 128, 1, 8, 3), Int4Tile(64, 64, 1, 4, 4)):  # fmt: skip
            if device == "cuda":
                runs[_name(tile)] = partial(_many, x, weight, dtype, tile)
        yield Case(kind, many, shape, work, runs, _expected(x, dense, gated=False))


def _cublas(x: Tensor, weight: Tensor, i: int) -> Tensor:
    return F.linear(x, weight)


def _hopper(x: Tensor, weight: Tensor, scale: Tensor, i: int) -> Tensor:
    return linears.linear_int8(x, weight, scale)


def _many(x: Tensor, weight: Int4Weight, dtype: torch.dtype, tile: Int4Tile | None, i: int) -> Tensor:
    return int4_kernel.product(x, weight, dtype, tile=tile)


def _expected(x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
    y = F.linear(x.float(), weight.float())
    if not gated:
        return y
    gate, up = y.chunk(2, dim=1)
    return F.silu(gate) * up


def _plain(x: Tensor, weights: Sequence[Tensor], gated: bool, i: int) -> Tensor:
    if gated:
        return stream_kernel.gated(x, weights[i], None, None, None, x.dtype)
    return stream_kernel.stream(x, weights[i])


def _eight(x: Tensor, weights: Sequence[tuple[Tensor, Tensor]], inverse: Tensor, gated: bool, i: int) -> Tensor:
    weight, scale = weights[i]
    if gated:
        return stream_kernel.gated(x, weight, scale, None, inverse, INT8)
    return stream_kernel.stream(x, weight)


def _four(
    x: Tensor, weights: Sequence[tuple[Int4Weight, Tensor]], gated: bool, i: int, tile: Int4Tile | None = None
) -> Tensor:
    weight = weights[i][0]
    if gated:
        return int4_kernel.gated(x, weight, None, None, x.dtype, tile=tile)
    sums = int4_kernel.stream(x, weight, tile=tile)
    return sums if i or weight.scale is None else sums * weight.scale  # the first is compared


def _name(tile: Int4Tile) -> str:
    return ",".join(str(getattr(tile, name)) for name in tile.__slots__)


def measure(case: Case) -> dict[str, Any]:
    """Microseconds by tile, what fails or is wrong, and of the fastest tile the rate in G/s."""
    times, failed = dict[str, float](), dict[str, str]()
    for tile, run in case.runs.items():
        try:
            if case.expected is not None and (error := _error(run(0), case.expected)) > _SLACK:
                failed[tile] = f"is wrong: its error is {error:.3f} of the largest magnitude"
                continue
            times[tile] = 1000 * milliseconds(run, sets=case.sets, repeats=20)
        except Exception as error:  # too large for this card
            failed[tile] = str(error)[:120]
    best = min(times, key=times.__getitem__, default="")
    return {
        "kind": case.kind, "rows": case.rows, "shape": case.shape, "us": times.get(best), "tile": best,
        "default_us": times.get("default"), "g_per_s": round(case.work / times[best] / 1e3, 1) if best else None,
        "by_tile": times, "failed": failed,
    }  # fmt: skip


def _error(result: Tensor, expected: Tensor) -> float:
    whole = result.float().sum(0) if result.dim() == 3 else result.float()
    return float((whole - expected).abs().max() / expected.abs().max())


# -- a whole step ------------------------------------------------------------------------------------------------------


def steps(
    device: str, *, small: bool, precisions: Sequence[str] = PRECISIONS, counts: Sequence[int] = (1,)
) -> Iterator[dict[str, Any]]:
    """Milliseconds of one decoding step of so many sequences, and the bytes of weights that it reads, by precision."""
    from core.ops.cuda_tokens import FusedBatch
    from llm.backends.cuda import CudaDecoder
    from llm.checkpoints.load import load
    from llm.checkpoints.quantized import quantize
    from llm.families import tiny

    name = tiny.TINY if small else tiny.LLAMA_8B
    context = 32 if small else _CONTEXT
    plain = load(name, precision="bf16" if device == "cuda" else "fp32", device=device)
    for precision in precisions:
        scheme: Any = precision
        texts = [list(range(1, 65))]
        model = plain if precision == "bf16" else quantize(plain, texts, scheme=scheme)
        most, pages = max(counts), context // PAGE
        cache = KVCache(
            layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim, pages=pages * most, sequences=most,
            context=context, dtype=model.dtype, device=model.device, kind="int8", turned=True,
        )  # fmt: skip
        for sequence in range(most):
            cache.place(sequence, list(range(pages * sequence, pages * (sequence + 1))))
        cache.settle()
        decoder = CudaDecoder(model.network, cache)
        for count in counts:
            token = torch.full((count,), 7, dtype=torch.int32, device=device)
            sequences = torch.arange(count, dtype=torch.int32, device=device)
            rows = FusedBatch(token, torch.full_like(token, context - 1), sequences, None, None, None, 1)
            logits = torch.empty(count, decoder.vocabulary, device=device)
            ms = window_ms(partial(decoder, rows, logits))
            yield {
                "precision": precision, "sequences": count, "ms": ms, "tokens_per_s": round(1000 * count / ms, 1),
                "weight_bytes": decoder.ops.weight_bytes, "finite": bool(logits.isfinite().all()),
            }  # fmt: skip
        del decoder, model, cache


# -- what it costs -----------------------------------------------------------------------------------------------------


def qualities(name: str, texts: Sequence[str], device: str, *, calibrated: int) -> Iterator[dict[str, Any]]:
    """The perplexity of all texts but the first `calibrated`, which calibration reads, by way of quantization."""
    from llm.checkpoints.load import load
    from llm.checkpoints.quantized import Layerwise, quantize
    from llm.families.recipe import ALPHA, llama

    with torch.inference_mode(False):  # weights that are read in inference mode cannot be embedded with
        model = load(name, precision="bf16" if device == "cuda" else "fp32", device=device)
    start = [] if model.tokenizer.bos_token_id is None else [model.tokenizer.bos_token_id]
    encode = partial(model.tokenizer.backend_tokenizer.encode, add_special_tokens=False)
    ids = [(start + encode(text).ids)[: model.context] for text in texts]
    ids, read = [text for text in ids[calibrated:] if len(text) > 1], ids[:calibrated]
    plain = None
    ways: dict[str, tuple[Any, float | None, Layerwise]] = {
        "unquantized": (None, None, Layerwise()),
        "INT8, SmoothQuant": ("int8", ALPHA, Layerwise()),
        "W4A8, SmoothQuant": ("w4a8", ALPHA, Layerwise()),
        "W4A8, SmoothQuant and GPTQ (`--gptq`)": ("w4a8", ALPHA, Layerwise(gptq=True)),
        "NVFP4": ("nvfp4", None, Layerwise()),
        "INT4, rounded to nearest": ("w4a16", None, Layerwise()),
        f"INT4, inputs scaled (alpha {ALPHA:g})": ("w4a16", ALPHA, Layerwise()),
        "INT4, scales searched (`--search`)": ("w4a16", ALPHA, Layerwise(search=True)),
        "INT4, GPTQ (`--plain --gptq`)": ("w4a16", None, Layerwise(gptq=True)),
        "INT4, both (`--search --gptq`)": ("w4a16", ALPHA, Layerwise(search=True, gptq=True)),
    }
    for way, (scheme, alpha, layerwise) in ways.items():
        quantized = quantize(model, read, recipe=llama(alpha), scheme=scheme, layerwise=layerwise) if scheme else model
        value = perplexity(quantized, ids)
        plain = plain or value
        yield {"way": way, "perplexity": value, "percent": 100 * (value / plain - 1), "texts": len(ids),
               "tokens": sum(map(len, ids))}  # fmt: skip


def perplexity(model: Any, texts: Sequence[Sequence[int]]) -> float:
    """The perplexity of a token of these texts, but for each one's first."""
    from llm.backends.attention import cacheless

    total, count = 0.0, 0
    model.network.set_attn_implementation(cacheless(model.network))  # a whole text at once needs no cache
    for _, alike in itertools.groupby(sorted(map(list, texts), key=len), key=len):
        for tokens in torch.tensor([*alike], device=model.device).split(64):
            logs = model.network(tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
            total -= float(logs.gather(2, tokens[:, 1:, None]).sum())
            count += tokens[:, 1:].numel()
    return math.exp(total / count)


# -- tables ------------------------------------------------------------------------------------------------------------


def show(cases: Sequence[dict[str, Any]]) -> None:
    """Print one line for each shape and number of rows: microseconds, and TB/s (TFLOP/s of many rows)."""
    lines: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for case in cases:
        lines.setdefault((case["shape"], case["rows"]), {})[case["kind"]] = case

    def cell(case: dict[str, Any] | None) -> str | None:
        if case is None:
            return None
        return f"{case['us']:.1f} ({case['g_per_s'] / 1000:.2f})" if case["us"] else "failed"

    record.table(
        "µs of a product (TB/s; TFLOP/s where rows are many)",
        ("K×N", "rows", "bf16", "INT8", *(f"{kind}{part}" for kind in FOUR for part in ("", " default", " tile")),
         "INT4 with zeros"),
        [(shape, rows, cell(kinds.get("bf16")), cell(kinds.get("int8")),
          *itertools.chain.from_iterable(
              (cell(kinds.get(kind)), _rounded(kinds.get(kind, {}).get("default_us")), kinds.get(kind, {}).get("tile"))
              for kind in FOUR),
          cell(kinds.get("int4 zeros")))
         for (shape, rows), kinds in lines.items()],
    )  # fmt: skip


def _rounded(us: float | None) -> str | None:
    return None if us is None else f"{us:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("weights", __doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help="default: all that it can")
    parser.add_argument("--text-model", default=str(_EMOJI_LM), metavar="NAME", help="of `quality`; default: emoji-lm")
    parser.add_argument("--captions", type=Path, metavar="FILE", help="of `quality`: one a line, or a .tsv")
    options = parser.parse_args(arguments)
    parts = command.names(",".join(options.parts or (PARTS if options.captions else PARTS[:2])), PARTS, "part")
    if "quality" in parts and options.captions is None:
        parser.error("--captions: quality needs a file of captions")
    torch.manual_seed(0)
    measured: dict[str, Any] = {}
    with Clocks() as clocks, torch.inference_mode():
        if "products" in parts:
            measured["products"] = []
            for case in products(options.device, small=options.tiny):
                figures = measure(case)
                measured["products"].append(figures)
                record.progress(f"{case.kind} {case.rows}×{case.shape}: {figures['us']} µs {figures['failed'] or ''}")
        if "step" in parts:
            measured["steps"] = []
            for figures in steps(options.device, small=options.tiny):
                measured["steps"].append(figures)
                record.progress(f"step in {figures}")
        if "quality" in parts:
            calibrated, count = (4, 4) if options.tiny else (512, 1000)
            texts = [row.text for row in prompts.read(options.captions, calibrated + count)]
            measured["quality"] = []
            for figures in qualities(options.text_model, texts, options.device, calibrated=calibrated):
                measured["quality"].append(figures)
                record.progress(f"{figures}")
    record.publish("weights", measured | {"clocks": clocks.summary()}, options.results)
    if "products" in parts:
        show(measured["products"])
    if "step" in parts:
        record.table(
            "one token of one user", ("precision", "ms", "tokens/s", "GB of weights"),
            [(step["precision"], f"{step['ms']:.3f}", step["tokens_per_s"], f"{step['weight_bytes'] / 1e9:.2f}")
             for step in measured["steps"]],
        )  # fmt: skip
    if "quality" in parts:
        record.table(
            f"{measured['quality'][0]['texts']} captions", ("weights", "perplexity", "beside unquantized"),
            [(figures["way"], f"{figures['perplexity']:.3f}", f"{figures['percent']:+.2f}%")
             for figures in measured["quality"]],
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
