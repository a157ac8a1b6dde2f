"""The cost of extensions in the denoiser's steps: measured apart from the denoiser's own, where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from core.graphs import ExecutableKey
from pipeline.backends.backend import BatchGroup

if TYPE_CHECKING:
    from pipeline.backends.backend import ExecutionPlan, ImageBackend
    from pipeline.extensions.extension import Steps
    from pipeline.request_state import ImageState

WIDTHS = (2, 4, 8, 16, 32, 64, 128)  # of batches that a card's costs are taken from
_LEAST = 0.01  # of the denoiser's time, at which an observation is still one that the curve recovers from
Size = tuple[int, int]


class AddedCost(NamedTuple):
    """The seconds that extensions add to a step, and what updates their curve with the iteration's; None: none."""

    seconds: float = 0.0
    observe: Callable[[float], None] | None = None


def added(
    kinds: Iterable[Steps], backend: ImageBackend, group: BatchGroup, plan: ExecutionPlan, states: Sequence[ImageState],
) -> AddedCost:  # fmt: skip
    """Return the cost of the next step of these requests."""
    rows = [(kind, count) for kind in kinds if (count := kind.charged_rows(states, backend, plan.rows))]
    total_s = sum(seconds(kind, backend, group.phase, group.size, count) for kind, count in rows)
    if len(rows) > 1:  # what of it each took is not known
        return AddedCost(total_s, lambda took_s: None)
    return AddedCost(total_s, *(observer(kind.field, backend, group, plan, count) for kind, count in rows))


def seconds(kind: Steps, backend: ImageBackend, phase: str, size: Size, rows: int) -> float:
    """Return the cost of so many rows; until one was measured a share of the step's."""
    if not rows:
        return 0.0
    curve = backend.costs.curve(phase, size, False, kind.field)
    return curve(rows) if curve.measured else kind.share * backend.plan(BatchGroup(phase, size), rows).seconds


def left(kinds: Iterable[Steps], backend: ImageBackend, size: Size, state: ImageState) -> float:
    """Return the cost of all steps that are left to a request."""
    total_s = 0.0
    for kind in kinds:
        if kind.field in state.extensions:
            rows = Counter(
                (state.phase(step), kind.charged_rows([state], backend, state.widths[step], step - state.step))
                for step in range(state.step, len(state.plan))
            )
            total_s += sum(n * seconds(kind, backend, phase, size, count) for (phase, count), n in rows.items())
    return total_s


def observer(
    field: str, backend: ImageBackend, group: BatchGroup, plan: ExecutionPlan, rows: int
) -> Callable[[float], None]:
    """Return what updates an extension's curve with an iteration's seconds, less what its denoiser is expected to take.

    An iteration faster than its denoiser is expected to be counts as the least share: left out, only those that took
    longer would be seen.
    """
    key = ExecutableKey(group.phase, rows, group.size, variant=field)
    return lambda took_s: backend.costs.observe(key, False, max(_LEAST * plan.seconds, took_s - plan.seconds), field)
