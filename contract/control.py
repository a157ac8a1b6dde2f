"""Controls of an image request: pictures such as edges or poses, and the networks that make an image follow them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from contract.bounds import check_number, check_whole
from contract.errors import Invalid
from contract.loras import is_name

FIELD = "control"
MAX_CONTROLS = 4  # per request
MAX_STRENGTH = 10.0
MAX_MODE = 63
SHARE = 0.5  # of a deep row of the denoiser: what a row of a control network costs until one was measured
CANNY = "canny"
PREPROCESSORS = (CANNY,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlChoice:
    """Which network reads a control picture, and how.

    `model` is the network's name in the folder of controls. What it adds to the denoiser is multiplied by `strength`,
    in the steps from the share `start` of all steps to `end`, as diffusers has them (`acts`). `preprocessor` is what
    makes the network's picture of the given one, of `PREPROCESSORS`; "": it is read as given. `mode` is
    the kind of the picture, for networks that read several (ControlNet-Union), by its number.
    """

    model: str
    strength: float = 1.0
    start: float = 0.0
    end: float = 1.0
    preprocessor: str = ""
    mode: int | None = None

    def acts(self, steps: int) -> tuple[bool, ...]:
        """In which of so many steps it acts."""
        return tuple(not (i / steps < self.start or (i + 1) / steps > self.end) for i in range(steps))

    def check(self) -> None:
        """Raise `Invalid` for a value outside its bounds."""
        if not isinstance(self.model, str) or not is_name(self.model):
            raise Invalid(f"{FIELD}.model", "must be a name: letters, digits, _, . and -")
        check_number(f"{FIELD}.strength", self.strength, 0, MAX_STRENGTH)
        start = check_number(f"{FIELD}.start", self.start, 0, 1)
        if check_number(f"{FIELD}.end", self.end, 0, 1) <= start:
            raise Invalid(f"{FIELD}.end", "must be greater than start")
        if self.mode is not None:
            check_whole(f"{FIELD}.mode", self.mode, 0, MAX_MODE)
        if self.preprocessor and self.preprocessor not in PREPROCESSORS:
            raise Invalid(f"{FIELD}.preprocessor", f"must be one of {', '.join(PREPROCESSORS)}")

    def to_dict(self) -> dict[str, Any]:
        """As JSON; default values are left out."""
        told = {one.name: getattr(self, one.name) for one in fields(ControlChoice)}
        return {name: value for name, value in told.items() if value != _DEFAULTS[name]}


_DEFAULTS = {one.name: one.default for one in fields(ControlChoice)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Control(ControlChoice):
    """A control of an image. `image` [height, width, 3] is what the network reads: RGB, at the size of the request."""

    image: bytes = field(repr=False)

    @classmethod
    def of(cls, choice: ControlChoice, image: bytes) -> Control:
        return cls(**{one.name: getattr(choice, one.name) for one in fields(ControlChoice)}, image=image)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSource(ControlChoice):
    """A control in a job's record: its picture by its artifact key; None: not stored yet."""

    image: str | None = None

    def to_dict(self) -> dict[str, Any]:
        told = ControlChoice.to_dict(self)
        return told if self.image is None else {**told, "image": self.image}

    @classmethod
    def read(cls, told: object) -> ControlSource:
        """Parse what `to_dict` wrote. Raises `Invalid`; `check` validates values."""
        if not isinstance(told, Mapping) or not {"model"} <= told.keys() <= {one.name for one in fields(cls)}:
            raise Invalid(FIELD, "has another form")
        return cls(**told)


def deep_rows(controls: Sequence[ControlChoice], steps: Sequence[tuple[int, bool]]) -> int:
    """Rows that control networks compute over all of these steps, of so many rows each, deep or not."""
    acting = [control.acts(len(steps)) for control in controls]
    return sum(rows * sum(acts[i] for acts in acting) for i, (rows, deep) in enumerate(steps) if deep)


def check(controls: Sequence[ControlChoice], offered: Collection[str] | None) -> None:
    """Raise `Invalid` for what no model takes, and for networks that are not `offered`; None: not checked."""
    if len(controls) > MAX_CONTROLS:
        raise Invalid(FIELD, f"must be at most {MAX_CONTROLS}, not {len(controls)}")
    for control in controls:
        control.check()
        if offered is not None and control.model not in offered:
            known = f"there is no {control.model}; it has {', '.join(sorted(offered))}" if offered else "it has none"
            raise Invalid(f"{FIELD}.model", f"is not offered by this model: {known}")


def hashes(controls: Sequence[Control]) -> list[dict[str, Any]]:
    """Of an image's controls, as JSON; of each picture the SHA-256 of its pixels."""
    return [{**control.to_dict(), "image": hashlib.sha256(control.image).hexdigest()} for control in controls]
