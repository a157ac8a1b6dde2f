"""Upscaling of a finished image: the field of a request, and its check."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import ConfigDict, Field

from contract.errors import Invalid
from contract.offered import check_offered
from contract.strict import MAX_NAME, Nested

FIELD = "upscale"
MAX_SCALE = 8  # times width and height
MAX_PIXELS = 2**25  # of what a network makes
LANCZOS = "lanczos"  # a filter in place of a network
_FILTER_SCALE = 2  # by default
MAX_SIDE = 16383  # pixels of the enlarged image; WebP has no more


class Upscale(Nested):
    """The network that enlarges the finished image, and how much; or `LANCZOS`.

    An image is enlarged by the network's own factor, and then reduced where `scale` is less.
    """

    model_config = ConfigDict(title="Upscale")

    model: str = Field(max_length=MAX_NAME, description="of the model's upscalers; or lanczos, a filter")
    scale: float | None = Field(
        default=None, ge=1, le=MAX_SCALE, allow_inf_nan=False,
        description="times width and height, at most the network's own factor, the default; of lanczos 2",
    )  # fmt: skip

    @property
    def is_filter(self) -> bool:
        """Whether no network enlarges the image."""
        return self.model == LANCZOS

    def filtered_size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of the image that the filter enlarges."""
        return self.size(width, height, _FILTER_SCALE)

    def size(self, width: int, height: int, factor: int) -> tuple[int, int]:
        """Width and height of the enlarged image, by a network of this factor."""
        scale = factor if self.scale is None else self.scale
        return max(1, round(width * scale)), max(1, round(height * scale))

    def check(
        self, offered: Collection[str] | None, reason: str | None = None, filters: Collection[str] | None = None
    ) -> None:
        """Raise `Invalid` for a network, or a filter, that is not offered; None: only the syntax is checked. `reason`:
        as in `check_offered`.
        """
        if self.is_filter and (filters is None or LANCZOS in filters):
            return
        check_offered(f"{FIELD}.model", self.model, offered, reason)

    def check_factor(self, width: int, height: int, factor: int) -> None:
        """Raise `Invalid` for a scale beyond the network's factor, and for an image that would become too large."""
        if self.scale is not None and self.scale > factor:
            raise Invalid(f"{FIELD}.scale", f"must be at most {factor}, the factor of {self.model}")
        if width * height * factor**2 > MAX_PIXELS:
            raise Invalid(FIELD, f"{factor} times {width}x{height} is more than {MAX_PIXELS} pixels")
        self._check_sides(*self.size(width, height, factor))

    def check_filtered(self, width: int, height: int) -> None:
        """Raise `Invalid` for an image that the filter would make too large."""
        enlarged = self.filtered_size(width, height)
        if enlarged[0] * enlarged[1] > MAX_PIXELS:
            raise Invalid(FIELD, f"it makes more than {MAX_PIXELS} pixels")
        self._check_sides(*enlarged)

    @staticmethod
    def _check_sides(width: int, height: int) -> None:
        if max(width, height) > MAX_SIDE:
            raise Invalid(FIELD, f"it makes a side of more than {MAX_SIDE} pixels")
