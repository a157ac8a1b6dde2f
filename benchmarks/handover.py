"""Measures pipelines that run by diffusers' own loop: `python -m benchmarks.handover [--shapes sd3-medium]`.

First the microseconds of passing the baton to a call's thread and back, by an empty loop. Then, of pipelines of the
published shapes with random weights, and in each mode (compiled, offloaded, quantized): seconds of a picture and of a
step by diffusers' own call and through the engine, by turns in one process; images per second with several requests in
flight; memory; and whether both draw the same bytes. `--device cpu --tiny` rehearses it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import command, pipelines, record
from contract.image import ImageParameters
from core.batching.engine import Engine
from core.batching.request import Outcome, Request
from pipeline.backends.phases import DEEP
from pipeline.checkpoints.folder import ModelError
from pipeline.families.diffusers import checkpoint
from pipeline.families.diffusers.loop import PipelineLoop
from pipeline.families.diffusers.runner import DiffusersRunner

_INTERVALS_S = (0.005, 0.0005)  # Python's default, and the worker's
_ROUNDS, _EMPTY_STEPS = 9, 2000
_IN_FLIGHT = 4
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"compiled": True},
    "offload-model": {"offload": "model"},
    "offload-group": {"offload": "group"},
    "offload-sequential": {"offload": "sequential"},
    "int8": {"precision": "int8"},
    "int8-compiled": {"precision": "int8", "compiled": True},
    "int8-dynamic-compiled": {"precision": "int8-dynamic", "compiled": True},
    "fp8-compiled": {"precision": "fp8", "compiled": True},
    "nf4": {"precision": "nf4"},
    "gguf": {"weights": "gguf"},
}
"""Arguments of `checkpoint.load`."""


class _EmptyPipeline:
    """A pipeline whose steps compute nothing."""

    _execution_device = torch.device("cpu")
    progress_bar: Any

    def __call__(self, steps: int, callback_on_step_end: Any) -> tuple[list[object]]:
        self.progress_bar(total=steps)
        for step in range(steps):
            callback_on_step_end(self, step, step, {})
        return ([object()],)


def handover_us(interval_s: float) -> float:
    """Return the median microseconds of one step of an empty loop."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    rounds = []
    for _ in range(_ROUNDS):
        loop = PipelineLoop(_EmptyPipeline(), {"steps": _EMPTY_STEPS}, calls_back=True)
        loop.advance()
        started = time.perf_counter()
        for _ in range(_EMPTY_STEPS):
            loop.advance()
        rounds.append((time.perf_counter() - started) / _EMPTY_STEPS)
        loop.advance()
    sys.setswitchinterval(usual_s)
    return round(1e6 * statistics.median(rounds), 1)


# -- pipelines ---------------------------------------------------------------------------------------------------------


@dataclass
class _Timed:
    """Seconds of pictures and of steps, and the bytes of the last picture."""

    pictures: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    drawn: bytes = b""


class _Bench:
    """One pipeline in one mode, drawn by diffusers' own call and by the engine."""

    def __init__(self, model: checkpoint.DiffusersModel, steps: int, side: int) -> None:
        self.model = model
        self._runner = DiffusersRunner(model)
        self._cuda = model.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1)  # bits depend on the threads that torch computes with on a CPU
        self._number = itertools.count()
        self.parameters = ImageParameters(
            "a red fox", 7, side, side, steps=steps, guidance_scale=model.defaults.guidance_scale
        )

    def own(self, timed: _Timed) -> None:
        """Draw by the class's own call."""
        self._thread.submit(self._own, timed).result()

    def _own(self, timed: _Timed) -> None:
        marks: list[Any] = []

        def mark(_pipeline: Any, _step: int, _timestep: Any, tensors: Any) -> Any:
            marks.append(self._mark())
            return tensors

        parameters, pipeline = self.parameters, self.model.base
        pipeline.set_progress_bar_config(disable=True)
        with self._counted(timed):
            image = pipeline(
                prompt=parameters.prompt, width=parameters.width, height=parameters.height,
                num_inference_steps=parameters.steps, generator=torch.Generator("cpu").manual_seed(parameters.seed),
                callback_on_step_end=mark,
            ).images[0]  # fmt: skip
        timed.drawn = image.convert("RGB").tobytes()
        timed.steps += [self._between(*pair) for pair in itertools.pairwise(marks)]

    def engine(self, timed: _Timed) -> None:
        """Draw through an engine, with nothing else in flight."""
        with self._engine() as engine, self._counted(timed):
            image = engine.submit(self._request()).result().image
        timed.drawn = image.tobytes()
        (curve,) = (
            self._runner.costs.curve(phase, size, False)
            for phase, size, _ in self._runner.costs.measured() if phase == DEEP
        )  # fmt: skip
        timed.steps.append(curve(1))

    def images_s(self) -> float:
        """Return the images per second of an engine with several in flight, from the first one's end to the last's."""
        ends: list[float] = []
        with self._engine() as engine:
            started = time.perf_counter()
            futures = [engine.submit(self._request()) for _ in range(_IN_FLIGHT)]
            for future in futures:
                future.add_done_callback(lambda _: ends.append(time.perf_counter()))
            for future in futures:
                future.result()
        return _IN_FLIGHT / (max(ends) - started)

    @contextmanager
    def _engine(self) -> Iterator[Engine]:
        engine = Engine([self._runner])
        try:
            yield engine
        finally:
            engine.close()

    def _request(self) -> Request:
        def listen(_request: Request, _outcome: Outcome) -> None:
            return None

        return Request(str(next(self._number)), "image", self.parameters, listener=listen)

    @contextmanager
    def _counted(self, timed: _Timed) -> Iterator[None]:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        yield
        timed.pictures.append(time.perf_counter() - started)  # pictures are on the host: all has ended
        timed.peak_bytes = torch.cuda.max_memory_allocated() if self._cuda else 0

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1000 if self._cuda else end - start)

    def close(self) -> None:
        self._thread.shutdown()
        self._runner.close()


