"""The micro-batches of a pipeline: running requests in groups that are computed by turns, so that no stage waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class MicroBatches:
    """Which group each running request belongs to: the one that had the fewest when it came."""

    def __init__(self, groups: Sequence[str]) -> None:
        self._of: dict[str, str] = {}
        self._counts = Counter(dict.fromkeys(groups, 0))

    @staticmethod
    def count(stages: int) -> int:
        """The number of groups: one for each stage, and one whose tokens the host handles; 1 without a pipeline."""
        return stages + 1 if stages > 1 else 1

    def add(self, request_id: str) -> None:
        """A request runs from now on."""
        group = min(self._counts, key=self._counts.__getitem__)
        self._of[request_id] = group
        self._counts[group] += 1

    def of(self, request_id: str) -> str:
        """The group of a running request."""
        return self._of[request_id]

    def release(self, request_id: str) -> None:
        """A request waits, or has ended."""
        self._counts[self._of.pop(request_id)] -= 1
