"""Provides the CPU kernels, and lets stock diffusers draw."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.core.quant import stage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignores how stock diffusers hands torch tensors to numpy, which numpy 2 complains about."""
    mark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(mark)


@pytest.fixture(scope="session")
def kernels() -> ctypes.CDLL:
    """Compiled once for all runs of the tests; what needs them is skipped where this machine has none."""
    return stage.kernels()
