"""Divides Redis's memory among owners: what the records of one may take, and from when on nobody creates more."""

from __future__ import annotations

from dataclasses import dataclass

_SCARCE, _FULL = 0.75, 0.9  # shares of the memory in use


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """Redis's memory in bytes: in use, and what it may use at most; 0: not known."""

    used: int = 0
    most: int = 0

    @property
    def nearly_full(self) -> bool:
        """Whether what is left is for jobs that run and end, and for the operator's commands."""
        return self.most > 0 and self.used >= _FULL * self.most

    def share(self, percent: int, owners: int) -> int | None:
        """The bytes that the records of one of so many owners may take; None: no limit.

        While memory is scarce at most an equal share of half of it, so that whoever has little gets more.
        """
        if not self.most or not percent:
            return None
        share = self.most * percent // 100
        return min(share, self.most // (2 * max(1, owners))) if self.used >= _SCARCE * self.most else share
