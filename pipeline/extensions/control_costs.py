"""What control networks, image prompts and LoRAs add to the denoiser's steps: measured where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from contract import control, image_prompt
from contract.image import ImageParameters
from core.graphs import ExecutableKey
from pipeline.backends.backend import BatchGroup, ExecutionPlan, ImageBackend
from pipeline.backends.phases import DEEP, STEPS
from pipeline.request_state import ImageState

CONTROL, IMAGES = "control", "image prompts"  # the names of their curves, by rows and size
LORAS = {phase: f"loras, {phase}" for phase in STEPS}
_PHASES: Mapping[str, str] = {name: phase for phase, name in LORAS.items()}  # the others' are deep
_LORA_SHARE = 0.15
_SHARES: Mapping[str, float] = {
    CONTROL: control.SHARE, IMAGES: image_prompt.SHARE, **dict.fromkeys(LORAS.values(), _LORA_SHARE)
}  # fmt: skip
_LEAST = 0.01  # of the denoiser's time, at which an observation is still one that the curve recovers from
Size = tuple[int, int]


class Added(NamedTuple):
    """Seconds of what is added to a step, and what updates their curve with the iteration's; None: nothing is added."""

    seconds: float = 0.0
    observe: Callable[[float], None] | None = None


def added(backend: ImageBackend, group: BatchGroup, way: ExecutionPlan, works: Sequence[ImageState]) -> Added:
    """Of the next step of these requests. All rows of a forward pay for image prompts, whichever have one."""
    given = {LORAS[group.phase]: sum(work.rows for work in works if _adapted(backend, work, work.step))}
    if group.phase == DEEP:
        prompted = any(prompt.acts[work.step] for work in works for prompt in work.image_prompts)
        given |= {CONTROL: acting_rows(works), IMAGES: way.rows if prompted else 0}
    rows = {name: count for name, count in given.items() if count}
    total_s = sum(seconds(backend, group.size, count, name) for name, count in rows.items())
    if len(rows) > 1:  # what of it each took is not known
        return Added(total_s, lambda took_s: None)
    return Added(total_s, *(observer(backend, way, group.size, count, name) for name, count in rows.items()))


def seconds(backend: ImageBackend, size: Size, rows: int, name: str = CONTROL) -> float:
    """Of control networks over so many rows, image prompts or LoRAs; until one was measured a share of the step's."""
    if not rows:
        return 0.0
    curve, phase = backend.costs.curve(name, size, False), _PHASES.get(name, DEEP)
    return curve(rows) if curve.measured else _SHARES[name] * backend.plan(BatchGroup(phase, size), rows).seconds


def acting_rows(works: Sequence[ImageState]) -> int:
    """Rows of control networks in the next step of these requests, if it is deep."""
    return sum(work.rows * sum(bool(one.conditions(work.step)) for one in work.controls.networks) for work in works)


def left(backend: ImageBackend, size: Size, wanted: ImageParameters, work: ImageState) -> float:
    """Seconds of a request's controls, image prompts and LoRAs in all steps that are left to it."""
    steps = len(work.plan)
    controls, prompts = ([work.acts(one) for one in own] for own in (wanted.control, wanted.image_prompts))
    rows: Counter[tuple[str, int]] = Counter()
    for step in range(work.step, steps):
        if work.plan[step]:
            rows[CONTROL, work.widths[step] * sum(acts[step] for acts in controls)] += 1
            rows[IMAGES, work.widths[step] * any(acts[step] for acts in prompts)] += 1
        if _adapted(backend, work, step):
            rows[LORAS[work.phase(step)], work.widths[step]] += 1
    return sum(count * seconds(backend, size, wide, name) for (name, wide), count in rows.items())


def _adapted(backend: ImageBackend, work: ImageState, step: int) -> bool:
    """Whether LoRAs add to this step: where steps are recorded, with graphs of their own. Elsewhere its time counts as
    any step's.
    """
    return bool(work.uses) and backend.graphs.records and not work.refines(step)


def observer(
    backend: ImageBackend, way: ExecutionPlan, size: Size, rows: int, name: str = CONTROL
) -> Callable[[float], None]:
    """Updates the curve with an iteration's seconds, less what its denoiser is expected to take.

    An iteration faster than its denoiser is expected to be counts as the least share: left out, only those that took
    longer would be seen.
    """
    key = ExecutableKey(name, rows, size)
    return lambda took_s: backend.costs.observe(key, False, max(_LEAST * way.seconds, took_s - way.seconds))
