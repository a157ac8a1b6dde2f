"""What pictures that a request is drawn by have in common: a model that reads each, its strength, and its steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self

from contract.bounds import check_number
from contract.errors import Invalid
from contract.loras import is_name

MAX_STRENGTH = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureInput:
    """A model that reads a picture, by its name in its folder, and how far it is followed.

    What it adds to the denoiser is multiplied by `strength`, in the steps from the share `start` of all steps to `end`,
    as diffusers has them (`acts`). Subclasses whose names end in Source have `image`, the picture's artifact key.
    """

    FIELD: ClassVar[str]  # the request's
    MOST: ClassVar[int]  # of them in a request

    model: str
    strength: float = 1.0
    start: float = 0.0
    end: float = 1.0

    def acts(self, steps: int, own: int | None = None) -> tuple[bool, ...]:
        """In which of so many steps it acts, of which the first `own` are the model's and the rest a refiner's."""
        within = steps if own is None else own
        return tuple(i < within and i / steps >= self.start and (i + 1) / steps <= self.end for i in range(steps))

    def check(self) -> None:
        """Raise `Invalid` for a value outside its bounds."""
        if not isinstance(self.model, str) or not is_name(self.model):
            raise Invalid(f"{self.FIELD}.model", "must be a name: letters, digits, _, . and -")
        check_number(f"{self.FIELD}.strength", self.strength, 0, MAX_STRENGTH)
        start = check_number(f"{self.FIELD}.start", self.start, 0, 1)
        if check_number(f"{self.FIELD}.end", self.end, 0, 1) <= start:
            raise Invalid(f"{self.FIELD}.end", "must be greater than start")

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without pixels; default values are left out."""
        own = [one for one in fields(self) if one.repr]
        told = {one.name: getattr(self, one.name) for one in own}
        return {one.name: told[one.name] for one in own if one.default is MISSING or told[one.name] != one.default}

    @classmethod
    def read(cls, told: object) -> Self:
        """Parse what `to_dict` wrote. Raises `Invalid`; `check` validates values."""
        if not isinstance(told, Mapping) or not {"model"} <= told.keys() <= {one.name for one in fields(cls)}:
            raise Invalid(cls.FIELD, "has another form")
        return cls(**told)


def check_all(kind: type[PictureInput], given: Sequence[PictureInput], offered: Collection[str] | None) -> None:
    """Raise `Invalid` for what no model takes, and for names that are not `offered`; None: not checked."""
    if len(given) > kind.MOST:
        raise Invalid(kind.FIELD, f"must be at most {kind.MOST}, not {len(given)}")
    for one in given:
        one.check()
        if offered is not None and one.model not in offered:
            known = f"there is no {one.model}; it has {', '.join(sorted(offered))}" if offered else "it has none"
            raise Invalid(f"{kind.FIELD}.model", f"is not offered by this model: {known}")
