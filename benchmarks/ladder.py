"""The ladder: pictures per second of one model, one optimization a rung, all measured in one run.

Measures speed alone: what a rung costs in quality is measured by `evaluation.variants`.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Semaphore
from typing import TYPE_CHECKING, Any

from benchmarks import provenance, record
from core import schedule
from core.batching.request import Request
from core.batching.runner import Lane
from core.config import Settings
from pipeline.folder import ModelError
from pipeline.parameters import ImageParameters

if TYPE_CHECKING:
    from workers.build import Works

log = logging.getLogger(__name__)

# What the engine is told on each of its rungs. "+compile" is torch's compiler, "+kernels" are our own instead.
_ENGINE: dict[str, dict[str, Any]] = {
    "step-batching": {"precision": "fp32", "kernels": False, "compile": False},
    "+compile": {"precision": "fp32", "kernels": False, "compile": True},
    "+kernels": {"precision": "fp32", "kernels": True, "compile": False},
    "+int8": {"precision": "int8", "kernels": True, "compile": False},
    "+deepcache": {"precision": "int8", "kernels": True, "compile": False, "deepcache": "auto"},
}
RUNGS = ("diffusers", "diffusers-static-batch", *_ENGINE)
STATIC_BATCH = 8
IN_FLIGHT = 16
_ROUND = 32  # pictures of each rung before it is the next one's turn: drift of the machine meets all rungs alike

Draw = Callable[[Sequence[tuple[str, int]]], None]
"""Draws a picture for each (prompt, seed)."""


def run(
    settings: Settings, *, steps: int, pictures: int, results: Path | None, rungs: Sequence[str] = RUNGS
) -> dict[str, Any]:
    """Measure the rungs in turns of `_ROUND` pictures, at least `pictures` of each; report the median turn."""
    unknown = [name for name in rungs if name not in RUNGS]
    if unknown:
        raise record.BenchError(f"--rungs: there is no {', '.join(unknown)}; there are {', '.join(RUNGS)}")
    with record.alone(), ExitStack() as stack:
        draws: dict[str, Draw] = {}
        lane = Lane("rungs")  # all compute on one thread: see Lane
        if any(name.startswith("diffusers") for name in rungs):
            stock = stock_pipeline(settings, steps, lane)
            draws["diffusers"] = lambda jobs: _in_batches(stock, jobs, 1)
            draws["diffusers-static-batch"] = lambda jobs: _in_batches(stock, jobs, STATIC_BATCH)
        memory: dict[str, Any] = {}
        for name in [name for name in rungs if name in _ENGINE]:
            works = _engine(settings, name, lane, stack)
            if works is None:
                rungs = [rung for rung in rungs if rung != name]
                continue
            draws[name] = _closed_loop(works, name, steps)
            memory[name] = works.images.execution.size_bytes
        measured = _turns({name: draws[name] for name in rungs}, pictures)
    first = next(iter(measured.values()))
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "images_per_s": round(rate, 4),
            "speedup": round(rate / first[0], 3),
            "spread": [round(value, 4) for value in (low, high)],
            "memory": memory.get(name),
        }
        for name, (rate, low, high) in measured.items()
    ]
    record.table(
        f"{Path(settings.model_name).name}, {steps} steps, guidance",
        ("rung", "pictures/s", "speedup", "lowest to highest"),
        [
            (r["name"], f"{r['images_per_s']:.3f}", f"{r['speedup']:.2f}×", "{:.3f} to {:.3f}".format(*r["spread"]))
            for r in rows
        ],
    )
    result = {
        "rungs": rows,
        "model": Path(settings.model_name).name,
        "steps": steps,
        "pictures": -(-pictures // _ROUND) * _ROUND,
        "in_flight": IN_FLIGHT,
        "static_batch": STATIC_BATCH,
        "resident_mib": record.resident_mib(),
    }
    return record.publish("ladder", result, results, rooms=(*provenance.IMAGES, "benchmarks/ladder.py"))


def _in_batches(draw: Draw, jobs: Sequence[tuple[str, int]], size: int) -> None:
    for start in range(0, len(jobs), size):
        draw(jobs[start : start + size])


def _turns(draws: dict[str, Draw], pictures: int) -> dict[str, tuple[float, float, float]]:
    """(median, lowest, highest) pictures per second over the turns, by rung."""
    from rich.console import Console

    console = Console(stderr=True)
    turns = max(1, -(-pictures // _ROUND))
    rates: dict[str, list[float]] = {name: [] for name in draws}
    number = 0
    for name, draw in draws.items():
        console.print(f"warming up {name}")
        draw([(f"a warm cup of tea, {i}", i) for i in range(STATIC_BATCH)])
    for turn in range(turns):
        for name, draw in draws.items():
            # Every picture has a prompt of its own: no rung lives on remembered embeddings.
            jobs = [(f"picture {number + i} of a small red boat on a lake", number + i) for i in range(_ROUND)]
            number += _ROUND
            started = time.perf_counter()
            draw(jobs)
            rates[name].append(_ROUND / (time.perf_counter() - started))
            console.print(f"turn {turn + 1} of {turns}: {name} {rates[name][-1]:.3f} pictures/s")
    return {name: (statistics.median(values), min(values), max(values)) for name, values in rates.items()}


def stock_pipeline(settings: Settings, steps: int, lane: Lane) -> Draw:
    """The stock pipeline on its own copy of the weights, run on the lane's thread like everything else."""
    import torch
    from diffusers import StableDiffusionXLPipeline

    from pipeline import tiny

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision, torch.float32)

    def make() -> Any:
        if settings.model_name in tiny.SHAPES:
            return tiny.make(tiny.SHAPES[settings.model_name]).to(dtype)
        return StableDiffusionXLPipeline.from_pretrained(settings.model_name, torch_dtype=dtype)

    pipeline = lane.call(make)
    pipeline.set_progress_bar_config(disable=True)

    def draw(jobs: Sequence[tuple[str, int]]) -> None:
        lane.call(
            lambda: pipeline(
                [prompt for prompt, _ in jobs],
                num_inference_steps=steps,
                guidance_scale=5.0,
                generator=[torch.Generator().manual_seed(seed) for _, seed in jobs],
            )
        )

    return draw


