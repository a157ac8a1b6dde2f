"""The steps' plan, what is left out of them: DeepCache schedules, and which steps have guidance.

A DeepCache schedule says which steps run the whole UNet (deep) and which only its last block (shallow).

Follows DeepCache (Ma et al., 2023, sections 3.3 and 4.1) and NVIDIA's MLPerf v4.0 submission, which runs even steps
deep and odd steps shallow. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from contract.bodies import InBody, declarations, with_fields_of
from contract.bounds import check_number
from contract.errors import Invalid
from contract.strict import StrictModel

BLOCK, RESNET = "block", "resnet"
DEPTHS = (BLOCK, RESNET)
MAX_INTERVAL = 1_000
FIELD = "deepcache"  # of a request
GUIDANCE_INTERVAL, GUIDED_STEPS = GUIDANCE_FIELDS = ("guidance_interval", "guided_steps")  # of a request
_ALONE = "cannot be given together with interval, first and last"


@dataclass(frozen=True, slots=True)
class DeepCache:
    """A schedule. The first step is always deep: a shallow one needs cached features.

    Every `interval`-th step is deep, counted from the last of the `first` protected ones, and so are the `last` steps;
    or exactly `deep_steps` are, counted from 0. A shallow step recomputes the UNet's whole last up block ("block") or
    only its last residual block ("resnet").
    """

    interval: Annotated[int, Field(ge=1, le=MAX_INTERVAL), "every so many steps one is deep; default: 2"] = 2
    depth: Annotated[
        str,
        InBody(Literal["block", "resnet"]),
        "what shallow steps recompute of the last block: all, the default, or its last part",
    ] = BLOCK
    first: Annotated[int, Field(ge=0, le=MAX_INTERVAL), "so many first steps are deep"] = 0
    last: Annotated[int, Field(ge=0, le=MAX_INTERVAL), "so many last steps are deep"] = 0
    deep_steps: Annotated[
        tuple[int, ...] | None,
        Field(max_length=1000),
        "exactly these are deep, counted from 0; without the fields above",
    ] = None

    def error_for(self, steps: int) -> Invalid | None:
        """The reason why the schedule is invalid for this number of steps; None if it is valid."""
        if self.depth not in DEPTHS:
            return _wrong("depth", f"must be one of {', '.join(DEPTHS)}")
        for field in ("interval", "first", "last"):
            value, bounds = getattr(self, field), declarations(DeepCache)[field].bounds
            low, high = bounds["ge"], bounds["le"]
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                return _wrong(field, f"must be a whole number between {low} and {high}")
        if self.deep_steps is None:
            return None
        if (self.interval, self.first, self.last) != (2, 0, 0):
            return _wrong("deep_steps", _ALONE)
        if _are_steps(self.deep_steps, steps):
            return None
        return _wrong("deep_steps", f"must be different numbers between 0 and {steps - 1}")

    def plan(self, steps: int) -> tuple[bool, ...]:
        """Return whether each step is deep."""
        if self.deep_steps is not None:
            return tuple(step == 0 or step in self.deep_steps for step in range(steps))
        anchor = max(self.first, 1) - 1
        return tuple(
            step <= anchor or step >= steps - self.last or (step - anchor) % self.interval == 0 for step in range(steps)
        )


AUTO = DeepCache(interval=2, depth=RESNET, last=1)
"""The schedule of "auto": the submission's, with a deep last step, which avoids its loss in caption score; with it, the
shorter depth loses nothing more (docs/internals/results.md)."""


@dataclass(frozen=True, slots=True)
class GuidanceSchedule:
    """The steps of a picture with guidance that are guided; without `interval` and `steps` all.

    Those from start · n until before stop · n of n steps for the interval (start, stop), both rounded down, as in
    diffusers' guiders; or exactly `steps`, counted from 0.

    Guidance matters little to the last steps and harms at the first (Kynkäänniemi et al., 2024; T-GATE, Zhang et al.,
    2024, drops it after a gate step).
    """

    interval: tuple[float, float] | None = None
    steps: tuple[int, ...] | None = None

    def guided(self, steps: int) -> tuple[bool, ...]:
        """Return whether each of so many steps is guided."""
        if self.steps is not None:
            listed = frozenset(self.steps)
            return tuple(step in listed for step in range(steps))
        start, stop = self.interval or (0.0, 1.0)
        return tuple(int(start * steps) <= step < int(stop * steps) for step in range(steps))

    def check(self, steps: int) -> None:
        """Raise `Invalid` for what is no interval within 0 to 1, holds none of so many steps, or is no list of them."""
        if self.steps is not None:
            if self.interval is not None:
                raise Invalid(GUIDED_STEPS, f"cannot be given together with {GUIDANCE_INTERVAL}")
            if not isinstance(self.steps, (list, tuple)) or not self.steps:
                raise Invalid(GUIDED_STEPS, "must be a list of steps; a lower guidance_scale turns guidance off")
            if not _are_steps(self.steps, steps):
                raise Invalid(GUIDED_STEPS, f"must be different numbers between 0 and {steps - 1}")
        elif self.interval is not None:
            self._check_interval(self.interval, steps)

    def fits(self, steps: int) -> bool:
        """Return whether `check` accepts it."""
        try:
            self.check(steps)
        except Invalid:
            return False
        return True

    def _check_interval(self, interval: object, steps: int) -> None:
        if not isinstance(interval, (list, tuple)) or len(interval) != 2:
            raise Invalid(GUIDANCE_INTERVAL, "must be two numbers, such as [0, 0.5]")
        start, stop = (check_number(GUIDANCE_INTERVAL, number, 0, 1) for number in interval)
        if start >= stop:
            raise Invalid(GUIDANCE_INTERVAL, f"must end after it begins, not {start:g} to {stop:g}")
        if not any(self.guided(steps)):
            raise Invalid(
                GUIDANCE_INTERVAL, f"contains none of {steps} steps; a lower guidance_scale turns guidance off"
            )


def _are_steps(listed: Sequence[object], steps: int) -> bool:
    """Return whether they are different ones of so many, counted from 0."""
    valid = all(isinstance(step, int) and not isinstance(step, bool) and 0 <= step < steps for step in listed)
    return valid and len(set(listed)) == len(listed)


def rows_and_depths(
    cached: DeepCache | None, guidance: GuidanceSchedule, steps: int, rows: int
) -> tuple[tuple[int, bool], ...]:
    """Each step's rows in a forward, and whether it is deep, for a request of `rows` rows where it is guided.

    A step at which guidance begins, or begins again, is deep: no current features of its second row exist.
    """
    widths = [rows if rows == 1 or on else 1 for on in guidance.guided(steps)]
    deep = (True,) * steps if cached is None else cached.plan(steps)
    return tuple((width, deep[k] or (k > 0 and width > widths[k - 1])) for k, width in enumerate(widths))


@with_fields_of(DeepCache)
class CacheFields(StrictModel):
    """The steps that run the whole UNet (deep), the others only its last block (shallow). The first step is always
    deep.
    """

    model_config = ConfigDict(title="DeepCache")


OFF, AUTOMATIC = "off", "auto"


def parse(text: str) -> DeepCache | None:
    """Parse a schedule from the command line: "off", "auto", an interval ("3"), or one with a depth ("3:resnet").

    Raises ValueError, which describes the syntax.
    """
    if text in (OFF, AUTOMATIC):
        return AUTO if text == AUTOMATIC else None
    interval, _, depth = text.partition(":")
    if re.fullmatch(r"[0-9]{1,4}", interval):
        schedule = DeepCache(int(interval), depth or BLOCK)
        if schedule.error_for(1) is None:
            return schedule
    raise ValueError(
        f"must be off, auto, or an interval from 1 to {MAX_INTERVAL} such as 3, optionally with a depth "
        f"({' or '.join(DEPTHS)}), such as 3:resnet"
    )


def read_schedule(value: object) -> DeepCache | None:
    """Read a schedule from settings, requests or jobs: text, or an object of its fields, with null for absent ones.

    Raises `Invalid`. `error_for` checks it against the number of steps.
    """
    if isinstance(value, str):
        try:
            return parse(value)
        except ValueError as error:
            raise Invalid(FIELD, str(error)) from None
    fields = value.model_dump() if isinstance(value, CacheFields) else value
    if not isinstance(fields, Mapping):
        raise Invalid(FIELD, 'must be "off", "auto" or an object')
    values = {field: item for field, item in fields.items() if item is not None}
    for field in values.keys() - CacheFields.model_fields.keys():
        raise _wrong(field, "is not known")
    if isinstance(value, CacheFields) and "deep_steps" in values and values.keys() & {"interval", "first", "last"}:
        raise _wrong("deep_steps", _ALONE)
    if "deep_steps" in values:
        if not isinstance(values["deep_steps"], (list, tuple)):
            raise _wrong("deep_steps", "must be a list")
        values["deep_steps"] = tuple(values["deep_steps"])
    return DeepCache(**values)


def to_field(schedule: DeepCache | None) -> dict[str, Any] | str:
    """A schedule in the form of a request; "off" for none, and not null: a service may have another default."""
    if schedule is None:
        return OFF
    if schedule.deep_steps is not None:
        return {"depth": schedule.depth, "deep_steps": list(schedule.deep_steps)}
    ends = {"first": schedule.first, "last": schedule.last}
    return {"interval": schedule.interval, "depth": schedule.depth, **{name: n for name, n in ends.items() if n}}


def _wrong(part: str, message: str) -> Invalid:
    return Invalid(f"{FIELD}.{part}", message)
