"""Measures images per second of SDXL in the engine, from prompts to images, by optimization; and Poisson arrivals.

    python -m benchmarks.h200.engine [--rungs …] [--arrivals N] [--out folder]

The ladder: diffusers one at a time and in batches of 8, then the engine on fused layers in CUDA graphs in bf16, INT8
and FP8, without and with DeepCache. 20 Euler steps with guidance at the native size, with text encoders, VAE and the
copy to the host, without PNG. Arrivals: one Poisson trace at 80% of the engine's throughput, run on the engine and
on request-level batching with the same graphs. Results are written as they become available.
"""

from __future__ import annotations

import argparse
import gc
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import provenance, record
from benchmarks.h200 import sources
from benchmarks.h200.timing import Clocks, table
from benchmarks.traces import BATCH, Order, RequestLevel, StepLevel, draw_batch, play, poisson, summary
from contract.plan import AUTO, DeepCache
from contract.precision import Scheme
from core.batching.engine import Engine, Tick
from pipeline import sdxl
from pipeline.backends.backend import BatchGroup, Widths
from pipeline.backends.graphs import GraphBackend
from pipeline.load import ImageModel
from pipeline.phases import STEPS, VAE
from pipeline.runner import ImageRunner

ROWS, IN_FLIGHT = 16, 24
WIDTHS = Widths(ROWS, buckets=(2, 4, 6, 8, 10, 12, 14, 16))
LOAD, WINDOW_S = 0.8, 3.0
GMAC_A_ROW = 3380.6  # of SDXL's UNet
RUNGS: dict[str, tuple[Scheme | None, DeepCache | None]] = {
    "bf16": (None, None),
    "int8": ("int8", None),
    "fp8": ("fp8", None),
    "int8+deepcache-resnet": ("int8", AUTO),
    "int8+deepcache-block": ("int8", DeepCache(2, "block")),
    "int8+deepcache-half": ("int8", DeepCache(2, "resnet")),
    "fp8+deepcache-half": ("fp8", DeepCache(2, "resnet")),
}
"""In "half" every second step is shallow, as in MLPerf's submission; "resnet" is our "auto", whose last is deep."""


class Watch:
    """Durations of the engine's iterations, by phase and width."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(list)

    def restart(self) -> Watch:
        """Begin with nothing; returns what was seen until now."""
        seen = Watch()
        seen.seconds, self.seconds = self.seconds, defaultdict(list)
        return seen

    def __call__(self, tick: Tick) -> None:
        if isinstance(tick.group, BatchGroup):
            self.seconds[tick.group.phase, tick.rows].append(tick.seconds)

    def summary(self) -> dict[str, Any]:
        found = {
            f"{phase} × {rows}": {"count": len(took), "ms": round(1e3 * float(np.median(took)), 2)}
            for (phase, rows), took in sorted(self.seconds.items())
        }
        return {"phases": found, "busy_s": round(sum(sum(took) for took in self.seconds.values()), 3)}


def closed_loop(engine: Engine, order: Order, pictures: int, name: str) -> tuple[float, float]:
    """Images per second with `IN_FLIGHT` in flight, from the first batch's end to the last's, and the duration."""
    room, ended = threading.Semaphore(IN_FLIGHT), []
    total = pictures + BATCH + IN_FLIGHT

    def done(_: Any) -> None:
        ended.append(time.perf_counter())
        room.release()

    for i in range(total):
        room.acquire()
        engine.submit(order.request(f"{name}-{i}", i)).add_done_callback(done)
    while len(ended) < total:
        time.sleep(0.005)
    first, last = BATCH - 1, pictures + BATCH - 1  # while the last ones end the batches are no longer full
    return (last - first) / (ended[last] - ended[first]), ended[last] - ended[first]


def stock(source: ImageModel, order: Order, batch: int, rounds: int) -> float:
    """Images per second of diffusers' pipeline in batches of that size."""
    pipeline = sources.stock_pipeline(source)

    def draw(number: int) -> None:
        prompts = [f"stock {number} {i}: a small red boat on a lake" for i in range(batch)]
        generators = [torch.Generator().manual_seed(i) for i in range(batch)]
        pipeline(
            prompts, num_inference_steps=order.steps, guidance_scale=5.0, generator=generators, height=order.side,
            width=order.side,
        )  # fmt: skip

    draw(0)
    started = time.perf_counter()
    for number in range(1, rounds + 1):
        draw(number)
    return batch * rounds / (time.perf_counter() - started)


