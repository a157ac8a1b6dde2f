"""Measures what 2:4 sparsity brings, and costs: `python -m benchmarks.sparse [products step quality]`.

`products`: those of Llama-3.1-8B and SDXL, sparse beside our dense INT8 kernels and cuSPARSELt; each agrees bit for
bit with the dense kernel on the pruned weights first. `step`: one token of 1 and 64
users on seeded weights of 8B's shape. `quality`: the perplexity of `--text-models` (folders that `training.prune`
writes, and what they were made of) in INT8 on `--captions`, and their size. `--device cpu --tiny` rehearses `step`,
whose weights are then expanded, and `quality`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import weights
from benchmarks.harness import command, record
from benchmarks.harness.timing import Clocks, milliseconds
from core.kernels.cuda import sparse_gemm, stream, stream_kernel
from core.kernels.cuda.linear import linear_geglu_int8, linear_int8
from core.kernels.cuda.sparse_gemm import SparseWeight
from core.quant import sparse
from pipeline.text import prompts

PARTS = ("products", "step", "quality")
LLAMA = ((4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (6144, 4096, False))  # columns, depth, gated
LLAMA_ROWS = (16, 256, 2048, 8192)
SDXL = (
    ((640, 640, False), 65536), ((10240 // 2, 640, True), 65536), ((640, 2560, False), 65536),
    ((3840, 1280, False), 16384), ((1280, 1280, False), 16384), ((10240, 1280, True), 16384),
    ((1280, 5120, False), 16384),
)  # fmt: skip
"""Of 16 images."""


def products() -> Iterator[dict[str, Any]]:
    """What `_product` measures of all shapes."""
    for rows in LLAMA_ROWS:
        for shape in LLAMA:
            yield _product(*shape, rows)
    for shape, rows in SDXL:
        yield _product(*shape, rows)


def _product(columns: int, depth: int, gated: bool, rows: int) -> dict[str, Any]:
    """Microseconds by kernel, and the rate in TOP/s, of which pruned weights count as if they were there."""
    few = rows <= stream_kernel.MOST_ROWS
    x = torch.randint(-127, 128, (rows, depth), dtype=torch.int8, device="cuda")
    dense = torch.randint(-127, 128, (columns, depth), dtype=torch.int8, device="cuda")
    dense *= sparse.mask(torch.rand(dense.shape, device="cuda"))
    weight, scale = SparseWeight(*sparse.compress(dense)), torch.rand(columns, device="cuda") * depth**-0.5 / 5000
    inverse = torch.full((columns // 2,), 9.0, device="cuda")
    # Few rows are read with weights from memory, not from the L2: several copies take turns.
    sets = max(2, round(200e6 / dense.nbytes)) if few else 1
    denses = [dense, *(dense.clone() for _ in range(sets - 1))]
    sparses = [weight, *(SparseWeight(weight.values.clone(), weight.metadata.clone()) for _ in range(sets - 1))]

    runs: dict[str, Callable[[int], Any]]
    if gated:
        runs = {
            "sparse": lambda i: sparse_gemm.gated(x, sparses[i], scale, None, inverse),
            "dense": lambda i: linear_geglu_int8(x, denses[i], scale, None, inverse),
        }
    else:
        runs = {
            "sparse": lambda i: sparse_gemm.product(x, sparses[i], scale),
            "dense": lambda i: linear_int8(x, denses[i], scale),
        }
    equal = torch.equal(runs["dense"](0), runs["sparse"](0))
    if few and gated:
        runs["dense, few"] = lambda i: stream.gated(x, denses[i], scale, None, inverse, torch.int8)
    elif few:
        runs["dense, few"] = lambda i: stream.stream(x, denses[i])
        runs["sparse, few"] = lambda i: sparse_gemm.sums(x, sparses[i])
        equal &= torch.equal(stream.stream(x, dense).sum(0).int(), sparse_gemm.sums(x, weight).sum(0).int())
    if torch.backends.cusparselt.is_available():
        runs["cuSPARSELt"] = _cusparselt(dense, x)
    times = {name: 1000 * milliseconds(run, sets=sets, repeats=10) for name, run in runs.items()}
    return {
        "columns": columns, "depth": depth, "gated": gated, "rows": rows, "equal": equal, "us": times,
        "tops": {name: round(2e-6 * rows * columns * depth / us, 1) for name, us in times.items()},
    }  # fmt: skip


def _cusparselt(dense: Tensor, x: Tensor) -> Callable[[int], Any]:
    compressed: Tensor = torch._cslt_compress(dense)
    return lambda _: torch._cslt_sparse_mm(compressed, x.t(), out_dtype=torch.bfloat16, transpose_result=True)


def qualities(names: Sequence[str], captions: Sequence[str], *, calibrated: int) -> Iterator[dict[str, Any]]:
    """The perplexity of all captions but the first `calibrated`, and bytes of linear layers, by model and scheme."""
    from llm.load import load
    from llm.quantized import Layerwise, quantize

    schemes: tuple[tuple[str, Any, Layerwise], ...] = (
        ("unquantized", None, Layerwise()),
        ("INT8", "int8", Layerwise()),
        ("INT8, 2:4 by Wanda", "int8-sparse", Layerwise()),
        ("INT8, 2:4 by SparseGPT (`--gptq`)", "int8-sparse", Layerwise(gptq=True)),
    )
    for name in names:
        model = load(name)
        encode = partial(model.tokenizer.backend_tokenizer.encode, add_special_tokens=False)
        start = [] if model.tokenizer.bos_token_id is None else [model.tokenizer.bos_token_id]
        ids = [(start + encode(text).ids)[: model.context] for text in captions]
        read, ids = ids[:calibrated], [text for text in ids[calibrated:] if len(text) > 1]
        pruned = _is_sparse(model.network)
        for label, scheme, layerwise in schemes:
            # SparseGPT would fill the zeros of a pruned model, whose dense INT8 is the sparse one, bit for bit.
            if pruned and (layerwise.gptq or scheme == "int8"):
                continue
            quantized = model if scheme is None else quantize(model, read, scheme=scheme, layerwise=layerwise)
            yield {
                "model": Path(name).name, "weights": label, "perplexity": weights.perplexity(quantized, ids),
                "texts": len(ids), "parameters": model.network.num_parameters(),
                "layer_bytes": _layer_bytes(quantized.network),
            }  # fmt: skip


def _is_sparse(network: Any) -> bool:
    weight: Tensor = network.model.layers[0].mlp.up_proj.weight
    return bool(((weight.unflatten(1, (-1, sparse.GROUP)) != 0).sum(-1) <= sparse.KEPT).all())


def _layer_bytes(network: Any) -> int:
    """Bytes of the blocks' linear layers."""
    return sum(
        tensor.nbytes for name, tensor in network.model.state_dict().items() if name.split(".")[-2].endswith("_proj")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("sparse", __doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help="default: products and step")
    parser.add_argument("--text-models", nargs="+", default=[], metavar="DIR", help="of `quality`")
    parser.add_argument("--captions", type=Path, metavar="FILE", help="of `quality`: one a line, or a .tsv")
    options = parser.parse_args(arguments)
    parts = command.names(",".join(options.parts or PARTS[:2]), PARTS, "part")
    if "quality" in parts and (options.captions is None or not options.text_models):
        parser.error("--captions, --text-models: quality needs both")
    torch.manual_seed(0)
    measured: dict[str, Any] = {}
    with Clocks() as clocks, torch.inference_mode():
        if "products" in parts:
            measured["products"] = []
            for figures in products():
                measured["products"].append(figures)
                record.progress(f"{figures}")
        if "step" in parts:
            measured["steps"] = [
                *weights.steps(
                    options.device,
                    small=options.tiny,
                    precisions=("int8", "int8-sparse"),
                    counts=(1, 2) if options.tiny else (1, 64),
                )
            ]
        if "quality" in parts:
            calibrated, count = (4, 4) if options.tiny else (256, 500)
            texts = [row.text for row in prompts.read(options.captions, calibrated + count)]
            measured["quality"] = []
            for figures in qualities(options.text_models, texts, calibrated=calibrated):
                measured["quality"].append(figures)
                record.progress(f"{figures}")
    record.publish("sparse", measured | {"clocks": clocks.summary()}, options.results)
    show(measured)
    return 0


def show(measured: dict[str, Any]) -> None:
    """Print a table for each part."""
    if "products" in measured:
        kinds = ("dense, few", "dense", "sparse, few", "sparse", "cuSPARSELt")
        record.table(
            "µs (TOP/s)", ("K×N", "rows", *kinds, "bits"),
            [(f"{case['depth']}×{case['columns']}{' gated' if case['gated'] else ''}", case["rows"],
              *(f"{case['us'][kind]:.1f} ({case['tops'][kind]:.0f})" if kind in case["us"] else None for kind in kinds),
              "equal" if case["equal"] else "DIFFER")
             for case in measured["products"]],
        )  # fmt: skip
    if "steps" in measured:
        record.table(
            "a token of each of so many users", ("precision", "users", "ms", "tokens/s", "GB of weights"),
            [(step["precision"], step["sequences"], f"{step['ms']:.3f}", step["tokens_per_s"],
              f"{step['weight_bytes'] / 1e9:.2f}") for step in measured["steps"]],
        )  # fmt: skip
    if "quality" in measured:
        record.table(
            "captions", ("model", "weights", "perplexity", "kB of layers"),
            [(case["model"], case["weights"], f"{case['perplexity']:.3f}", round(case["layer_bytes"] / 1e3))
             for case in measured["quality"]],
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
