"""The options of an edit on the command line: a source image, a mask, and how they are used, as in /v1/images/edits."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from cli.arguments import Options, UsageError
from cli.request import add_field, decoded, flag_of
from contract.card import Size
from contract.image_request import MAX_MARGIN, EditRequest, Margins
from contract.picture_input import Edit, Fit

if TYPE_CHECKING:
    from PIL.Image import Image

_FIELDS = ("strength", "soft_mask", "fit")
"""The fields with a generated option."""
_SIDES = tuple(Margins.model_fields)


@dataclass(frozen=True, slots=True)
class Source:
    """A decoded source image in RGB, what of it is drawn anew in L, and how both come to a picture's size."""

    image: Image
    mask: Image | None
    margins: Margins | None
    fit: Fit
    soft: bool

    @property
    def size(self) -> Size:
        """Width and height with the margins."""
        return self.image.size if self.margins is None else self.margins.around(self.image.size)

    @property
    def masked(self) -> bool:
        return self.mask is not None or self.margins is not None

    def fill(self, edit: Edit, size: Size) -> Edit:
        """Return the edit with its pixels at this size. Raises `UsageError` for an `exact` source of another one."""
        from PIL import Image

        from core import pictures

        if self.fit == "exact" and self.size != size:
            words = "--image: is {}x{}, and the picture {}x{}; give one of that size, or another --fit"
            raise UsageError(words.format(*self.size, *size))
        sides = None if self.margins is None else tuple(getattr(self.margins, side) for side in _SIDES)
        image = self.image if sides is None else pictures.extended(self.image, sides)
        mask = None
        if self.masked:
            mask = self.mask or Image.new("L", self.image.size, 0)
            mask = pictures.fitted_mask(mask, sides, size, self.fit, soft=self.soft)
        return replace(
            edit, image=pictures.fitted(image, size, self.fit).tobytes(), mask=None if mask is None else mask.tobytes()
        )


def add_edit(parser: Options) -> None:
    """Add the options of an edit."""
    parser.add_argument("--image", type=Path, metavar="IMAGE", help="the picture to begin with, in place of noise")
    parser.add_argument(
        "--mask", type=Path, metavar="IMAGE",
        help="of the size of --image: what is transparent in it is drawn anew, all else is kept",
    )  # fmt: skip
    declared = EditRequest.model_fields
    for name in _FIELDS:
        kind, _ = get_args(declared[name].annotation)  # or None
        add_field(parser, name, kind, declared[name].description or "")
    text = f"{declared['outpaint'].description}: {','.join(_SIDES)}"
    parser.add_argument("--outpaint", metavar="64,0,64,0", help=text)


def read_edit(options: argparse.Namespace) -> tuple[dict[str, Any], Source | None]:
    """The fields of an edit that are given, and its source. Raises `UsageError`, naming the option or the file."""
    fields = {name: value for name in _FIELDS if (value := getattr(options, name)) not in (None, False)}
    if options.image is None:
        for name in (*fields, *(name for name in ("mask", "outpaint") if getattr(options, name) is not None)):
            raise UsageError(f"{flag_of(name)}: needs an --image")
        return {}, None
    fit, soft = fields.pop("fit", "stretch"), "soft_mask" in fields
    image = decoded("--image", options.image)
    from core import pictures

    mask = pictures.hole(image, soft=soft) if image.has_transparency_data else None
    if mask is not None and not _repainted(mask, soft=soft):
        mask = None  # as in the API: a source without a hole has no mask
    if options.mask is not None:
        mask = pictures.hole(decoded("--mask", options.mask), soft=soft)
        if mask.size != image.size:
            raise UsageError("--mask: must have the width and height of --image")
        if not _repainted(mask, soft=soft):
            words = "has no transparent pixel: what is transparent in it is what is drawn anew"
            raise UsageError(f"--mask: {options.mask} {words}")
    return fields, Source(pictures.on_white(image), mask, _margins(options.outpaint), fit, soft)


def _repainted(mask: Image, *, soft: bool) -> bool:
    return any(mask.histogram()[1 if soft else 128 :])


def _margins(text: str | None) -> Margins | None:
    if text is None:
        return None
    try:
        margins = Margins(**dict(zip(_SIDES, map(int, text.split(",")), strict=True)))
    except ValueError:  # pydantic's too
        margins = Margins()
    if margins == Margins():
        words = f"must be pixels of {', '.join(_SIDES)}, at most {MAX_MARGIN} each, such as 64,0,64,0, not {text!r}"
        raise UsageError(f"--outpaint: {words}")
    return margins