def measure(folder: Path, mode: str, options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Return the figures of a pipeline in one mode. Raises `ModelError` for a mode that does not load."""
    arguments = {"precision": "auto", **MODES[mode]}
    if arguments.get("weights"):
        arguments["weights"] = str(pipelines.save_gguf(folder, options.device))
    started = time.perf_counter()
    model = checkpoint.load(str(folder), device=options.device, **arguments)
    bench = _Bench(model, steps, model.size_range.shortest if options.tiny else options.side)
    try:
        loaded_s = time.perf_counter() - started
        own, engine = _Timed(), _Timed()
        started = time.perf_counter()
        bench.own(_Timed())  # compiles, and makes the libraries' handles
        bench.engine(_Timed())
        first_s = time.perf_counter() - started
        until = time.perf_counter() + options.seconds
        while not own.pictures or (len(own.pictures) < options.turns and time.perf_counter() < until):
            bench.own(own)
            bench.engine(engine)
        images_s = bench.images_s() if bench.model.offload == "off" else 1 / statistics.median(engine.pictures)
    finally:
        bench.close()
    own_s, engine_s = statistics.median(own.pictures), statistics.median(engine.pictures)
    return {
        "picture_s": round(engine_s, 4), "own_picture_s": round(own_s, 4), "ratio": round(engine_s / own_s, 4),
        "step_ms": round(1000 * engine.steps[-1], 2), "own_step_ms": round(1000 * statistics.median(own.steps), 2),
        "beyond_ms": round(1000 * (engine_s - own_s) / steps, 3), "images_s": round(images_s, 3),
        "turns": len(own.pictures), "peak_gib": round(engine.peak_bytes / 2**30, 2),
        "weights_gib": round(bench.model.weight_bytes / 2**30, 2), "equal": own.drawn == engine.drawn,
        "levels": len(set(engine.drawn)), "loaded_s": round(loaded_s, 1), "first_two_s": round(first_s, 1),
    }  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all modes of all shapes; writes the result after each."""
    result: dict[str, Any] = {
        "handover_us": {f"{interval:g}": handover_us(interval) for interval in _INTERVALS_S}, "side": options.side,
        "in_flight": _IN_FLIGHT, "shapes": {},
    }  # fmt: skip
    with record.alone(), tempfile.TemporaryDirectory(prefix="diptych-pipelines-", dir=options.work) as work:
        for shape in options.shapes:
            steps = pipelines.STEPS[shape]
            started = time.perf_counter()
            folder = pipelines.save(shape, Path(work), options.device, small=options.tiny)
            record.progress(f"{shape}: written in {time.perf_counter() - started:.0f} s")
            modes: dict[str, Any] = {}
            result["shapes"][shape] = {"steps": steps, "modes": modes}
            for mode in options.modes:
                try:
                    modes[mode] = measure(folder, mode, options, steps)
                except (ModelError, RuntimeError, ImportError, AttributeError, TypeError, ValueError) as error:
                    modes[mode] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
                record.progress(f"{shape}, {mode}: {modes[mode]}")
                _free()
                record.publish(options.name, result, options.results, verbose=False)
            _remove(folder)
    return record.publish(options.name, result, options.results)


def _free() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _remove(folder: Path) -> None:
    """Release the memory that files in a RAM disk take."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("handover", __doc__)
    parser.add_argument("--shapes", default=",".join(pipelines.SHAPES), help="default: %(default)s")
    parser.add_argument("--modes", default=",".join(MODES), help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=3, help="pictures of each; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=15.0, help="after which no more turns begin in a mode")
    parser.add_argument("--side", type=int, default=1024, help="of a picture; default: %(default)s")
    parser.add_argument("--work", type=Path, help="for the weights, such as /dev/shm: up to 40 GB")
    parser.add_argument("--name", default="pipelines", help="of the file of results; default: %(default)s")
    options = parser.parse_args(arguments)
    options.shapes = command.names(options.shapes, pipelines.SHAPES, "--shapes")
    options.modes = command.names(options.modes, MODES, "--modes")
    result = run(options)
    rows = [
        (f"{shape}, {mode}", *(figures.get(name) for name in (
            "picture_s", "own_picture_s", "ratio", "step_ms", "own_step_ms", "images_s", "peak_gib", "equal")))
        for shape, measured in result["shapes"].items() for mode, figures in measured["modes"].items()
    ]  # fmt: skip
    header = ("", "picture s", "own", "ratio", "step ms", "own", "images/s", "peak GiB", "equal")
    record.table("By diffusers' own loop", header, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
