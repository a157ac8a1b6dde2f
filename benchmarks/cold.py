"""Measures a cold model's first picture while another model draws, and what its loading costs the other one.

    python -m benchmarks.cold [--plan full] [--turns 5] [--work /dev/shm]

A worker's engine serves two models from folders: SDXL's shape in 8 bits, whose weights are equal and held twice. A
closed loop keeps requests of the first in flight. In each turn the second leaves memory, and one request for it comes:
seconds until its picture, of these until it was loaded from its files, and beside them a picture of the loaded model.
A step of the first model takes the time between the ends of two forwards of one width with nothing between them:
while the second is loaded, relative to all other times. `--device cpu --tiny` rehearses it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine import RUNGS, in_flight_of
from benchmarks.fleet import RUNGS as RUNG_OF
from benchmarks.harness import command, models, record
from benchmarks.harness.loop import Loop
from benchmarks.harness.record import BenchError
from contract.image import ImageParameters
from core.batching.engine import Tick
from core.batching.request import Request
from core.config import Settings
from pipeline.backends.phases import DEEP
from pipeline.checkpoints import sdxl, tiny
from pipeline.checkpoints.load import load
from pipeline.model_pool import ModelGroup, ModelPool, Pooled
from pipeline.quantization import quantized
from pipeline.quantization.calibration import default_prompts
from workers.build import Runtime, build

_NAMES = ("first", "second")
_READY_S = 600.0


class Forward(NamedTuple):
    """A forward that ended at this time, by `time.perf_counter`."""

    end: float
    model: str
    phase: str
    rows: int


def save(name: str, work: Path, device: str) -> list[str]:
    """Write two folders of a model with random weights and its variant in 8 bits; returns their names."""
    first, second = (work / each for each in _NAMES)
    models.stock_pipeline(models.model(name, device)).save_pretrained(first)
    precision = "fp32" if device == "cpu" else "bf16"
    quantized.make(load(str(first), precision=precision, device=device), default_prompts()[:1], first)
    shutil.copytree(first, second, copy_function=os.link)
    return [str(first), str(second)]


Span = tuple[float, float]  # of time


def step_times(forwards: Sequence[Forward], spans: Sequence[Span]) -> dict[int, list[float]]:
    """Seconds between the ends of two deep forwards of the first model of equal width with nothing between them, by
    their rows: those within one of these spans.
    """
    times: dict[int, list[float]] = {}
    for before, after in itertools.pairwise(forwards):
        alike = before[1:] == after[1:] and after[1:3] == (_NAMES[0], DEEP)
        if alike and any(start <= before.end and after.end <= stop for start, stop in spans):
            times.setdefault(after.rows, []).append(after.end - before.end)
    return times


def cost(forwards: Sequence[Forward], loading: Sequence[Span]) -> dict[str, Any]:
    """What steps took while the second model was loaded, relative to the others of the same width, and of the width
    that most had the milliseconds of both.
    """
    first, last = forwards[0].end, forwards[-1].end
    edges = [first, *itertools.chain.from_iterable(loading), last]
    usual = {
        rows: statistics.mean(times)
        for rows, times in step_times(forwards, [*zip(edges[::2], edges[1::2], strict=True)]).items()
    }
    meanwhile = {rows: times for rows, times in step_times(forwards, loading).items() if rows in usual}
    took_s = sum(sum(times) for times in meanwhile.values())
    expected_s = sum(len(times) * usual[rows] for rows, times in meanwhile.items())
    rows = max(meanwhile, key=lambda rows: len(meanwhile[rows]), default=0)
    return {
        "ratio": round(took_s / expected_s, 4) if expected_s else None,
        "steps": sum(len(times) for times in meanwhile.values()), "rows": rows,
        "step_ms": round(1e3 * usual[rows], 2) if rows else None,
        "while_loading_ms": round(1e3 * statistics.mean(meanwhile[rows]), 2) if rows else None,
    }  # fmt: skip


class _Bench:
    """Two models in one engine, one of them at work."""

    def __init__(
        self, runtime: Runtime, pool: ModelPool[Pooled], forwards: list[Forward], fields: Mapping[str, Any]
    ) -> None:
        self._engine, self._pool, self._forwards = runtime.engine, pool, forwards
        self._side = runtime.images.model.native
        self._fields = {"steps": models.STEPS, "guidance_scale": models.GUIDANCE, **fields}
        self._numbers = itertools.count()

    def request(self, model: str) -> Request:
        number = next(self._numbers)
        prompt = f"{number}: a small red boat on a lake"
        parameters = ImageParameters(prompt, number, self._side, self._side, **self._fields)
        return Request(f"{model}-{number}", "image", parameters, model=model)

    def turn(self, before_s: float) -> tuple[dict[str, Any], Span]:
        """Draw with the cold model, and again when it is loaded; figures, and the time in which it was loaded."""
        time.sleep(before_s)
        self._pool.evict(_NAMES[1:])
        sent = time.perf_counter()
        future = self._engine.submit(self.request(_NAMES[1]))
        while self._pool.resident(_NAMES[1]) is None and not future.done():
            time.sleep(0.001)
        loaded = time.perf_counter()
        future.result()
        drawn = time.perf_counter()
        self._engine.submit(self.request(_NAMES[1])).result()
        warm_s = time.perf_counter() - drawn
        figures = {"first_picture_s": drawn - sent, "loaded_s": loaded - sent, "warm_s": warm_s}
        return {name: round(seconds, 3) for name, seconds in figures.items()}, (sent, loaded)


def measure(options: argparse.Namespace, folders: Sequence[str]) -> dict[str, Any]:
    """The figures of all turns, and their medians."""
    forwards: list[Forward] = []

    def note(tick: Tick) -> None:
        if isinstance(tick.group, ModelGroup):
            forwards.append(Forward(time.perf_counter(), tick.group.model, tick.group.phase, tick.rows))

    settings = Settings(
        model=folders[0], models=folders[1], precision="int8", device=options.device, text_model="off",
        max_rows=options.rows, kernels=not options.tiny or options.device == "cuda",
    )  # fmt: skip
    with build(settings, measure_s=0.2 if options.tiny else 90.0, on_tick=note) as runtime:
        pool = runtime.pool
        assert pool is not None
        if not runtime.images.recording.wait(_READY_S):
            raise BenchError(f"graphs were not recorded within {_READY_S:g} s")
        pool.load(_NAMES[1])
        fields = {**RUNGS[RUNG_OF.get(options.plan, options.plan)][1], **({"steps": 2} if options.tiny else {})}
        bench = _Bench(runtime, pool, forwards, fields)
        in_flight = options.in_flight or in_flight_of(fields, options.rows)
        loop = Loop(runtime.engine, lambda _: bench.request(_NAMES[0]), in_flight)
        loop.start()
        loop.reach(in_flight)
        turns, loading = zip(*(bench.turn(options.before) for _ in range(options.turns)), strict=True)
        time.sleep(options.before)
        seen = [*forwards]
        loop.close()
    if loop.error is not None:  # fewer were in flight
        raise loop.error
    median = {key: round(statistics.median(turn[key] for turn in turns), 3) for key in turns[0]}
    return {"in_flight": in_flight, **cost(seen, loading), **median, "turns": turns}


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="diptych-cold-", dir=options.work) as work:
        folders = save(options.model, Path(work), options.device)
        record.progress("models are written")
        figures = measure(options, folders)
    result = {"model": options.model, "plan": options.plan, "files_in": str(options.work or tempfile.gettempdir())}
    return record.publish(options.name, {**result, **figures}, options.results)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("cold", __doc__)
    parser.add_argument("--plan", choices=("full", "half", "4-steps"), default="full", help="default: %(default)s")
    parser.add_argument("--model", default=sdxl.NAME, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--before", type=float, default=8.0, help="seconds before a turn; default: %(default)s")
    parser.add_argument("--rows", type=int, default=16, help="of a forward at most; default: %(default)s")
    parser.add_argument("--in-flight", type=int, default=0, help="requests; default: enough for full forwards")
    parser.add_argument("--work", type=Path, help="for the models' files, such as /dev/shm; default: temporary files")
    parser.add_argument("--name", default="cold", help="of the file of results; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.model, options.rows = tiny.TINY, 8
    result = run(options)
    keys = ("first_picture_s", "loaded_s", "warm_s")
    rows = [(str(number), *(turn[key] for key in keys)) for number, turn in enumerate(result["turns"])]
    header = ("turn", "cold picture s", "of it loading s", "picture of the loaded model s")
    ratio, steps = result["ratio"], result["steps"]
    record.progress(f"a step of the other model while it loads: {ratio} of the usual, {steps} steps")
    record.table(f"{result['model']}: a cold model beside one that draws", header, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
