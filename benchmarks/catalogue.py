"""Measures an engine that serves many fine-tunes of one model: images per second and latency beside those of one model.

    python -m benchmarks.catalogue [--models 20] [--zipf 1.0] [--plans full,half,4-steps] [--window S]

The fine-tunes differ from the first model in their denoisers' weights, and share its backend; those that `--device-gib`
leaves no room for, by last use, are in the host's memory. Of each plan there are windows of requests of one model, and
of requests whose models are drawn from Zipf's law: the k-th has a share of 1/k^s. `--device cpu --tiny` rehearses it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.engine import RUNGS, Bench, PhaseTimes, in_flight_of
from benchmarks.harness import command, models, record
from benchmarks.harness.loop import Make
from contract.image import ImageParameters
from core.batching.engine import Engine, Tick
from core.batching.request import Request
from core.batching.runner import Lane
from pipeline.backends.backend import Widths
from pipeline.backends.graphs import GraphBackend
from pipeline.backends.swapped import SharedBackends, SwappedBackend
from pipeline.checkpoints import sdxl, tiny
from pipeline.extensions.asset_cache import ReadFile
from pipeline.families.family import ImageModel
from pipeline.memory_ledger import RequestCapacity
from pipeline.model_pool import ModelGroup, ModelPool, Pooled, weight_bytes
from pipeline.runner import ImageRunner

_PLANS = {"full": "int8", "half": "half", "4-steps": "4-steps"}  # rungs of `benchmarks.engine`
_CHANGE = 0.02  # of a fine-tune's scales, biases and plain weights, relative
_RECORD_S = 600.0


def fine_tune(model: ImageModel, denoiser: Any, number: int) -> ImageModel:
    """The model with other weights in its denoiser, of which this is a copy on the CPU; the first is itself."""
    if not number:
        return model
    denoiser = copy.deepcopy(denoiser).to(model.device)
    generator = torch.Generator(model.device).manual_seed(number)
    with torch.no_grad():
        for name, tensor in (*denoiser.named_parameters(), *denoiser.named_buffers()):
            # Layers that read one input have one scale of it.
            if tensor.is_floating_point() and tensor.itemsize > 1 and not name.endswith("inverse"):
                noise = torch.rand(tensor.shape, generator=generator, device=model.device, dtype=torch.float32)
                tensor.mul_((1 + _CHANGE * noise).to(tensor.dtype))
    return model.with_parts(**{model.family.denoiser: denoiser})


class Catalogue:
    """An engine over a pool of so many fine-tunes, all of which are loaded."""

    def __init__(self, model: ImageModel, count: int, rows: int, device_bytes: int, measure_s: float) -> None:
        self.lane, self.times, self.swaps = Lane("device"), PhaseTimes(), 0
        self._model, self._capacity = model, RequestCapacity(4 * rows)
        self._denoiser = copy.deepcopy(model.denoiser).cpu()  # what kernels read may be another's
        self._shared = SharedBackends(self.lane)
        self._shared.capacity = self._capacity
        self._widths = Widths(rows, buckets=tuple(w for w in (1, *range(2, 17, 2), *range(20, 129, 4)) if w <= rows))
        self.names = [f"model-{number}" for number in range(count)]
        self.pool = ModelPool(self.names, self._load, device_bytes, host_bytes=2**63)
        self._last = ""
        started = time.perf_counter()
        self.pool.start()
        first = self._runner(self.names[0])
        first.prepare(measure_s=measure_s)
        first.recording.wait(_RECORD_S)
        record.progress(f"recorded, {_gib()} GiB")
        recorded_s = time.perf_counter() - started
        joins: list[float] = []
        for name in self.names[1:]:
            started = time.perf_counter()
            self.pool.load(name)
            joins.append(time.perf_counter() - started)
            record.progress(f"{name}: {joins[-1]:.2f} s, {_gib()} GiB")
        other = self._runner(self.names[-1]).backend
        offload_s, onload_s = self._away() if count > 1 else (None, None)
        self.facts = {
            "graphs": first.backend.graphs.counts[0], "recorded_s": round(recorded_s, 1),
            "join_s": round(statistics.median(joins), 3) if joins else None,
            "swap_ms": round(1e3 * other.swap_s, 2) if isinstance(other, SwappedBackend) else None,
            "offload_s": offload_s, "onload_s": onload_s,
            "on_device": sum(self.pool.resident(name) is not None for name in self.names), "gib": _gib(),
        }  # fmt: skip
        self.engine = Engine([self.pool], on_tick=self._note)
        self.pool.retry_admission = self.engine.retry_admission

    def _away(self) -> tuple[float, float]:
        """Seconds in which the last model leaves for the host's memory, and comes back."""
        moments = [time.perf_counter()]
        for move in (lambda: self.pool.evict(self.names[-1:]), lambda: self.pool.load(self.names[-1])):
            move()
            moments.append(time.perf_counter())
        left, back = (round(end - start, 3) for start, end in itertools.pairwise(moments))
        return left, back

    def _runner(self, name: str) -> ImageRunner:
        runner, _ = self.pool.load(name)
        assert isinstance(runner, ImageRunner)
        return runner

    def _load(self, name: str) -> ReadFile[Pooled]:
        model = fine_tune(self._model, self._denoiser, self.names.index(name))
        backend = self._shared.backend_of(model, lambda: GraphBackend(model, self._widths))
        runner = ImageRunner(backend, lane=self.lane, capacity=self._capacity)
        return ReadFile(runner, name, weight_bytes(runner))

    def _note(self, tick: Tick) -> None:
        if isinstance(tick.group, ModelGroup):
            self.times.seconds[tick.group.phase, tick.rows].append(tick.seconds)
            self.swaps += tick.group.model != self._last
            self._last = tick.group.model

    def requests(self, plan: str, fields: Mapping[str, Any], model_of: Callable[[int], str]) -> Make:
        """Make requests of a plan, all with different prompts and seeds."""
        side = self._model.native

        def request(number: int) -> Request:
            prompt = f"{plan} {number}: a small red boat on a lake"
            options = {"steps": models.STEPS, "guidance_scale": models.GUIDANCE, **fields}
            parameters = ImageParameters(prompt, number, side, side, **options)
            return Request(f"{plan}-{time.monotonic_ns()}-{number}", "image", parameters, model=model_of(number))

        return request

    def window(self, make: Make, in_flight: int, seconds: float) -> dict[str, Any]:
        """Throughput while the engine is kept full, with the changes of model between its iterations."""
        bench = Bench(self._runner(self.names[0]), self.engine, self.times)
        self.swaps = 0
        return {**bench.window(make, in_flight, seconds), "changes": self.swaps}

    def close(self) -> None:
        self.engine.close()
        self.pool.close()
        self.lane.close()


