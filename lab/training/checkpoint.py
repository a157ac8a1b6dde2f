"""Saves and restores a stage's whole state atomically, so that a killed run resumes as if uninterrupted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` beside `path`, sync it, and rename: the file at `path` is always complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    with part.open("wb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)


def load(path: Path) -> dict[str, Any] | None:
    """The state saved at `path`, on the CPU, or None where there is none yet."""
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def need(path: Path, stage: str) -> dict[str, Any]:
    """The state at `path`. Raises `FileNotFoundError` before `stage` has run."""
    state = load(path)
    if state is None:
        raise FileNotFoundError(f"{path}: run the stage {stage} first")
    return state
