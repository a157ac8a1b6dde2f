"""Measures what a step of a pipeline costs beyond diffusers' own: passing the baton to its thread and back.

`python -m benchmarks.handover [FOLDER]` prints JSON: microseconds a step of an empty loop, at Python's switch interval
and at the worker's; and with a pipeline's folder the seconds of its steps in its own call, and in the runner's
iterations.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from typing import Any

import torch

from contract.image import ImageParameters
from core.batching.request import Request
from pipeline.families.diffusers import checkpoint
from pipeline.families.diffusers.loop import PipelineLoop
from pipeline.families.diffusers.runner import DiffusersRunner

_INTERVALS_S = (0.005, 0.0005)  # Python's default, and the worker's
_ROUNDS, _EMPTY_STEPS, _STEPS = 9, 2000, 20


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


def steps_s(folder: str) -> dict[str, float]:
    """Return the median seconds of a step of this pipeline by its own call and by the runner, by turns."""
    runner = DiffusersRunner(checkpoint.load(folder, precision="auto", device="cpu"))
    side, seconds = runner.model.native, dict[str, list[float]](own=[], runner=[])
    guidance = runner.model.defaults.guidance_scale
    parameters = ImageParameters("a red fox", 0, side, side, steps=_STEPS, guidance_scale=guidance)
    for _ in range(3):
        moments: list[float] = []

        def note(pipeline: Any, step: int, timestep: Any, tensors: Any, moments: list[float] = moments) -> Any:
            moments.append(time.perf_counter())
            return tensors

        runner.model.base(
            prompt="a red fox", width=side, height=side, num_inference_steps=_STEPS, callback_on_step_end=note
        )
        seconds["own"] += [end - start for start, end in itertools.pairwise(moments)]
        request = Request("timed", "image", parameters)
        runner.check(request)
        runner.admit(request)
        runner.launch([request]).outcome()
        while True:
            started = time.perf_counter()
            (outcome,) = runner.launch([request]).outcome().values()
            if outcome.finished:
                break
            seconds["runner"].append(time.perf_counter() - started)
        runner.release(request)
    runner.close()
    return {name: round(statistics.median(values), 6) for name, values in seconds.items()}


if __name__ == "__main__":
    figures: dict[str, Any] = {f"handover_us at {interval} s": handover_us(interval) for interval in _INTERVALS_S}
    for path in sys.argv[1:]:
        figures[f"step_s of {path}"] = steps_s(path)
    print(json.dumps(figures, indent=1))
