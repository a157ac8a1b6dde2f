"""Where one job puts what it made: told to the store before it is written, so that nobody takes it away meanwhile.

Knows artifacts and the form that a job wants them in; knows nothing of how a job ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from core.artifacts import ArtifactError, Artifacts, key_of
from workers.formats import Format

_PATIENCE_S = 120.0  # longer than a deletion is given
_AGAIN_S = 0.2


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
        key, until = key_of(data, media_type), time.monotonic() + _PATIENCE_S
        while not self._keep(key):  # the same was made before, and is being deleted at this moment
            if time.monotonic() > until:
                raise ArtifactError("it was made before, and its deletion does not end")
            time.sleep(_AGAIN_S)
        self._artifacts.put(data, media_type)
        self.keys.append(key)
        return key
