"""Saves and restores a stage's whole state atomically, so that a killed run resumes as if uninterrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` beside `path`, syncs it, and renames: the file at `path` is always complete."""
    part = path.with_suffix(path.suffix + ".part")
    with part.open("wb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)


def load(path: Path) -> dict[str, Any] | None:
    """The state saved at `path`, on the CPU, or None where there is none yet."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Appends one JSON line to a curve."""
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


def trim_lines(path: Path, iteration: int) -> None:
    """Drops a curve's lines past `iteration`: what a killed run wrote after its last checkpoint is done again."""
    if not path.exists():
        return
    kept = [
        line for line in path.read_text(encoding="utf-8").splitlines() if json.loads(line)["iteration"] <= iteration
    ]
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
