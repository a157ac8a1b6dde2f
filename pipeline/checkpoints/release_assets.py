"""Lists the models that a wheel leaves out: archives beside the release, each with its size and SHA-256."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from core.config import EMBEDDED_MODEL

INDEX = EMBEDDED_MODEL.parent / "assets.json"  # written by deployment/assets.py; a checkout has none


class Asset(NamedTuple):
    """An archive of a model's folder. `url` is "" if the build that wrote the index had no address."""

    name: str
    url: str
    size_bytes: int
    sha256: str

    @property
    def remedy(self) -> str:
        """The command that installs it, and what that does."""
        if self.url:
            return f"`diptych models add {self.name}` downloads it"
        return f"`diptych models add {self.name}.zip` unpacks it, given the file, or its address, of the release"


def listed() -> dict[str, Asset]:
    """Return the archives of this release by the names of their models."""
    if not INDEX.is_file():
        return {}
    index = json.loads(INDEX.read_text("utf-8"))
    address = index["address"]
    return {
        name: Asset(name, f"{address}/{name}.zip" if address else "", entry["bytes"], entry["sha256"])
        for name, entry in index["models"].items()
    }


def named(source: str) -> Asset | None:
    """Return the archive that is meant by a model's name, or by the file or address of a `.zip` of that name."""
    file = Path(source.partition("?")[0])
    name = file.stem if file.suffix == ".zip" else source
    return listed().get(name) if not os.path.isdir(source) else None  # noqa: PTH112 - any name has an answer
