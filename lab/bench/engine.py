"""Measures images per second and the latency of a single image of SDXL in the engine, by precision and plan.

    python -m lab.bench.engine [--rungs …] [--window S] [--windows N] [--name engine]

Images are 20 Euler steps with guidance at the native size unless a rung says otherwise, from prompts to pixels on the
host. The rungs: diffusers in bf16, one at a time and in batches; then the engine on fused layers in CUDA graphs. First
each rung's single images, with nothing else in flight; then its windows, which take turns with those of the other rungs
of the same precision. Results are written after every window. `--device cpu --tiny` rehearses it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contract.errors import Invalid
from contract.image import ImageParameters
from contract.plan import AUTO, RESNET, DeepCache
from contract.precision import Scheme
from core.batching.engine import Engine, Tick
from core.batching.request import Request
from lab.bench.harness import command, models, record
from lab.bench.harness.loop import Loop, Make, whole_rounds
from lab.bench.harness.timing import Clocks
from lab.bench.harness.turns import alternate
from lab.bench.tables import TABLES
from pipeline.backends.backend import BatchGroup, Widths
from pipeline.backends.graphs import GraphBackend
from pipeline.backends.phases import STEPS, VAE
from pipeline.checkpoints import sdxl, tiny
from pipeline.checkpoints.load import ImageModel
from pipeline.runner import ImageRunner

STOCK = {"diffusers-1": (1, 2), "diffusers-8": (8, 1)}  # images of a batch, and batches
_GATE, _TINY = {"guidance_interval": (0.0, 0.5)}, {"vae": "tiny"}
_HALF, _THIRD = ({"deepcache": DeepCache(interval, RESNET)} for interval in (2, 3))
_STUDENT = {"steps": 4, "guidance_scale": 1.0, "scheduler": "lcm"}
RUNGS: dict[str, tuple[Scheme | None, dict[str, Any]]] = {
    "bf16": (None, {}),
    "int8": ("int8", {}),
    "auto": ("int8", {"deepcache": AUTO}),
    "half": ("int8", _HALF),
    "gate": ("int8", {**_HALF, **_GATE}),
    "interval3+gate+tiny": ("int8", {**_THIRD, **_GATE, **_TINY}),
    "4-steps": ("int8", _STUDENT),
    "4-steps+tiny": ("int8", {**_STUDENT, **_TINY}),
    "fp8": ("fp8", {}),
    "fp8+half": ("fp8", _HALF),
}
"""By rung the precision, and fields of the requests. A plan that the model does not offer is left out."""
SCHEMES: tuple[Scheme | None, ...] = (None, "int8", "fp8")


class PhaseTimes:
    """Durations of the engine's iterations, by phase and rows."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(list)

    def __call__(self, tick: Tick) -> None:
        if isinstance(tick.group, BatchGroup):
            self.seconds[tick.group.phase, tick.rows].append(tick.seconds)

    def summary(self) -> dict[str, Any]:
        times = dict(self.seconds)
        phases = {
            f"{phase} × {rows}": {"count": len(took), "ms": round(1e3 * float(np.median(took)), 2)}
            for (phase, rows), took in sorted(times.items())
        }
        return {"phases": phases, "busy_s": round(sum(sum(took) for took in times.values()), 3)}


