"""Where one job puts what it made: told to the store before it is written, so that nobody takes it away meanwhile.

Knows artifacts; knows nothing of how a job ends.
"""

from __future__ import annotations

from collections.abc import Callable

from core.artifacts import Artifacts


class Shelf:
    """`keep` is told a key and says whether it may be written now. `keys` are those of all that was put."""

    def __init__(self, artifacts: Artifacts, keep: Callable[[str], bool] = lambda key: True) -> None:
        self._artifacts = artifacts
        self._keep = keep
        self.keys: list[str] = []

    def put(self, data: bytes, media_type: str) -> str:
        """Keep `data` whole or not at all, and return its key. Raises `ArtifactError`, and what `keep` raises."""
        key = self._artifacts.put_kept(data, media_type, self._keep)
        self.keys.append(key)
        return key
