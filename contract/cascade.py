"""A cascade: a draft model draws each picture, and the request's model redraws those that score below a gate.

Drafts are kept or redrawn by the score of a CLIP (`workers/stages/gate.py`): 100 times the cosine of prompt and
picture.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ConfigDict, Field

from contract.errors import Invalid
from contract.offered import check_offered
from contract.strict import MAX_NAME, Nested

FIELD = "cascade"
MAX_SCORE = 100.0  # 100 times a cosine
_EXCLUDED = ("lora", "control", "image_prompts", "refiner", "upscale")  # which a draft model does not read alike

Gates = Mapping[str, float | None]
"""Tuned gates by the draft model; None: the pair has none."""


class Cascade(Nested):
    """The model that draws first, and the score from which its pictures are kept."""

    model_config = ConfigDict(title="Cascade")

    draft: str = Field(max_length=MAX_NAME, description="the model that draws first, of the model's cascades")
    gate: float | None = Field(
        default=None, ge=-MAX_SCORE, le=MAX_SCORE, allow_inf_nan=False,
        description="the least score of a draft that is kept, 100 times the cosine of prompt and picture; by default "
        "the pair's tuned one",
    )  # fmt: skip

    def complete(self, request: Mapping[str, object], offered: Gates | None, *, edited: bool) -> Cascade:
        """The cascade of these fields of a request, with its gate. `offered` None: only the syntax is checked.

        Raises `Invalid` for a draft model that is not offered, for a pair without a tuned gate where none is given, and
        for requests that a draft model cannot draw alike.
        """
        if edited:
            raise Invalid(FIELD, "is not supported for edits")
        for name in _EXCLUDED:
            if request.get(name):
                raise Invalid(FIELD, f"cannot be given together with {name}")
        if self.draft == request.get("model"):
            raise Invalid(f"{FIELD}.draft", "must be another model than the request's own")
        check_offered(f"{FIELD}.draft", self.draft, offered)
        gate = self.gate if self.gate is not None else (offered or {}).get(self.draft)
        if gate is None:
            raise Invalid(f"{FIELD}.gate", "must be given: the two models have no tuned gate")
        return self.model_copy(update={"gate": float(gate)})
