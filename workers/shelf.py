"""Where one job puts what it made: told to the store before it is written, so that nobody takes it away meanwhile.

Knows artifacts and the form that a job wants them in; knows nothing of how a job ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from core.artifacts import Artifacts
from workers.formats import Format


class Shelf:
    """`keep` is told a key and says whether it may be written now. `keys` are those of all that was put."""

    def __init__(
        self, artifacts: Artifacts, keep: Callable[[str], bool] = lambda key: True, parameters: Mapping[str, Any] = {}
    ) -> None:
        """`parameters` are the job's. Raises `Refused` where they ask for a form that is not known."""
        self._artifacts = artifacts
        self._keep = keep
        self.form = Format.of(parameters)
        self.keys: list[str] = []

    def put(self, data: bytes, media_type: str) -> str:
        """Keep `data` whole or not at all, and return its key. Raises `ArtifactError`, and what `keep` raises."""
        key = self._artifacts.put_kept(data, media_type, self._keep)
        self.keys.append(key)
        return key
