"""Provides the CPU kernels."""

from __future__ import annotations

import ctypes

import pytest

from tests.core.quant import stage


@pytest.fixture(scope="session")
def kernels() -> ctypes.CDLL:
    """Compiled once for all runs of the tests; what needs them is skipped where this machine has none."""
    return stage.kernels()