class Bench:
    """An engine of one variant of the model, and the rungs that are measured on it."""

    def __init__(self, runner: ImageRunner, engine: Engine, times: PhaseTimes) -> None:
        self._runner, self._engine, self._times = runner, engine, times
        self._cuda = runner.model.device.type == "cuda"

    def requests(self, name: str, fields: Mapping[str, Any]) -> Make:
        """Make requests of a rung, all with different prompts and seeds.

        Raises `Invalid` and TypeError for what the model, or a request, does not have.
        """
        side = self._runner.model.native

        def request(number: int) -> Request:
            prompt = f"{name} {number}: a small red boat on a lake"
            options = {"steps": models.STEPS, "guidance_scale": models.GUIDANCE, **fields}
            id = f"{name}-{time.monotonic_ns()}-{number}"
            return Request(id, "image", ImageParameters(prompt, number, side, side, **options))

        self._runner.check(request(0))
        return request

    def singles(self, make: Make, count: int) -> list[float]:
        """Seconds from request to pixels of images that are alone, one after another; one before them warms up."""
        seconds = []
        for number in range(count + 1):
            started = time.perf_counter()
            np.asarray(self._engine.submit(make(number)).result().image)
            seconds.append(round(time.perf_counter() - started, 4))
        return seconds[1:]

    def window(self, make: Make, in_flight: int, seconds: float) -> dict[str, Any]:
        """Throughput while the engine is kept full, over whole rounds of at least so many seconds."""
        loop = Loop(self._engine, make, in_flight)
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        with Clocks() as clocks:
            images, took_s = whole_rounds(loop, seconds, self._times.seconds.clear)
        p50, p99 = np.percentile(loop.ended, [50, 99]).tolist()
        return {
            "images_s": round(images / took_s, 3),
            "pictures": images,
            "seconds": round(took_s, 2),
            "p50_s": round(p50, 3),
            "p99_s": round(p99, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if self._cuda else None,
            **clocks.summary(),
            **self._times.summary(),
        }


def in_flight_of(fields: Mapping[str, Any], rows: int) -> int:
    """Enough requests for cohorts that are mostly full. More wait for an image's end at nobody's gain: the scheduler,
    simulated with an H200's costs, reaches its best rate for these plans with so many.
    """
    return 2 * rows if fields.get("guidance_scale") == 1.0 else 5 * rows // 2


def runner_of(model: ImageModel, rows: int, measure_s: float) -> tuple[ImageRunner, dict[str, Any]]:
    """A runner with its graphs recorded, also for the one row of images without guidance; and how that went."""
    started = time.perf_counter()
    buckets = tuple(width for width in (1, *range(2, 17, 2), *range(20, rows + 1, 4)) if width <= rows)
    runner = ImageRunner(GraphBackend(model, Widths(rows, buckets=buckets)), max_requests=4 * rows, patience_s=20.0)
    runner.prepare(measure_s=measure_s)
    ready_s = time.perf_counter() - started
    runner.recording.wait()  # for what was left when the time for it was over
    graphs = runner.backend.graphs
    costs = {
        f"{phase} × {rows}": round(1e3 * seconds, 2)
        for (phase, _, compiled), curve in runner.backend.costs.measured().items()
        if compiled and (phase in STEPS or phase.startswith(VAE))
        for rows, seconds in curve.items()
    }
    failed = [f"{key.phase} × {key.rows}: {reason}" for key, reason in graphs.failed.items()]
    return runner, {
        "ready_s": round(ready_s, 1), "graphs": "{} of {}".format(*graphs.counts), "failed": failed, "costs_ms": costs,
    }  # fmt: skip


class EngineLadder:
    """The run: its options, and its results, which are saved as they come."""

    def __init__(self, options: argparse.Namespace, names: Sequence[str]) -> None:
        self._options = options
        self._names = names
        self._in_flight = dict(options.in_flight)
        self.results: dict[str, Any] = {"model": options.model, "rows": options.rows, "rungs": {}}

    def save(self, *, verbose: bool = False) -> None:
        record.publish(
            self._options.name, self.results, self._options.results, verbose=verbose, table=TABLES["h200-engine"]
        )

    def run(self) -> None:
        options = self._options
        with tempfile.TemporaryDirectory() as folder:
            tiny_vae = models.tiny_vae(Path(folder))
            source = models.model(options.model, options.device, tiny_vae=tiny_vae)
        self._stock(source)
        calibrated = models.ranges(source, 1 if options.tiny else models.CALIBRATED)
        for scheme in SCHEMES:
            rungs = {name: RUNGS[name][1] for name in self._names if name in RUNGS and RUNGS[name][0] == scheme}
            if rungs:
                self._variant(models.variant(source, scheme, calibrated), scheme or "bf16", rungs)
                gc.collect()
                torch.cuda.empty_cache()
        self.save(verbose=True)

    def _stock(self, source: ImageModel) -> None:
        """Measure diffusers' pipeline, in batches."""
        for name, (batch, rounds) in STOCK.items():
            if name not in self._names:
                continue
            pipeline = models.stock_pipeline(source)
            for turn in range(rounds + 1):
                if turn == 1:  # the first one warms up
                    started = time.perf_counter()
                pipeline(
                    [f"stock {turn} {image}: a small red boat on a lake" for image in range(batch)],
                    num_inference_steps=models.STEPS, guidance_scale=models.GUIDANCE, height=source.native,
                    width=source.native, generator=[torch.Generator().manual_seed(image) for image in range(batch)],
                )  # fmt: skip
            rate = batch * rounds / (time.perf_counter() - started)
            self.results["rungs"][name] = {"images_s": round(rate, 3)}
            record.progress(f"{name}: {rate:.3f} images/s")
            self.save()

    def _variant(self, model: ImageModel, label: str, rungs: Mapping[str, Mapping[str, Any]]) -> None:
        """Measure the rungs of one precision."""
        runner, ready = runner_of(model, self._options.rows, 0.2 if self._options.tiny else 90.0)
        self.results |= {f"{key} {label}": value for key, value in ready.items()}
        record.progress(f"{label}: {json.dumps(ready)}")
        times, makes = PhaseTimes(), dict[str, Make]()
        with Engine([runner], on_tick=times) as engine:
            bench = Bench(runner, engine, times)
            for name, fields in rungs.items():
                try:
                    makes[name] = bench.requests(name, fields)
                except (Invalid, TypeError) as error:
                    record.progress(f"{name} is left out: {error}")
                    continue
                in_flight = self._in_flight.get(name) or in_flight_of(fields, self._options.rows)
                self.results["rungs"][name] = {"in_flight": in_flight}
            self._measure(bench, makes)
        runner.close()

    def _measure(self, bench: Bench, makes: Mapping[str, Make]) -> None:
        """Measure single images by rung, then windows in turns, saving after each part."""
        options, rungs = self._options, self.results["rungs"]
        for name, make in makes.items():
            took = bench.singles(make, options.singles)
            rungs[name] |= {"single_s": statistics.median(took), "singles_s": took, "windows": []}
            record.progress(f"{name}: a single image takes {rungs[name]['single_s']:.3f} s of {took}")

        def measure(name: str, make: Make, turn: int) -> None:
            window = bench.window(make, rungs[name]["in_flight"], options.window)
            windows = [*rungs[name]["windows"], window]
            rungs[name] |= {
                **window, "windows": windows, "images_s": statistics.median(each["images_s"] for each in windows),
            }  # fmt: skip
            self.save()
            record.progress(f"window {turn + 1} of {options.windows}: {name} {json.dumps(window)}")

        alternate(makes, options.windows, measure)


def _in_flight(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if name not in RUNGS or not count.isdecimal() or int(count) < 1:
        raise argparse.ArgumentTypeError(f"must be a rung and a number, such as half=16, not {text!r}")
    return name, int(count)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("engine", __doc__)
    parser.add_argument("--model", default=sdxl.NAME, help="default: %(default)s")
    parser.add_argument("--rungs", default=",".join(("diffusers-8", *RUNGS)), help="default: %(default)s")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of one at least; default: %(default)s")
    parser.add_argument("--windows", type=int, default=3, help="of each rung; default: %(default)s")
    parser.add_argument("--singles", type=int, default=3, help="single images of each rung; default: %(default)s")
    parser.add_argument("--rows", type=int, default=16, help="of a forward at most; default: %(default)s")
    parser.add_argument("--in-flight", type=_in_flight, action="append", default=[], help="of a rung, such as gate=32")
    parser.add_argument("--name", default="engine", help="of the file of results; default: %(default)s")
    options = parser.parse_args(arguments)
    names = command.names(options.rungs, (*STOCK, *RUNGS), "--rungs")
    if options.tiny:
        options.model = tiny.TINY
    EngineLadder(options, names).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
