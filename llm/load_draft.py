"""Loads what drafts for a model, by the architecture that its folder names."""

from __future__ import annotations

import json
from typing import Literal

from llm import precision, tiny
from llm.block_drafter import BlockDraft
from llm.drafts import DrafterFactory
from llm.eagle import ARCHITECTURES
from llm.eagle_drafter import EagleDraft
from llm.load import TextModel, TextModelError, find


def load(name: str, model: TextModel, *, lacks: str | None) -> TextModel | Literal["lookup"] | DrafterFactory:
    """Load the draft `name` for a model on its device: a smaller model, a drafter, or "lookup", which needs nothing.

    `lacks` as for `precision.choose`. Raises `TextModelError` for one that does not load, or does not fit.
    """
    if name == "lookup":
        return "lookup"
    if name not in tiny.SHAPES:
        folder = find(name)
        try:
            architectures = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
        except (OSError, ValueError, AttributeError) as error:
            raise TextModelError(f"{name}: config.json: {error}") from error
        if any(str(architecture).startswith("DFlash") for architecture in architectures or ()):
            return BlockDraft.read(folder, model)
        if any(architecture in ARCHITECTURES for architecture in architectures or ()):
            return EagleDraft.read(folder, model)
    return precision.load(name, "auto", device=str(model.device), lacks=lacks)[0]
