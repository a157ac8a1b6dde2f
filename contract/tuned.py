"""Plans by name: the words of a request's `plan`, and the plans that `diptych tune` found for a model.

A plan is a set of request fields. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from contract.card import MAX_STEPS
from contract.errors import Invalid
from contract.plan import AUTOMATIC, GUIDANCE_FIELDS, OFF, CacheFields, GuidanceSchedule
from contract.plan import read_schedule as parse_schedule
from contract.schedule import OWN, ScheduleType, schedule_of

FIELD = "plan"  # of a request
FAST, BALANCED, BEST = "fast", "balanced", "best"

Plans = Mapping[str, Mapping[str, Any]]
"""Request fields by a plan's name."""


class PlanFields(BaseModel):
    """The fields of a request that a plan may set."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    scheduler: str | None = None
    schedule_type: ScheduleType | None = None
    guidance_interval: list[float] | None = None
    guided_steps: list[int] | None = None
    deepcache: Literal["off", "auto"] | CacheFields | None = None
    vae: Literal["full", "tiny"] | None = None

    @field_validator("guidance_interval")
    @classmethod
    def _is_an_interval(cls, value: Any) -> Any:
        GuidanceSchedule(interval=value).check(MAX_STEPS)
        return value

    @field_validator("guided_steps")
    @classmethod
    def _are_steps(cls, value: Any, info: ValidationInfo) -> Any:
        GuidanceSchedule(info.data.get("guidance_interval"), value).check(MAX_STEPS)
        return value

    @field_validator("deepcache")
    @classmethod
    def _is_a_schedule(cls, value: str | CacheFields | None) -> str | CacheFields | None:
        schedule = None if value is None else parse_schedule(value)
        if schedule is not None and (wrong := schedule.error_for(MAX_STEPS)):
            raise wrong
        return value


def fill(values: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """The request fields `values`, with a plan's where they are open.

    Where the request says its sampler or schedule, the plan's steps and sampler do not go with it; and where it says
    which steps are guided, in either way, the plan does not.
    """
    meant = dict(plan)
    if values.get("scheduler") is not None or schedule_of(values) != OWN:
        for name in ("steps", "scheduler", "schedule_type"):
            meant.pop(name, None)
    if any(values.get(name) is not None for name in GUIDANCE_FIELDS):
        for name in GUIDANCE_FIELDS:
            meant.pop(name, None)
    return meant | {name: value for name, value in values.items() if value is not None}


_READ = TypeAdapter(dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")], PlanFields])


def read(data: object) -> dict[str, dict[str, Any]]:
    """Plans from JSON data. Raises `Invalid`, naming the first field that is wrong."""
    try:
        plans = _READ.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise Invalid(f"plans.{path}" if path else "plans", first["msg"]) from None
    if wrong := sorted(plans.keys() & {OFF, AUTOMATIC}):
        raise Invalid(f"plans.{wrong[0]}", "is a word of requests, and cannot name a plan")
    return {name: plan.model_dump(exclude_none=True) for name, plan in plans.items()}


def named(name: str, plans: Plans) -> Mapping[str, Any]:
    """The fields of a plan. "off": every step whole and, with guidance on, guided; "auto": the tuned plan "balanced",
    and for a model that was not tuned every other step shallow.

    Raises `Invalid` for a name that is none of these and no tuned plan.
    """
    if name == OFF:
        return {"deepcache": OFF}
    if name == AUTOMATIC:
        return _readable(BALANCED, plans) if BALANCED in plans else {"deepcache": AUTOMATIC}
    if name not in plans:
        raise Invalid(FIELD, f"must be one of {', '.join((OFF, AUTOMATIC, *plans))}")
    return _readable(name, plans)


def _readable(name: str, plans: Plans) -> Mapping[str, Any]:
    """The fields of this plan, which may come from a newer worker."""
    try:
        return read({name: plans[name]})[name]
    except Invalid as error:
        raise Invalid(FIELD, f"{name} of this model cannot be read by this version") from error