def _engine(settings: Settings, rung: str, lane: Lane, stack: ExitStack) -> Works | None:
    """The engine of a rung, its costs measured; None, said in the log, where this machine has none such."""
    from core.graphs import compiler
    from workers.build import build

    wanted = _ENGINE[rung]
    if wanted["compile"] and compiler() is None:
        log.warning("no C++ compiler: the rung %s is left out", rung)
        return None
    try:
        works = stack.enter_context(build(settings.model_copy(update=wanted), lane=lane, measure_s=10.0))
    except ModelError as error:
        log.warning("the rung %s is left out: %s", rung, error)
        return None
    if wanted["kernels"] and not works.images.execution.programs:
        log.warning("the rung %s is left out: our own kernels do not run here", rung)
        return None
    if wanted["compile"]:
        works.images.execution.wait()
        works.images.prepare(measure_s=10.0)
    return works


def _closed_loop(works: Works, rung: str, steps: int) -> Draw:
    """A closed loop of `IN_FLIGHT` requests."""
    native = works.images.model.native
    cached = schedule.parse(works.settings.deepcache)

    def draw(jobs: Sequence[tuple[str, int]]) -> None:
        room = Semaphore(IN_FLIGHT)
        futures = []
        for prompt, seed in jobs:
            room.acquire()
            wanted = ImageParameters(prompt, seed, native, native, steps=steps, deepcache=cached)
            future = works.engine.submit(Request(f"{rung}-{prompt}-{seed}", "image", wanted))
            future.add_done_callback(lambda _: room.release())
            futures.append(future)
        for future in futures:
            future.result()

    return draw
