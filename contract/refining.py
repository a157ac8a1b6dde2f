"""A second model for the last steps of an image: the field of a request, and its check."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import ConfigDict, Field

from contract.errors import Invalid
from contract.offered import check_offered
from contract.strict import MAX_NAME, Nested

FIELD = "refiner"
FROM = 0.8


class Refining(Nested):
    """The model that takes the last steps, and where it begins."""

    model_config = ConfigDict(title="Refiner")

    model: str = Field(max_length=MAX_NAME, description="of the model's refiners")
    start: float = Field(
        default=FROM, gt=0, lt=1, allow_inf_nan=False, alias="from",
        description="the share of the noise schedule that the model itself runs, as diffusers' denoising_end; 0.8 by "
        "default",
    )  # fmt: skip

    def check(self, offered: Collection[str] | None, *, soft: bool) -> None:
        """Raise `Invalid` for a model that is not offered; None: only the syntax is checked.

        Also for an edit with a `soft` mask.
        """
        if soft:
            raise Invalid(FIELD, "is not supported together with soft_mask")
        if self.model not in (offered or ()):  # else whatever its folder is called
            check_offered(f"{FIELD}.model", self.model, offered)
