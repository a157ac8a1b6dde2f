"""Controls of an image request: pictures such as edges or poses, and the networks that make an image follow them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from contract.bounds import check_whole
from contract.errors import Invalid
from contract.picture_input import PictureInput, check_all

FIELD = "control"
MAX_CONTROLS = 4  # per request
MAX_MODE = 63
SHARE = 0.5  # of a deep row of the denoiser: what a row of a control network costs until one was measured
CANNY, DEPTH = "canny", "depth"
PREPROCESSORS = (CANNY, DEPTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlChoice(PictureInput):
    """Which network reads a control picture, and how.

    `preprocessor` is what makes the network's picture of the given one, of `PREPROCESSORS`; "": it is read as given.
    `mode` is the kind of the picture, for networks that read several (ControlNet-Union), by its number.
    """

    FIELD: ClassVar[str] = FIELD
    MOST: ClassVar[int] = MAX_CONTROLS

    preprocessor: str = ""
    mode: int | None = None

    def check(self) -> None:
        PictureInput.check(self)
        if self.mode is not None:
            check_whole(f"{FIELD}.mode", self.mode, 0, MAX_MODE)
        if self.preprocessor and self.preprocessor not in PREPROCESSORS:
            raise Invalid(f"{FIELD}.preprocessor", f"must be one of {', '.join(PREPROCESSORS)}")


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


def deep_rows(controls: Sequence[ControlChoice], steps: Sequence[tuple[int, bool]], own: int) -> int:
    """Rows that control networks compute over all of these steps, of so many rows each, deep or not.

    The first `own` are the model's, and the rest a refiner's.
    """
    acting = [control.acts(len(steps), own) for control in controls]
    return sum(rows * sum(acts[i] for acts in acting) for i, (rows, deep) in enumerate(steps) if deep)


def check(
    controls: Sequence[ControlChoice], offered: Collection[str] | None, preprocessors: Collection[str] | None = None
) -> None:
    """Raise `Invalid` for what no model takes, and for networks and `preprocessors` that are not offered.

    None: not checked.
    """
    check_all(ControlChoice, controls, offered)
    for one in controls:
        if preprocessors is not None and one.preprocessor and one.preprocessor not in preprocessors:
            raise not_offered(one.preprocessor)


def not_offered(preprocessor: str) -> Invalid:
    """The error for a preprocessor that the model's worker does not have."""
    why = " (its worker has no DIPTYCH_DEPTH_MODEL)" if preprocessor == DEPTH else ""
    return Invalid(f"{FIELD}.preprocessor", f"{preprocessor} is not offered by this model{why}")


def hashes(controls: Sequence[Control]) -> list[dict[str, Any]]:
    """Of an image's controls, as JSON; of each picture the SHA-256 of its pixels."""
    return [{**control.to_dict(), "image": hashlib.sha256(control.image).hexdigest()} for control in controls]
