"""The whole of SDXL at 1024²: UNet forwards in every precision and width, the VAE, the text encoders, images a second.

`python -m benchmarks.h200.unet fused|stock|compiled|vae|text [--out folder]`; each prints a table and writes JSON. The
figure of merit is images/s on one GPU: 8 / (20 · forward(16 rows) + keys and values + vae(8) + text(16 prompts)).
Weights are random (`sources.py`): speeds and differences between precisions are real, pictures are not.
"""

# ruff: noqa: B023 -- what closes over a loop's variables here runs within the same turn
from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.h200 import layers, sources
from benchmarks.h200.decoder import FusedDecoder
from benchmarks.h200.network import FusedUNet
from benchmarks.h200.timing import Clocks, milliseconds, sustained, table

T = TypeVar("T")
GMAC_A_ROW = 3380.6
KINDS: dict[str, torch.dtype | None] = {"bf16": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROWS = (16, 8, 4, 2)


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A CUDA graph of `run` and what its replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def agreement(actual: Tensor, expected: Tensor) -> dict[str, float]:
    """Cosine, and PSNR in dB with the reference's range as the peak."""
    a, e = actual.double().flatten(), expected.double().flatten()
    error = (a - e).square().mean()
    peak = (e.max() - e.min()).square()
    return {
        "cosine": round(float(torch.dot(a, e) / a.norm() / e.norm()), 6),
        "psnr_db": round(float(10 * torch.log10(peak / error.clamp(min=1e-30))), 2),
        "std": round(float(a.std()), 4),
        "finite": float(torch.isfinite(a).all()),
    }


def sigmas() -> tuple[list[float], list[float]]:
    """EulerDiscrete's 20 timesteps ("leading", offset 1) and their noise levels, with a last 0."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    levels = ((1 - (1 - betas).cumprod(0)) / (1 - betas).cumprod(0)) ** 0.5
    steps = [50 * i + 1 for i in reversed(range(20))]
    return [float(t) for t in steps], [*(float(levels[t]) for t in steps), 0.0]


def trajectory(forward: Callable[[Tensor, Tensor], Tensor], start: Tensor, guidance: float = 8.0) -> Tensor:
    """20 Euler steps with guidance; `forward(latents of both halves, timesteps)` → noise."""
    steps, levels = sigmas()
    x: Tensor = start * float((levels[0] ** 2 + 1) ** 0.5)
    for t, now, after in zip(steps, levels, levels[1:], strict=False):
        scaled = (x / (now**2 + 1) ** 0.5).repeat(2, 1, 1, 1)
        without, with_text = forward(scaled, torch.full((scaled.shape[0],), t, device=x.device)).float().chunk(2)
        x = x + (without + guidance * (with_text - without)) * (after - now)
    return x


class Run:
    """A fused UNet on static inputs of so many rows."""

    def __init__(self, model: FusedUNet, rows: int) -> None:
        self.given, self.model = sources.inputs(rows), model
        self.contexts = model.contexts(self.given["text"])

    def times(self) -> Tensor:
        return self.model.times(self.given["timestep"], self.given["pooled"], self.given["ids"])

    def deep(self) -> Tensor:
        return self.model.forward(self.given["latents"], self.times(), self.contexts)

    def shallow(self) -> Tensor:
        return self.model.shallow(self.given["latents"], self.times())


def _deep(model: FusedUNet, given: dict[str, Tensor], contexts: list[Tensor], x: Tensor, t: Tensor) -> Tensor:
    return model.forward(x, model.times(t, given["pooled"], given["ids"]), contexts)


def calibrate(model: FusedUNet, start: Tensor, eight: dict[str, Tensor]) -> None:
    """Static scales from random inputs and from three steps of `start` [4, 4, 128, 128]."""
    model.precision.observing = True
    for seed in range(3):
        calibration = sources.inputs(4, seed=20 + seed)
        times = model.times(calibration["timestep"], calibration["pooled"], calibration["ids"])
        model.forward(calibration["latents"], times, model.contexts(calibration["text"]))
    for t in (951.0, 401.0, 51.0):  # along a trajectory, where latents are scaled as they will be
        times = model.times(torch.full((8,), t, device="cuda"), eight["pooled"], eight["ids"])
        model.forward(start.repeat(2, 1, 1, 1), times, model.contexts(eight["text"]))
    model.precision.observing = False
    for kind in (torch.int8, torch.float8_e4m3fn):
        for layer in model.layers():
            layer.prepare(kind)


def breakdown(run: Callable[[], Tensor]) -> list[tuple[str, float, int]]:
    """Milliseconds and calls of each kind of call, by events around it, in eager mode; the rest is what is left."""
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
        wrap(layers, "linear_int8", by_shape("linear")),
        wrap(layers, "linear_geglu_int8", by_shape("geglu")),
        wrap(layers, "conv3x3_int8", by_shape("conv")),
        wrap(layers, "upsample_conv3x3_int8", by_shape("upsample")),
        wrap(layers, "attention_int8", lambda q, k, *rest: f"attention {tuple(q.shape)} keys {k.shape[1]}"),
        wrap(layers, "group_norm_int8", lambda x, *rest: f"group_norm {tuple(x.shape)}"),
        wrap(layers, "layer_norm_int8", lambda x, *rest: f"layer_norm {tuple(x.shape)}"),
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
    source = sources.unet().to(memory_format=torch.channels_last)
    given = sources.inputs(2)
    expected = sources.stock(source, given)
    start = sources.inputs(4, seed=9)["latents"]
    eight = sources.inputs(8)

    def stock_forward(x: Tensor, t: Tensor) -> Tensor:
        return sources.stock(source, {**eight, "latents": x, "timestep": t})

    model = FusedUNet(source)
    results: dict[str, Any] = {"rows": {}, "agreement": {}}
    twenty = trajectory(stock_forward, start)
    calibrate(model, start, eight)
    lines = []
    for name in options.kinds.split(","):
        model.precision.kind, model.precision.own_attention = KINDS[name], name == "bf16"
        run = Run(model, 2)
        out = run.deep()
        results["agreement"][name] = {"forward": agreement(out, expected)}
        print(name, results["agreement"][name], flush=True)
        contexts = model.contexts(eight["text"])
        last = trajectory(
            partial(_deep, model, eight, contexts),
            start,
        )
        results["agreement"][name]["trajectory"] = agreement(last, twenty)
        print(name, results["agreement"][name], flush=True)
        for rows in ROWS:
            run = Run(model, rows)
            torch.cuda.reset_peak_memory_stats()
            graph, out = captured(run.deep)
            with Clocks() as clocks:
                deep = sustained(graph.replay, 320 // rows)
            peak = torch.cuda.max_memory_allocated() / 2**30
            contexts_ms = milliseconds(lambda i: model.contexts(run.given["text"]))
            quick, _ = captured(run.shallow)
            shallow = sustained(quick.replay, 40)
            tflops = 2e-12 * GMAC_A_ROW * 1e9 * rows / (deep * 1e-3)
            results["rows"][f"{name} {rows}"] = {
                **{"deep_ms": deep, "shallow_ms": shallow, "contexts_ms": contexts_ms, "tflops": tflops},
                **{"peak_gib": peak, "std": float(out.float().std()), **clocks.summary()},
            }
            lines.append(
                (name, rows, f"{deep:.2f}", f"{shallow:.2f}", f"{tflops:.0f}", f"{peak:.1f}", str(clocks.summary()))
            )
            print(*lines[-1], flush=True)
            del graph, quick
    table(("fused", "rows", "deep ms", "shallow ms", "TFLOP/s", "GiB", "clocks"), lines)
    if "int8" in options.kinds:
        model.precision.kind = torch.int8
        parts = breakdown(Run(model, 16).deep)
        results["breakdown"] = parts
        table(("int8, 16 rows", "ms", "calls"), [(n, f"{ms:.3f}", c) for n, ms, c in parts])
    return results


@torch.inference_mode()
def stock(options: argparse.Namespace) -> dict[str, Any]:
    model = sources.unet()
    results: dict[str, Any] = {}
    for name in ("contiguous", "channels_last"):
        if name == "channels_last":
            model = model.to(memory_format=torch.channels_last)
        for rows in ROWS:
            given = sources.inputs(rows)
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

    model = sources.unet().to(memory_format=torch.channels_last)
    model.fuse_qkv_projections()
    results: dict[str, Any] = {"mode": options.mode}
    for rows in (16, 2):
        given = sources.inputs(rows)
        given["latents"] = given["latents"].contiguous(memory_format=torch.channels_last)
        mode = None if options.mode == "default" else options.mode
        forward = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)
        begun = time.perf_counter()
        sources.stock(forward, given)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        graph, _ = captured(lambda: sources.stock(forward, given))
        with Clocks() as clocks:
            ms = sustained(graph.replay, 160 // rows)
        results[str(rows)] = {"ms": ms, "compile_s": seconds, **clocks.summary()}
        print("compiled", options.mode, rows, results[str(rows)], flush=True)
        torch._dynamo.reset()
    return results


@torch.inference_mode()
def vae(options: argparse.Namespace) -> dict[str, Any]:
    source = sources.vae().to(memory_format=torch.channels_last)
    results: dict[str, Any] = {}
    g = torch.Generator("cuda").manual_seed(5)
    latents = torch.randn(8, 4, 128, 128, generator=g, device="cuda") * 0.8
    model = FusedDecoder(source)
    scaled = (latents / model.scaling).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    expected = (source.decode(scaled[:1], return_dict=False)[0] * 0.5 + 0.5).clamp(0, 1)
    for batch in (1, 4, 8):
        some = scaled[:batch]
        ms = milliseconds(lambda i: source.decode(some, return_dict=False)[0], warm=2, repeats=4)
        results[f"stock {batch}"] = ms
        print("vae stock channels_last", batch, f"{ms:.1f} ms", flush=True)
    model.precision.observing = True
    model.forward(latents[4:6])
    model.precision.observing = False
    for layer in model.layers():
        for kind in (torch.int8, torch.float8_e4m3fn):
            layer.prepare(kind)
    for name, dtype in KINDS.items():
        model.precision.kind = dtype
        results[f"agreement {name}"] = agreement(model.forward(latents[:1]), expected)
        for batch in (1, 4, 8):
            given = latents[:batch].clone()
            torch.cuda.reset_peak_memory_stats()
            graph, _ = captured(lambda: model.forward(given))
            results[f"fused {name} {batch}"] = sustained(graph.replay, 16 // batch + 2)
            results[f"peak_gib {name} {batch}"] = torch.cuda.max_memory_allocated() / 2**30
            print(
                "vae",
                name,
                batch,
                f"{results[f'fused {name} {batch}']:.1f} ms",
                results[f"agreement {name}"],
                flush=True,
            )
            del graph
    model.precision.kind = torch.int8
    parts = breakdown(lambda: model.forward(latents[:4]))
    results["breakdown"] = parts
    table(("vae int8, 4 pictures", "ms", "calls"), [(n, f"{ms:.3f}", c) for n, ms, c in parts[:30]])
    return results


@torch.inference_mode()
def text(options: argparse.Namespace) -> dict[str, Any]:
    models = sources.text_encoders()
    results: dict[str, Any] = {}
    for prompts in (1, 8, 16):
        tokens = torch.randint(0, 49000, (prompts, 77), device="cuda")
        tokens[:, -1] = 49407

        def run(tokens: Tensor = tokens) -> Tensor:
            last: Tensor = [m(tokens, output_hidden_states=True).hidden_states[-2] for m in models][-1]
            return last

        eager = milliseconds(lambda i: run(), warm=2, repeats=5)
        results[str(prompts)] = {"eager_ms": eager}
        print("text", prompts, results[str(prompts)], flush=True)
        try:
            graph, _ = captured(run)
            results[str(prompts)]["graph_ms"] = sustained(graph.replay, 20)
        except RuntimeError as failure:
            print("text: no graph:", str(failure).splitlines()[0])
        print("text", prompts, results[str(prompts)], flush=True)
    return results


def main() -> None:
    kinds = {"fused": fused, "stock": stock, "compiled": compiled, "vae": vae, "text": text}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    parser.add_argument("--kinds", default="bf16,int8,fp8")
    parser.add_argument("--mode", default="default")
    options = parser.parse_args()
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        options.what: kinds[options.what](options),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.what}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
