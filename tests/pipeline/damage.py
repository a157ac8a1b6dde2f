"""Ways to damage a model's folder, for tests of what is said about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path], Any]


def edit(file: str, **values: Any) -> Damage:
    """Other values in a JSON file."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**config, **values}))

    return damage


def remove(*names: str) -> Damage:
    """Without these files and folders."""

    def damage(folder: Path) -> None:
        for name in names:
            path = folder / name
            path.unlink() if path.is_file() else shutil.rmtree(path)

    return damage


def write(file: str, data: bytes) -> Damage:
    """A file of this content."""
    return lambda folder: (folder / file).write_bytes(data)


def replaced(part: str, make: Callable[[], Any]) -> Damage:
    """The part of another pipeline, which `make` builds, in the place of this one's."""

    def damage(folder: Path) -> None:
        shutil.rmtree(folder / part)
        getattr(make(), part).save_pretrained(folder / part)

    return damage


def rebuilt(part: str, class_name: str, **config: Any) -> Damage:
    """A part of diffusers' class with another config, and weights that fit it."""

    def damage(folder: Path) -> None:
        import diffusers

        own = json.loads((folder / part / "config.json").read_text())
        shutil.rmtree(folder / part)
        getattr(diffusers, class_name).from_config({**own, **config}).save_pretrained(folder / part)

    return damage
