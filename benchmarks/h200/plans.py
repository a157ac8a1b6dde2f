"""Measures images per second and the latency of a single image by plan: what is left out of a picture's steps.

    python -m benchmarks.h200.plans [--rungs …] [--window S] [--out folder]

SDXL's shape in INT8 at the native size, through the engine from prompts to pixels on the host, in one run. First each
plan's single images, with nothing else in flight; then its windows, which take turns: the first of every plan, then
the second, and so on. Results are written after every window. `--model random:tiny` tries it out on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import provenance, record
from benchmarks.h200 import sources
from benchmarks.h200.engine import Watch, costs_ms, runner_of
from benchmarks.h200.timing import Clocks, table
from benchmarks.loop import Loop
from contract.errors import Invalid
from contract.image import ImageParameters
from contract.plan import RESNET, DeepCache
from core.batching.engine import Engine
from core.batching.request import Request
from pipeline import sdxl
from pipeline.backends.backend import Widths
from pipeline.runner import ImageRunner

_GATE = {"guidance_interval": (0.0, 0.5)}
_HALF, _THIRD = ({"deepcache": DeepCache(interval, RESNET)} for interval in (2, 3))
_STUDENT = {"steps": 4, "guidance_scale": 1.0, "scheduler": "lcm"}
_TINY = {"vae": "tiny"}
RUNGS: dict[str, dict[str, Any]] = {
    "full": {},
    "half": _HALF,
    "gate": {**_HALF, **_GATE},
    "interval3": _THIRD,
    "interval3+gate": {**_THIRD, **_GATE},
    "gate+tiny": {**_HALF, **_GATE, **_TINY},
    "interval3+gate+tiny": {**_THIRD, **_GATE, **_TINY},
    "4-steps": _STUDENT,
    "4-steps+tiny": {**_STUDENT, **_TINY},
}
"""Fields of the requests, beside 20 steps with guidance. One that the model does not offer is left out."""

Draw = Callable[[int], Request]


class Bench:
    """An engine of one runner, and the plans that are measured on it."""

    def __init__(self, runner: ImageRunner, engine: Engine, watch: Watch) -> None:
        self._runner, self._engine, self._watch = runner, engine, watch
        self._cuda = runner.model.device.type == "cuda"

    def draw(self, name: str, fields: Mapping[str, Any]) -> Draw:
        """Makes requests of a plan, all with different prompts and seeds. Raises `Invalid` and TypeError for what the
        model, or a request, does not have.
        """
        side = self._runner.model.native

        def request(i: int) -> Request:
            prompt = f"{name} {i}: a small red boat on a lake"
            given = {"steps": sources.STEPS, "guidance_scale": sources.GUIDANCE, **fields}
            return Request(
                f"{name}-{time.monotonic_ns()}-{i}", "image", ImageParameters(prompt, i, side, side, **given)
            )

        self._runner.check(request(0))
        return request

    def singles(self, draw: Draw, count: int) -> list[float]:
        """Seconds from request to pixels of images that are alone, one after another; one before them warms up."""
        took = []
        for i in range(count + 1):
            started = time.perf_counter()
            np.asarray(self._engine.submit(draw(i)).result().image)
            took.append(round(time.perf_counter() - started, 4))
        return took[1:]

    def window(self, draw: Draw, in_flight: int, seconds: float) -> dict[str, Any]:
        """Throughput while the engine is kept full: over whole rounds of `in_flight` images, since a cohort's images
        end together, and for at least so many seconds, from the end of the first round.
        """
        loop = Loop(self._engine, draw, in_flight)
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        loop.start()
        try:
            _wait(loop, in_flight)
            self._watch.restart()
            loop.counts = True
            with Clocks() as clocks:
                rounds = 0
                while rounds == 0 or loop.moments[-1] - loop.moments[in_flight - 1] < seconds:
                    rounds += 1
                    _wait(loop, in_flight * (rounds + 1))
            loop.counts = False
            seen, latencies = self._watch.restart(), list(loop.ended)
        finally:
            loop.close()
        pictures, took_s = _rate(loop.moments, in_flight, rounds)
        p50, p99 = np.percentile(latencies, [50, 99]).tolist()
        return {
            "images_s": round(pictures / took_s, 3),
            "pictures": pictures,
            "seconds": round(took_s, 2),
            "p50_s": round(p50, 3),
            "p99_s": round(p99, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if self._cuda else None,
            **clocks.summary(),
            **seen.summary(),
        }


def _rate(moments: Sequence[float], in_flight: int, rounds: int) -> tuple[int, float]:
    """Images, and seconds, from the end of the first round to that of the last of so many after it."""
    pictures = in_flight * rounds
    return pictures, moments[in_flight - 1 + pictures] - moments[in_flight - 1]


def _wait(loop: Loop, ends: int) -> None:
    """Until so many requests have ended in all. Raises what one of them raised."""
    while len(loop.moments) < ends:
        if loop.error is not None:
            raise loop.error
        time.sleep(0.002)


def in_flight_of(fields: Mapping[str, Any], rows: int) -> int:
    """Enough requests for cohorts that are mostly full. More wait for an image's end at nobody's gain: the scheduler,
    simulated with this card's costs, reaches its best rate for these plans with so many.
    """
    return 2 * rows if fields.get("guidance_scale") == 1.0 else 5 * rows // 2


def measure(
    bench: Bench,
    draws: Mapping[str, Draw],
    found: dict[str, Any],
    options: argparse.Namespace,
    save: Callable[[], None],
) -> None:
    """Fill `found` by plan, saving after each part."""
    for name, draw in draws.items():
        took = bench.singles(draw, options.singles)
        found[name] |= {"single_s": statistics.median(took), "singles_s": took, "windows": []}
        print(f"{name}: a single image takes {found[name]['single_s']:.3f} s of {took}", flush=True)
        save()
    for turn in range(options.windows):
        for name, draw in draws.items():
            one, rung = bench.window(draw, found[name]["in_flight"], options.window), found[name]
            rung["windows"].append(one)
            rung["images_s"] = statistics.median(each["images_s"] for each in rung["windows"])
            save()
            print(f"window {turn + 1} of {options.windows}: {name}", json.dumps(one), flush=True)


def prepared(options: argparse.Namespace, results: dict[str, Any]) -> ImageRunner:
    """The runner in INT8, with its graphs recorded: also for the one row of images without guidance."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tiny = sources.tiny_vae(Path(folder))
        source = sources.model(options.model, "cuda" if torch.cuda.is_available() else "cpu", tiny_vae=tiny)
    variant = sources.variant(source, "int8", sources.ranges(source))
    print(f"quantized after {time.perf_counter() - started:.1f} s", flush=True)
    del source
    gc.collect()
    buckets = (1, *range(2, 17, 2), *range(20, options.rows + 1, 4))
    runner, ready_s = runner_of(variant, Widths(options.rows, buckets=buckets))
    runner.recording.wait()  # for what was left when the time for it was over
    graphs = runner.backend.graphs
    results |= {
        "ready_s": round(ready_s, 1),
        "graphs": "{} of {}".format(*graphs.counts),
        "failed": [f"{key.phase} × {key.rows}: {why}" for key, why in graphs.failed.items()],
        "costs_ms": costs_ms(runner),
    }
    print(f"ready after {time.perf_counter() - started:.1f} s", json.dumps(results), flush=True)
    return runner


