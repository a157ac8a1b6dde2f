"""Loads what drafts for a model, by the architecture that its folder names."""

from __future__ import annotations

from typing import Literal

from llm.checkpoints import precision
from llm.checkpoints.load import TextModel, find
from llm.drafts.block_drafter import BlockDraft
from llm.drafts.draft_checkpoint import DraftCheckpoint
from llm.drafts.drafter import DrafterFactory
from llm.drafts.eagle import ARCHITECTURES
from llm.drafts.eagle_drafter import EagleDraft
from llm.families import tiny


def load(name: str, model: TextModel, *, lacks: str | None) -> TextModel | Literal["lookup"] | DrafterFactory:
    """Load the draft `name` for a model on its device: a smaller model, a drafter, or "lookup", which needs nothing.

    `lacks` as for `precision.choose`. Raises `TextModelError` for one that does not load, or does not fit.
    """
    if name == "lookup":
        return "lookup"
    if name not in tiny.SHAPES:
        folder = find(name)
        architectures = DraftCheckpoint(folder).architectures
        if any(str(architecture).startswith("DFlash") for architecture in architectures):
            return BlockDraft.read(folder, model)
        if any(architecture in ARCHITECTURES for architecture in architectures):
            return EagleDraft.read(folder, model)
    return precision.load(name, "auto", device=str(model.device), lacks=lacks)[0]
