"""The ladder: pictures per second of one model, one optimization a rung, all measured in one run.

Knows the stock diffusers pipeline and the engine; measures speed, and leaves quality to the evaluation.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import record
from core.batching.runner import Lane
from core.config import Settings

RUNGS = ("diffusers", "diffusers-static-batch", "step-batching", "+compile")
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
        for name, compiled in (("step-batching", False), ("+compile", True)):
            if name in rungs:
                draw = _engine(settings, steps, compiled, lane, stack)
                if draw is None:
                    rungs = [rung for rung in rungs if rung != name]
                else:
                    draws[name] = draw
        measured = _turns({name: draws[name] for name in rungs}, pictures)
    first = next(iter(measured.values()))
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "images_per_s": round(rate, 4),
            "speedup": round(rate / first[0], 3),
            "spread": [round(value, 4) for value in (low, high)],
        }
        for name, (rate, low, high) in measured.items()
    ]
    record.table(
        f"{Path(settings.model_name).name}, {steps} steps, guidance, {settings.precision}",
        ("rung", "pictures/s", "speedup", "lowest to highest turn"),
        [
            (r["name"], f"{r['images_per_s']:.3f}", f"{r['speedup']:.2f}×", "{:.3f} to {:.3f}".format(*r["spread"]))
            for r in rows
        ],
    )
    result = {
        "rungs": rows,
        "machine": record.machine(),
        "model": Path(settings.model_name).name,
        "steps": steps,
        "pictures": -(-pictures // _ROUND) * _ROUND,
        "in_flight": IN_FLIGHT,
        "static_batch": STATIC_BATCH,
        "resident_mib": record.resident_mib(),
    }
    record.publish("ladder", result, results)
    return result


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
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision]

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


def _engine(settings: Settings, steps: int, compiled: bool, lane: Lane, stack: ExitStack) -> Draw | None:
    """A closed loop of `IN_FLIGHT` requests; None where no compiler is there."""
    from core.batching.request import Request
    from core.graphs import compiler
    from pipeline.parameters import ImageParameters
    from workers.build import build

    if compiled and compiler() is None:
        logging.getLogger(__name__).warning("no C++ compiler: the rung +compile is left out")
        return None
    works = stack.enter_context(build(settings.model_copy(update={"compile": compiled}), lane=lane, measure_s=10.0))
    if compiled:
        works.images.execution.wait()
        works.images.prepare(measure_s=10.0)
    native = works.images.model.native

    def draw(jobs: Sequence[tuple[str, int]]) -> None:
        from threading import Semaphore

        room = Semaphore(IN_FLIGHT)
        futures = []
        for prompt, seed in jobs:
            room.acquire()
            wanted = ImageParameters(prompt, seed, native, native, steps=steps)
            future = works.engine.submit(Request(f"{compiled}-{prompt}-{seed}", "image", wanted))
            future.add_done_callback(lambda _: room.release())
            futures.append(future)
        for future in futures:
            future.result()

    return draw