def show(rungs: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the table."""
    rows = []
    for name, one in rungs.items():
        windows = one["windows"]
        rates = " ".join(f"{each['images_s']:.2f}" for each in windows)
        last = windows[-1]
        rows.append(
            (name, one["in_flight"], f"{one['images_s']:.2f}", rates, f"{one['single_s']:.3f}", last["p50_s"],
             last["peak_gib"], last.get("sm_mhz", ""), last.get("power_w", ""))
        )  # fmt: skip
    table(("plan", "in flight", "images/s", "windows", "single s", "p50 s", "peak GiB", "SM MHz", "W"), rows)


def _in_flight(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if name not in RUNGS or not count.isdecimal() or int(count) < 1:
        raise argparse.ArgumentTypeError(f"must be a plan and a number, such as half=16, not {text!r}")
    return name, int(count)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--model", default=sdxl.NAME)
    made.add_argument("--rungs", default=",".join(name for name in RUNGS if name != "full"))
    made.add_argument("--window", type=float, default=60.0, help="seconds of one at least")
    made.add_argument("--windows", type=int, default=3, help="of each plan")
    made.add_argument("--singles", type=int, default=5, help="single images of each plan")
    made.add_argument("--rows", type=int, default=16, help="of a forward at most")
    made.add_argument("--in-flight", type=_in_flight, action="append", default=[], help="of one plan, such as gate=32")
    made.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    wanted = options.rungs.split(",")
    if unknown := [name for name in wanted if name not in RUNGS]:
        raise SystemExit(f"--rungs: there is no {', '.join(unknown)}; there are {', '.join(RUNGS)}")
    rooms = (
        *provenance.GPU_IMAGES, "benchmarks/loop.py",
        *(f"benchmarks/h200/{name}.py" for name in ("engine", "plans", "sources", "timing")),
    )  # fmt: skip
    results: dict[str, Any] = {"model": options.model, "rows": options.rows, "rungs": {}}

    def save() -> None:
        record.write("plans", results, options.out, rooms=rooms)

    runner = prepared(options, results)
    watch, chosen, draws = Watch(), dict(options.in_flight), {}
    with Engine([runner], on_tick=watch) as engine:
        bench = Bench(runner, engine, watch)
        for name in wanted:
            try:
                draws[name] = bench.draw(name, RUNGS[name])
            except (Invalid, TypeError) as error:
                print(f"{name} is left out: {error}", flush=True)
                continue
            results["rungs"][name] = {"in_flight": chosen.get(name) or in_flight_of(RUNGS[name], options.rows)}
        measure(bench, draws, results["rungs"], options, save)
    runner.close()
    show(results["rungs"])


if __name__ == "__main__":
    main()
