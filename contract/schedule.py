"""A request's noise schedule: how timesteps are spaced, or which timesteps or noise levels exactly.

Imports no torch. What each sampler takes of it is in `pipeline.sampling.sigmas`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from contract.bounds import check_number, check_whole
from contract.card import MAX_STEPS
from contract.errors import Invalid

Spacing = Literal["linspace", "leading", "trailing"]  # diffusers' `timestep_spacing` (Lin et al., 2023, table 2)
Curve = Literal["karras", "exponential", "beta"]  # diffusers' `use_…_sigmas`
ScheduleType = Literal[Spacing, Curve]
SPACINGS: tuple[str, ...] = get_args(Spacing)
CURVES: tuple[str, ...] = get_args(Curve)
TYPES = SPACINGS + CURVES
MAX_TIMESTEP = 999_999
MAX_SIGMA = 1e6


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """A request's noise schedule; None leaves it to the model's scheduler_config.json.

    schedule_type: one of `TYPES`, in place of the model's spacing and curve.
    timesteps: of each step, on the training clock, strictly descending.
    sigmas: noise over signal of each step (flow matching: the share of noise), strictly descending; a last 0 is the end
        of the last step, and no step.
    eta: TCD's gamma (Zheng et al., 2024), 0 to 1: how much noise each step adds; default: 0, as of diffusers'
        pipelines.
    """

    schedule_type: str | None = None
    timesteps: tuple[int, ...] | None = None
    sigmas: tuple[float, ...] | None = None
    eta: float | None = None

    @property
    def steps(self) -> int | None:
        """The number of steps that the lists give; None without a list."""
        if self.timesteps is not None:
            return len(self.timesteps)
        return None if self.sigmas is None else sum(sigma > 0 for sigma in self.sigmas)

    def check(self, steps: int) -> None:
        """Raise `Invalid` for values that no model takes, or lists for another number of steps."""
        if self.schedule_type is not None and self.schedule_type not in TYPES:
            raise Invalid("schedule_type", f"must be one of {', '.join(TYPES)}")
        present = [name for name in ("timesteps", "sigmas", "schedule_type") if getattr(self, name) is not None]
        if len(present) > 1:
            raise Invalid(present[0], f"cannot be given together with {present[1]}")
        if self.timesteps is not None:
            _check_descending(
                "timesteps", self.timesteps, MAX_STEPS, lambda name, t: check_whole(name, t, 0, MAX_TIMESTEP)
            )
        if self.sigmas is not None:
            _check_descending(
                "sigmas", self.sigmas, MAX_STEPS + 1, lambda name, sigma: check_number(name, sigma, 0, MAX_SIGMA)
            )
            if not self.steps:
                raise Invalid("sigmas", "must have one above 0")
        if self.steps not in (None, steps):
            raise Invalid("steps", f"must be {self.steps}, as many as {present[0]} gives, or absent")


OWN = NoiseSchedule()  # the model's
SCHEDULE_FIELDS = tuple(item.name for item in fields(NoiseSchedule))


def schedule_of(fields: Mapping[str, Any]) -> NoiseSchedule:
    """The schedule that these fields of a request give, unchecked; lists become tuples."""
    values: dict[str, Any] = {name: fields.get(name) for name in SCHEDULE_FIELDS}
    for name, value in values.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    return NoiseSchedule(**values)


def _check_descending(field: str, values: Sequence[Any], limit: int, check: Callable[[str, Any], object]) -> None:
    if not isinstance(values, tuple) or not 1 <= len(values) <= limit:
        raise Invalid(field, f"must be a list of 1 to {limit} numbers")
    for index, value in enumerate(values):
        check(f"{field}.{index}", value)
        if index and value >= values[index - 1]:
            raise Invalid(f"{field}.{index}", "must be less than the one before")