def rung(runner: ImageRunner, name: str, cached: DeepCache | None, pictures: int) -> dict[str, Any]:
    order, watch = Order(runner.model.native, sources.STEPS, cached), Watch()
    torch.cuda.reset_peak_memory_stats()
    with Engine([runner], on_tick=watch) as engine:
        for future in [engine.submit(order.request(f"{name}-warm-{i}", i)) for i in range(BATCH)]:
            future.result()
        watch.seconds.clear()
        with Clocks() as clocks:
            rate, seconds = closed_loop(engine, order, pictures, name)
        picture = engine.submit(order.request(f"{name}-look", 0)).result()
    levels = np.asarray(picture.image)
    costs = runner.backend.costs.measured()
    deep = next((c.get(ROWS) for key, c in costs.items() if key[0] == "deep" and key[2] and c.get(ROWS)), None)
    found = {
        "images_s": round(rate, 3),
        "measured_s": round(seconds, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "deep_tflops": None if deep is None else round(2e-12 * GMAC_A_ROW * 1e9 * ROWS / deep, 1),
        "picture_std": round(float(levels.std()), 3),
        **clocks.summary(),
        **watch.summary(),
    }
    print(name, json.dumps(found), flush=True)
    return found


def arrivals(runner: ImageRunner, cached: DeepCache | None, capacity: float, count: int) -> dict[str, Any]:
    """Runs one trace at `LOAD` of the capacity with each batching policy."""
    order = Order(runner.model.native, sources.STEPS, cached)
    trace = poisson(LOAD * capacity, count)
    found: dict[str, Any] = {"rate_per_s": round(LOAD * capacity, 3), "arrivals": count}
    with Engine([runner]) as engine:
        found["engine"] = summary([play("engine", StepLevel(engine), order, trace)])
    print("arrivals", json.dumps(found), flush=True)
    for name, window in (("window_free", 0.0), ("window_3s", WINDOW_S)):
        server = RequestLevel(lambda requests: draw_batch(runner, requests), window)
        found[name] = summary([play(name, server, order, trace)])
        print("arrivals", name, json.dumps(found[name]), flush=True)
    return found


def runner_of(model: ImageModel, widths: Widths = WIDTHS) -> tuple[ImageRunner, float]:
    """A runner with all its graphs recorded, and the duration of the recording."""
    started = time.perf_counter()
    runner = ImageRunner(GraphBackend(model, widths), max_requests=4 * widths.max_rows, patience_s=20.0)
    runner.prepare(measure_s=90.0)
    return runner, time.perf_counter() - started


def costs_ms(runner: ImageRunner) -> dict[str, float]:
    """Measured milliseconds of the graphs of steps and decoders, by phase and rows."""
    return {
        f"{phase} × {rows}": round(1e3 * seconds, 2)
        for (phase, _, compiled), curve in runner.backend.costs.measured().items()
        if compiled and (phase in STEPS or phase.startswith(VAE))
        for rows, seconds in curve.items()
    }


def measure_stock(source: ImageModel, wanted: Sequence[str], results: dict[str, Any], save: Callable[[], None]) -> None:
    """diffusers' rungs, each saved as it comes."""
    order = Order(source.native, sources.STEPS, None)
    for name, batch, rounds in (("diffusers-1", 1, 2), ("diffusers-8", 8, 1)):
        if name in wanted:
            rate = stock(source, order, batch, rounds)
            print(name, f"{rate:.3f} images/s", flush=True)
            results["rungs"][name] = {"images_s": round(rate, 3)}
            save()


def measure_variant(
    model: ImageModel,
    scheme: Scheme | None,
    names: Sequence[str],
    pictures: int,
    count: int,
    results: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """The engine's rungs in one precision, each saved as it comes; in INT8 also `count` arrivals."""
    runner, ready_s = runner_of(model)
    label = scheme or "bf16"
    costs = costs_ms(runner)
    results |= {f"costs_ms {label}": costs, f"ready_s {label}": ready_s}
    save()
    print(label, f"ready after {ready_s:.1f} s", json.dumps(costs), flush=True)
    for name in names:
        results["rungs"][name] = rung(runner, name, RUNGS[name][1], pictures)
        save()
    if scheme == "int8" and count:
        cached = "int8+deepcache-resnet"
        capacity = results["rungs"][cached if cached in results["rungs"] else "int8"]["images_s"]
        results["arrivals"] = arrivals(runner, AUTO if cached in results["rungs"] else None, capacity, count)
        save()
    runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=sdxl.NAME)
    parser.add_argument("--rungs", default="diffusers-1,diffusers-8," + ",".join(RUNGS))
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--arrivals", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    options = parser.parse_args()
    wanted = options.rungs.split(",")
    rooms = (*provenance.GPU_IMAGES, *(f"benchmarks/h200/{name}.py" for name in ("engine", "sources")))
    results: dict[str, Any] = {"rungs": {}, "model": options.model}

    def save() -> None:
        record.write("engine", results, options.out, rooms=rooms)

    source = sources.model(options.model)
    measure_stock(source, wanted, results, save)
    ranges = sources.ranges(source)
    schemes: tuple[Scheme | None, ...] = (None, "int8", "fp8")
    for scheme in schemes:
        names = [name for name, (of, _) in RUNGS.items() if of == scheme and name in wanted]
        if names:
            variant = sources.variant(source, scheme, ranges)
            measure_variant(variant, scheme, names, options.pictures, options.arrivals, results, save)
            del variant
            gc.collect()
            torch.cuda.empty_cache()
    table(
        ("rung", "images/s", "peak GiB", "SM MHz", "W"),
        [
            (name, r["images_s"], r.get("peak_gib", ""), r.get("sm_mhz", ""), r.get("power_w", ""))
            for name, r in results["rungs"].items()
        ],
    )


if __name__ == "__main__":
    main()
