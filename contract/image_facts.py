"""What a result tells of one of its images beside its size and file: what the stages around the engine made of it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class CheckedContent(BaseModel):
    flagged: bool
    labels: dict[str, float] = Field(description="the scores of those that flag it, or else of the nearest one")
    action: Literal["tag", "blur", "refuse"] | None = Field(
        description="what was done to it; null if it is not flagged"
    )


class ImageFacts(BaseModel):
    """The facts of an image, by name; those of stages that it did not go through are missing."""

    revised_prompt: str | None = Field(default=None, description="with expand_prompt: what it was drawn from")
    drawn_by: str | None = Field(default=None, description="with cascade: the model that drew it")
    draft_score: float | None = Field(default=None, description="with cascade: the score of its draft")
    content: CheckedContent | None = Field(default=None, description="what the service's checker says of it")
