"""Provides the data set and the models trained on it, once for all tests of this folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.training import world
from tests.training.world import Trained, tiny, write_data
from training import all as stages
from training import export, judge, judge_pictures
from training.run import TrainingRun


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `--data` would name."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(data: Path, tmp_path: Path) -> TrainingRun:
    """A tiny run of its own."""
    return tiny(data, tmp_path)


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All stages, exported and judged."""
    run = tiny(data, tmp_path_factory.mktemp("trained"))
    lengths = {"vae": 120, "clip": 60, "unet": 140, "zimage_vae": 60, "zimage": 140, "lm": 160, "draft": 160}
    batches = {"vae": 8, "zimage_vae": 8}
    for name in stages.STAGES:
        batch = batches.get(name, run.batch)
        stages.train(dataclasses.replace(run, iterations=lengths.get(name, 1), batch=batch), only=[name])
    export.export(run)
    extent = judge_pictures.SampleSizes(captions=12, composed=8, expansions=24, steps=4, sheet=8)
    figures = judge.judge(run, extent)
    export.rewrite_cards(run)
    return Trained(run, figures)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run at 128 pixels, of many things: the checker's sprites need some."""
    folder = tmp_path_factory.mktemp("large")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "THINGS", world.MANY_THINGS)
        data = write_data(folder / "data")
    return dataclasses.replace(tiny(data, folder), size=128)
