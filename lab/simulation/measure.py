"""Measures a cost table of an engine: its own curves, after every width has run a few times.

Other load on the machine affects the results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from uuid import uuid4

from contract.errors import Invalid
from contract.plan import DeepCache
from core.batching.request import Request
from core.config import Settings
from lab.bench.harness import provenance, record
from lab.bench.harness.traces import draw_batch
from lab.simulation.costs import SHALLOW, CostError, Costs, Seconds, Size
from lab.simulation.traffic import picture
from pipeline.runner import ImageRunner
from workers.build import build

_ROUNDS = 6  # curves follow what was cheap: more rounds forget a bad moment
_ROUND_S = 20.0  # at most, for one round at one size
_TOGETHER = (1, 2, 4, 8)  # pictures that are drawn together, after all widths were timed by themselves


def profile_costs(settings: Settings, sizes: Sequence[Size] = ()) -> Costs:
    """Measure at these sizes (default: the native one). Raises `CostError` for one that is not offered."""
    with record.alone(), build(settings) as runtime:
        runner = runtime.images
        sizes = sizes or [(runner.model.native, runner.model.native)]
        for size in sizes:
            if size not in runner.sizes and size not in runner.model.size_range:
                offered = ", ".join(f"{width}x{height}" for width, height in runner.sizes)
                hint = f"; and {runner.model.size_range}"
                raise CostError(f"--sizes: {size[0]}x{size[1]} is not offered; offered: {offered}{hint}")
        for size in sizes:
            runtime.lane.call(partial(runner.backend.prepare, size))
        runner.backend.wait()
        for _ in range(_ROUNDS):
            for size in sizes:
                runtime.lane.call(partial(runner.backend.prepare, size, measure_s=_ROUND_S))
            for size, together, depth in product(sizes, _TOGETHER, SHALLOW):
                if together <= settings.max_requests:
                    _draw(runner, size, together, depth)
        return table(runner, sizes)


def table(runner: ImageRunner, sizes: Sequence[Size]) -> Costs:
    """The runner's current curves. If a width has eager and compiled code, the cheaper one counts, as in the runner."""
    measured: dict[tuple[str, Size], Seconds] = {}
    for (phase, size, _), seconds in runner.backend.costs.measured().items():
        stored = measured.get((phase, size), {})
        fastest = {rows: min(stored.get(rows, took_s), took_s) for rows, took_s in seconds.items()}
        measured[phase, size] = {**stored, **fastest}
    header, model = provenance.provenance(), runner.model
    machine = header["machine"]
    where = machine["gpu"] if model.device.type == "cuda" else f"{machine['processor']}, {machine['threads']} threads"
    how = f"{header['date']}, at {header['commit']}, torch {machine['torch']}, load average {machine['load_average']}"
    device, source = f"{where}, {model.name}, {model.precision}", f"diptych bench simulate --measure, {how}"
    held_bytes = {size: _held(runner, size) for size in sizes}
    return Costs(model.name, measured, device=device, source=source, held_bytes=held_bytes)


def save(costs: Costs, path: Path) -> None:
    """Raises `CostError` if the file cannot be written."""
    try:
        path.write_text(json.dumps(costs.as_json(), indent=1) + "\n")
    except OSError as error:
        raise CostError(f"--measure: {path} cannot be written ({error.strerror})") from error


def _draw(runner: ImageRunner, size: Size, together: int, depth: str) -> None:
    """Run two steps, deep and shallow, of some images with uncached prompts, so that encoding is timed too."""
    requests: list[Request] = []
    for _ in range(together):
        prompt = str(uuid4())
        parameters = replace(picture(size, 2, True, DeepCache(2, depth)), prompt=prompt)
        requests.append(Request(prompt, runner.modality, parameters))
    try:
        runner.check(requests[0])
    except Invalid as error:
        raise CostError(f"nothing can be measured at {size[0]}x{size[1]}: {error}") from error
    draw_batch(runner, requests)


def _held(runner: ImageRunner, size: Size) -> dict[str, int]:
    """A request's memory: once per request, per row, and a row's features by phase."""
    narrow, sizes = (runner.holdings.size_bytes(picture(size, 2, guided, None)) for guided in (False, True))
    cached = {
        phase: runner.holdings.size_bytes(picture(size, 2, False, DeepCache(2, depth))) - narrow
        for depth, phase in SHALLOW.items()
    }
    return {"request": 2 * narrow - sizes, "row": sizes - narrow, **cached}