def _gib() -> float:
    """GiB that torch has allocated on the GPU."""
    return round(torch.cuda.memory_allocated() / 2**30, 1) if torch.cuda.is_available() else 0.0


def popular(names: Sequence[str], exponent: float) -> Callable[[int], str]:
    """The model of each request, by Zipf's law."""
    weights = [1 / (rank + 1) ** exponent for rank in range(len(names))]
    return lambda number: random.Random(number).choices(names, weights)[0]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all, and return the results, which are saved after each window."""
    source = models.model(options.model, options.device)
    calibrated = models.ranges(source, 1 if options.tiny else models.CALIBRATED)
    model = models.variant(source, "int8", calibrated)
    del source
    catalogue = Catalogue(
        model, options.models, options.rows, int(options.device_gib * 2**30), 0.2 if options.tiny else 90.0
    )
    results: dict[str, Any] = {
        "model": options.model, "models": options.models, "zipf": options.zipf, "rows": options.rows,
        **catalogue.facts, "plans": {},
    }  # fmt: skip
    record.progress(json.dumps(results))
    model_of = popular(catalogue.names, options.zipf)
    try:
        for plan in options.plans:
            fields = {**RUNGS[_PLANS[plan]][1], **({"steps": 2} if options.tiny else {})}
            in_flight = options.in_flight or in_flight_of(fields, options.rows)
            figures: dict[str, Any] = {"in_flight": in_flight}
            results["plans"][plan] = figures
            for traffic, choose in (("one", lambda number: catalogue.names[0]), ("zipf", model_of)):
                make = catalogue.requests(f"{plan} {traffic}", fields, choose)
                figures[traffic] = catalogue.window(make, in_flight, options.window)
                record.progress(f"{plan}, {traffic}: {json.dumps(figures[traffic])}")
            figures["share"] = round(figures["zipf"]["images_s"] / figures["one"]["images_s"], 3)
            record.publish(options.name, results, options.results, verbose=False)
    finally:
        catalogue.close()
    drawn = Counter(model_of(number) for number in range(1000))
    results["of_1000"] = [drawn[name] for name in catalogue.names]
    return record.publish(options.name, results, options.results)


def show(results: Mapping[str, Any]) -> None:
    rows = [
        (plan, traffic, *(figures[traffic].get(key) for key in ("images_s", "p50_s", "p99_s", "changes", "peak_gib")))
        for plan, figures in results["plans"].items() for traffic in ("one", "zipf")
    ]  # fmt: skip
    header = ("plan", "models", "images/s", "p50 s", "p99 s", "changes of model", "peak GiB")
    record.table(f"{results['models']} fine-tunes of {results['model']}", header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("catalogue", __doc__)
    parser.add_argument("--models", type=int, default=20, help="default: %(default)s")
    parser.add_argument(
        "--device-gib", type=float, default=1024.0,
        help="of weights on the device; further models wait in the host's memory; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--zipf", type=float, default=1.0, help="the exponent; default: %(default)s")
    parser.add_argument("--plans", default="full,half,4-steps", help="default: %(default)s")
    parser.add_argument("--model", default=sdxl.NAME, help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=16, help="of a forward at most; default: %(default)s")
    parser.add_argument("--in-flight", type=int, default=0, help="requests; default: enough for one model")
    parser.add_argument("--window", type=float, default=30.0, help="seconds at least; default: %(default)s")
    parser.add_argument("--name", default="catalogue", help="of the file of results; default: %(default)s")
    options = parser.parse_args(arguments)
    options.plans = command.names(options.plans, _PLANS, "--plans")
    if options.tiny:
        options.model, options.rows = tiny.TINY, 8
    show(run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
