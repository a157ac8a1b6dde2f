"""Provides the tiny data sets of the training's tests, and a run with things large enough to be told apart."""

from __future__ import annotations

import dataclasses

import pytest

from tests.training import world
from tests.training.conftest import data as data
from tests.training.world import tiny, write_data
from training.run import TrainingRun


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run at 128 pixels, of many things: the checker's sprites need some."""
    folder = tmp_path_factory.mktemp("large")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "THINGS", world.MANY_THINGS)
        data = write_data(folder / "data")
    return dataclasses.replace(tiny(data, folder), size=128)
