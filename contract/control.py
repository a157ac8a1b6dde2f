"""Controls of an image request: pictures such as edges or poses, and the networks that make an image follow them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from contract.bodies import InBody
from contract.errors import Invalid
from contract.picture_input import Fit, PictureInput
from contract.strict import MAX_NAME

FIELD = "control"
MAX_CONTROLS = 4  # per request
MAX_MODE = 63
CANNY, DEPTH = "canny", "depth"
PREPROCESSORS = (CANNY, DEPTH)
LOW, HIGH = 100, 200  # thresholds of canny, as of the gradient's L1 norm
MAX_THRESHOLD = 2040


@dataclass(frozen=True, slots=True, kw_only=True)
class Control(PictureInput):
    """A picture that the image follows, and the network that reads it.

    As pixels it is of the request's size. `preprocessor` is what makes the network's picture of the given one, of
    `PREPROCESSORS`; "": it is read as given. `mode` is the kind of the picture, for networks that read several
    (ControlNet-Union), by its number. `fit` is how a picture of another size comes to the request's; "": as an edit's
    source does, else by crop. The thresholds are canny's.
    """

    FIELD: ClassVar[str] = FIELD
    MOST: ClassVar[int] = MAX_CONTROLS
    FORM_FILE: ClassVar[str] = "control_image"
    OFFER: ClassVar[str] = "controls"
    SHARE: ClassVar[float] = 0.5

    model: Annotated[
        str, Field(max_length=MAX_NAME), "of the model's controls: a ControlNet, a ControlNet-Union or a T2I-Adapter"
    ]
    preprocessor: Annotated[
        str,
        InBody(Literal["canny", "depth"]),
        "canny: image is a picture, of which the edges are taken; depth: its depth map, by the model's depth model if "
        "it has one; default: it is read as given",
    ] = ""
    mode: Annotated[
        int | None, Field(ge=0, le=MAX_MODE), "the kind of the image, for a ControlNet-Union: 0 is a pose, …"
    ] = None
    fit: Annotated[
        str,
        InBody(Fit),
        "how it comes to the picture's size: crop (its middle), contain (whole, its outermost pixels repeated around "
        "it), stretch; exact: it must have that size; default: crop, and in an edit as its source",
    ] = ""

    low_threshold: Annotated[
        int, Field(ge=0, le=MAX_THRESHOLD), "of canny: the gradient of weak edges, which count beside strong ones; 100"
    ] = LOW
    high_threshold: Annotated[
        int, Field(ge=0, le=MAX_THRESHOLD), "of canny: the gradient of strong edges; 200 by default"
    ] = HIGH

    def check(self) -> None:
        PictureInput.check(self)
        for name, default in (("low_threshold", LOW), ("high_threshold", HIGH)):
            if self.preprocessor != CANNY and getattr(self, name) != default:
                raise Invalid(f"{FIELD}.{name}", "is of the preprocessor canny alone")
        if self.preprocessor and self.preprocessor not in PREPROCESSORS:
            raise Invalid(f"{FIELD}.preprocessor", f"must be one of {', '.join(PREPROCESSORS)}")
        if self.fit and self.fit not in get_args(Fit):
            raise Invalid(f"{FIELD}.fit", f"must be one of {', '.join(get_args(Fit))}")


def check_preprocessors(controls: Sequence[Control], offered: Collection[str] | None) -> None:
    """Raise `Invalid` for preprocessors that are not offered; None: not checked."""
    for control in controls:
        if offered is not None and control.preprocessor and control.preprocessor not in offered:
            raise not_offered(control.preprocessor)


def not_offered(preprocessor: str) -> Invalid:
    """The error for a preprocessor that the model's worker does not have."""
    reason = " (its worker has no DIPTYCH_DEPTH_MODEL)" if preprocessor == DEPTH else ""
    return Invalid(f"{FIELD}.preprocessor", f"{preprocessor} is not offered by this model{reason}")
