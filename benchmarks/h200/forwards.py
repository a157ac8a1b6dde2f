"""Measures single calls of SDXL's parts: UNet forwards in every precision and width, the VAE, the text encoders.

    python -m benchmarks.h200.forwards fused|stock|compiled|vae|encoders [--out folder]

Each prints a table and writes JSON. `engine.py` measures the engine, `numerics.py` accuracy. Weights are random
(`sources.py`): speeds are real, images are not.
"""

# ruff: noqa: B023 -- what closes over a loop's variables here runs within the same turn
from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import provenance, record
from benchmarks.h200 import sources
from benchmarks.h200.engine import GMAC_A_ROW
from benchmarks.h200.numerics import KINDS
from benchmarks.h200.timing import Clocks, milliseconds, sustained, table
from contract.plan import DEPTHS
from core.cuda_graphs import CapturedGraph, CudaRecorder
from core.kernels.cuda import conv, group_norm, layer_norm, linear
from core.ops import fused as layers
from pipeline.families.sdxl.parts import text_encoders
from pipeline.phases import on_gpu
from unet_opt.deepcache import kept

T = TypeVar("T")
ROWS = (16, 8, 4, 2)


def captured(run: Callable[[], T]) -> tuple[Callable[[], T], T]:
    """A CUDA graph of `run`, and the output that its replays write."""
    graph = CapturedGraph(run, (), {}, CudaRecorder(torch.device("cuda")))
    return graph, graph()


