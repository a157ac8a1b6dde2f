"""Records which workers have which files, such as LoRAs, in memory."""

from __future__ import annotations

from collections.abc import Collection

from core.jobs.connection import RedisClient, RedisStore


class FileHolders(RedisStore):
    """The files in the memory of workers, each as last recorded."""

    def __init__(self, redis: RedisClient | str) -> None:
        super().__init__(redis)
        self._hold = self._client.script("workers/hold")
        self._holders = self._client.script("workers/holders")

    def hold(self, worker_id: str, files: Collection[str], ttl_s: float, gone: Collection[str] = ()) -> None:
        """Record that a worker has these files in memory, for `ttl_s` seconds, and those that are `gone` no more."""
        if files or gone:
            self._hold(worker_id, round(ttl_s * 1000), len(files), *sorted(files), *sorted(gone))

    def holders(self, files: Collection[str]) -> list[str]:
        """The workers that have all of these files in memory, as last recorded."""
        return list(self._holders(*sorted(files))) if files else []
