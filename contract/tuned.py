"""Plans by name: the words of a request's `plan`, and the plans that `diptych tune` found for a model.

A plan is a set of request fields. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from contract.errors import Invalid
from contract.plan import AUTOMATIC, OFF, CacheFields
from contract.schedule import NoiseSchedule, schedule_of

FIELD = "plan"  # of a request
FAST, BALANCED, BEST = "fast", "balanced", "best"

Plans = Mapping[str, Mapping[str, Any]]
"""Request fields by a plan's name."""


class PlanFields(BaseModel):
    """The fields of a request that a plan may set."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    steps: int | None = Field(default=None, ge=1)
    scheduler: str | None = None
    schedule_type: str | None = None
    guidance_interval: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    deepcache: Literal["off", "auto"] | CacheFields | None = None


def fill(given: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """The request fields `given`, with a plan's where they are open.

    Where the request says its sampler or schedule, the plan's steps and sampler do not go with it.
    """
    meant = dict(plan)
    if given.get("scheduler") is not None or schedule_of(given) != NoiseSchedule():
        for name in ("steps", "scheduler", "schedule_type"):
            meant.pop(name, None)
    return meant | {name: value for name, value in given.items() if value is not None}


_READ = TypeAdapter(dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")], PlanFields])


def read(data: object) -> dict[str, dict[str, Any]]:
    """Plans from JSON data. Raises `Invalid`, naming the first field that is wrong."""
    try:
        found = _READ.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise Invalid(f"plans.{path}" if path else "plans", first["msg"]) from None
    if wrong := sorted(found.keys() & {OFF, AUTOMATIC}):
        raise Invalid(f"plans.{wrong[0]}", "is a word of requests, and cannot name a plan")
    return {name: plan.model_dump(exclude_none=True) for name, plan in found.items()}


def named(name: str, plans: Plans) -> Mapping[str, Any]:
    """The fields of a plan. "off": every step whole and, with guidance on, guided; "auto": the tuned plan "balanced",
    and for a model that was not tuned every other step shallow.

    Raises `Invalid` for a name that is none of these and no tuned plan.
    """
    if name == OFF:
        return {"deepcache": OFF}
    if name == AUTOMATIC:
        return plans.get(BALANCED, {"deepcache": AUTOMATIC})
    if name not in plans:
        raise Invalid(FIELD, f"must be one of {', '.join((OFF, AUTOMATIC, *plans))}")
    return plans[name]
