"""Writes a job's artifacts. Announces each key to the store before the write, so that no sweep deletes it."""

from __future__ import annotations

from collections.abc import Callable

from core.artifacts import Artifacts


class ArtifactWriter:
    """`keep` receives a key and returns whether it may be written now. `keys` are those written."""

    def __init__(self, artifacts: Artifacts, keep: Callable[[str], bool] = lambda key: True) -> None:
        self._artifacts = artifacts
        self._keep = keep
        self.keys: list[str] = []

    def put(self, data: bytes, media_type: str) -> str:
        """Store `data` fully or not at all, and return its key. Raises `ArtifactError`, and what `keep` raises."""
        key = self._artifacts.put_kept(data, media_type, self._keep)
        self.keys.append(key)
        return key
