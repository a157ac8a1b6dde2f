"""Provides the tiny data sets of the training's tests."""

from __future__ import annotations

import dataclasses

import pytest

from lab.training.run import TrainingRun
from tests.lab.training import world
from tests.lab.training.conftest import data as data
from tests.lab.training.world import FORMS, tiny, write_data

_SHADES = ((240, 140, 20), (90, 200, 110), (70, 130, 240), (150, 80, 40))
_NOUNS = (
    "ball", "crate", "hoop", "plank", "sign", "drum", "tent", "kite", "bell", "lamp",
    "cup", "boat", "fan", "gate", "jar", "key", "mug", "pan", "rug", "saw",
)  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run at 128 pixels, of many things, enough for pairs that are held out: the checker's sprites need some."""
    looks = [(form, shade) for shade in _SHADES for form in FORMS]
    folder = tmp_path_factory.mktemp("large")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "THINGS", dict(zip(_NOUNS, looks, strict=False)))
        data = write_data(folder / "data")
    return dataclasses.replace(tiny(data, folder), size=128)