def breakdown(run: Callable[[], Any]) -> list[tuple[str, float, int]]:
    """Milliseconds and number of calls by kind, from events around each, in eager mode, and the remaining time."""
    marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def wrap(module: Any, name: str, label: Callable[..., str]) -> tuple[Any, str, Any]:
        original = getattr(module, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = original(*args, **kwargs)
            end.record()
            marks.append((label(*args), start, end))
            return result

        setattr(module, name, timed)
        return module, name, original

    def by_shape(kind: str) -> Callable[..., str]:
        return lambda x, w, *rest: f"{kind} {tuple(x.shape)} {tuple(w.shape)}"

    wrapped = [
        wrap(linear, "linear_int8", by_shape("linear")),
        wrap(linear, "linear_geglu_int8", by_shape("geglu")),
        wrap(conv, "conv3x3_int8", by_shape("conv")),
        wrap(conv, "upsample_conv3x3_int8", by_shape("upsample")),
        wrap(layers, "attention", lambda q, k, *rest: f"attention {tuple(q.shape)} keys {k.shape[1]}"),
        wrap(group_norm, "group_norm_int8", lambda x, *rest: f"group_norm {tuple(x.shape)}"),
        wrap(layer_norm, "layer_norm_int8", lambda x, *rest: f"layer_norm {tuple(x.shape)}"),
        wrap(layers, "quantize", lambda x, *rest: f"quantize {tuple(x.shape)}"),
        wrap(F, "linear", by_shape("bf16 linear")),
        wrap(F, "conv2d", by_shape("bf16 conv")),
    ]
    try:
        for _ in range(2):
            marks.clear()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(400_000_000)  # the device waits, so that launches are never late
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
    finally:
        for module, name, original in wrapped:
            setattr(module, name, original)
    sums: dict[str, tuple[float, int]] = {}
    for name, begin, finish in marks:
        ms, count = sums.get(name, (0.0, 0))
        sums[name] = (ms + begin.elapsed_time(finish), count + 1)
    rows = sorted(((name, ms, count) for name, (ms, count) in sums.items()), key=lambda row: -row[1])
    known = sum(ms for _, ms, _ in rows)
    return [*rows, ("everything else", start.elapsed_time(end) - known, 1), ("sum", start.elapsed_time(end), 1)]


@torch.inference_mode()
def fused(options: argparse.Namespace) -> dict[str, Any]:
    source = sources.model()
    found = sources.ranges(source)
    results: dict[str, Any] = {"rows": {}}
    lines = []
    for name in options.kinds.split(","):
        unet = on_gpu(sources.variant(source, KINDS[name], found), max(ROWS)).denoiser
        for rows in ROWS:
            given = sources.inputs(source, rows)
            kv = unet.prepare_text(given["text"])
            torch.cuda.reset_peak_memory_stats()
            run, (out, *features) = captured(lambda: sources.fused(unet, given, kv))
            with Clocks() as clocks:
                deep = sustained(run, 320 // rows)
            keys = milliseconds(lambda i: unet.prepare_text(given["text"]))
            shallow = {}
            for depth in DEPTHS:
                read = tuple(part.clone() for part in kept(features, depth))
                conditions = {"text_embeds": given["pooled"], "time_ids": given["ids"].to(torch.bfloat16)}
                sample = given["latents"].to(torch.bfloat16)
                quick, _ = captured(
                    lambda: unet.shallow(depth, read, sample, given["timestep"], added_cond_kwargs=conditions)
                )
                shallow[depth] = sustained(quick, 40)
            tflops = 2e-12 * GMAC_A_ROW * 1e9 * rows / (deep * 1e-3)
            peak = torch.cuda.max_memory_allocated() / 2**30
            results["rows"][f"{name} {rows}"] = {
                **{"deep_ms": deep, "shallow_ms": shallow, "keys_ms": keys, "tflops": tflops, "peak_gib": peak},
                **{"std": float(out.float().std()), **clocks.summary()},
            }
            times = (f"{ms:.2f}" for ms in (deep, *shallow.values()))
            lines.append((name, rows, *times, f"{tflops:.0f}", str(clocks.summary())))
            print(*lines[-1], flush=True)
        if name == "int8":
            given = sources.inputs(source, 16)
            kv = unet.prepare_text(given["text"])
            results["breakdown"] = parts = breakdown(lambda: sources.fused(unet, given, kv))
            table(("int8, 16 rows", "ms", "calls"), [(n, f"{ms:.3f}", c) for n, ms, c in parts])
    table(("fused", "rows", "deep ms", *(f"{depth} ms" for depth in DEPTHS), "TFLOP/s", "clocks"), lines)
    return results


@torch.inference_mode()
def stock(options: argparse.Namespace) -> dict[str, Any]:
    source = sources.model()
    model = source.denoiser
    results: dict[str, Any] = {}
    for name in ("channels_last", "contiguous"):
        model = model.to(memory_format=torch.channels_last if name == "channels_last" else torch.contiguous_format)
        for rows in ROWS:
            given = sources.inputs(source, rows)
            if name == "channels_last":
                given["latents"] = given["latents"].contiguous(memory_format=torch.channels_last)
            torch.cuda.reset_peak_memory_stats()
            ms = milliseconds(lambda i: sources.stock(model, given), warm=2, repeats=5)
            peak = torch.cuda.max_memory_allocated() / 2**30
            results[f"{name} {rows}"] = {"ms": ms, "peak_gib": peak}
            print(
                name, rows, f"{ms:.2f} ms", f"{2e-12 * GMAC_A_ROW * 1e9 * rows / (ms * 1e-3):.0f} TFLOP/s", flush=True
            )
    return results


@torch.inference_mode()
def compiled(options: argparse.Namespace) -> dict[str, Any]:
    import time

    source = sources.model()
    model = source.denoiser
    model.fuse_qkv_projections()
    results: dict[str, Any] = {"mode": options.mode}
    for rows in (16, 2):
        given = sources.inputs(source, rows)
        given["latents"] = given["latents"].contiguous(memory_format=torch.channels_last)
        mode = None if options.mode == "default" else options.mode
        forward = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)
        begun = time.perf_counter()
        sources.stock(forward, given)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        graph, _ = captured(lambda: sources.stock(forward, given))
        with Clocks() as clocks:
            ms = sustained(graph, 160 // rows)
        results[str(rows)] = {"ms": ms, "compile_s": seconds, **clocks.summary()}
        print("compiled", options.mode, rows, results[str(rows)], flush=True)
        torch._dynamo.reset()
    return results


@torch.inference_mode()
def vae(options: argparse.Namespace) -> dict[str, Any]:
    source = sources.model()
    found = sources.ranges(source)
    results: dict[str, Any] = {}
    g = torch.Generator("cuda").manual_seed(5)
    latents = torch.randn(8, 4, 128, 128, generator=g, device="cuda") * 0.8
    for batch in (1, 4, 8):
        some = (latents[:batch] / source.vae.config.scaling_factor).to(torch.bfloat16)
        results[f"stock {batch}"] = milliseconds(
            lambda i: source.vae.decode(some, return_dict=False), warm=2, repeats=4
        )
        print("vae stock channels_last", batch, f"{results[f'stock {batch}']:.1f} ms", flush=True)
    for name, scheme in KINDS.items():
        decoder = on_gpu(sources.variant(source, scheme, found), max(ROWS)).decoder
        for batch in (1, 4, 8):
            given = latents[:batch].clone()
            run, _ = captured(lambda: decoder(given))
            results[f"fused {name} {batch}"] = sustained(run, 16 // batch + 2)
            print("vae", name, batch, f"{results[f'fused {name} {batch}']:.1f} ms", flush=True)
            del run, _  # with the graph's memory
            torch.cuda.empty_cache()
        if name == "int8":
            results["breakdown"] = parts = breakdown(lambda: decoder(latents[:4]))
            table(("vae int8, 4 pictures", "ms", "calls"), [(n, f"{ms:.3f}", c) for n, ms, c in parts[:30]])
    return results


@torch.inference_mode()
def encoders(options: argparse.Namespace) -> dict[str, Any]:
    models = text_encoders(sources.model())
    results: dict[str, Any] = {}
    for prompts in (1, 8, 16):
        tokens = torch.randint(0, 49000, (prompts, 77), device="cuda")
        tokens[:, -1] = 49407

        def run(tokens: Tensor = tokens) -> Tensor:
            last: Tensor = [m(tokens, output_hidden_states=True).hidden_states[-2] for m in models][-1]
            return last

        eager = milliseconds(lambda i: run(), warm=2, repeats=5)
        results[str(prompts)] = {"eager_ms": eager}
        print("encoders", prompts, results[str(prompts)], flush=True)
        try:
            graph, _ = captured(run)
            results[str(prompts)]["graph_ms"] = sustained(graph, 20)
        except RuntimeError as failure:
            print("encoders: no graph:", str(failure).splitlines()[0])
        print("encoders", prompts, results[str(prompts)], flush=True)
    return results


def main() -> None:
    kinds = {"fused": fused, "stock": stock, "compiled": compiled, "vae": vae, "encoders": encoders}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    parser.add_argument("--kinds", default="bf16,int8,fp8")
    parser.add_argument("--mode", default="default")
    options = parser.parse_args()
    found = {options.what: kinds[options.what](options)}
    rooms = (*provenance.GPU_IMAGES, *(f"benchmarks/h200/{name}.py" for name in ("forwards", "sources")))
    record.write(options.what, found, options.out, rooms=rooms)


if __name__ == "__main__":
    main()
