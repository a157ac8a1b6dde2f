"""What control networks cost beside the denoiser's steps: measured from iterations that have any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from contract.control import SHARE, Control
from core.graphs import ExecutableKey
from pipeline.backends.backend import BatchGroup, ExecutionPlan, ImageBackend
from pipeline.phases import DEEP
from pipeline.request_state import ImageState

CONTROL = "control"  # the name of their curves, by rows and size
Size = tuple[int, int]


def seconds(backend: ImageBackend, size: Size, rows: int) -> float:
    """Of control networks over so many rows; until an iteration was measured a share of a deep step's."""
    if not rows:
        return 0.0
    curve = backend.costs.curve(CONTROL, size, False)
    return curve(rows) if curve.measured else SHARE * backend.plan(BatchGroup(DEEP, size), rows).seconds


def acting_rows(works: Sequence[ImageState]) -> int:
    """Rows of control networks in the next step of these requests, if it is deep."""
    return sum(work.rows * sum(bool(one.conditions(work.step)) for one in work.controls.networks) for work in works)


def left(backend: ImageBackend, size: Size, controls: Sequence[Control], work: ImageState) -> float:
    """Seconds of a request's controls in all steps that are left to it."""
    steps = len(work.plan)
    acting = [control.acts(steps) for control in controls]
    rows = Counter(
        work.widths[step] * sum(acts[step] for acts in acting) for step in range(work.step, steps) if work.plan[step]
    )
    return sum(count * seconds(backend, size, wide) for wide, count in rows.items())


def observer(backend: ImageBackend, way: ExecutionPlan, size: Size, rows: int) -> Callable[[float], None]:
    """Updates the curve with an iteration's seconds, less what its denoiser is expected to take."""
    key = ExecutableKey(CONTROL, rows, size)
    return lambda took_s: backend.costs.observe(key, False, took_s - way.seconds)
