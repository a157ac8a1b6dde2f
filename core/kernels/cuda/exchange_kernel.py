"""Sums of ranks over symmetric memory."""

from __future__ import annotations


class Exchange:
    pass
