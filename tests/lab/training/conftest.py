"""Provides the data set and the models trained on it, once for all tests of this folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lab.training import all as stages
from lab.training import export, judge, tiny_vae, tokens
from lab.training.run import TrainingRun
from tests.lab.training.world import Trained, tiny, write_data
from tests.shared import shared_folder

# Iterations and rows of the stages, so few that their losses only just fall.
LENGTHS = {"vae": 120, "clip": 60, "unet": 140, "lm": 160, "draft": 160}
BATCHES = {"vae": 8}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of trained models are long: training takes minutes. `test_make.py` trains all of them for one iteration."""
    for item in items:
        if "trained" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `--data` would name."""
    return shared_folder(tmp_path_factory, "data", write_data)


@pytest.fixture
def run(data: Path, tmp_path: Path) -> TrainingRun:
    """A tiny run of its own."""
    return tiny(data, tmp_path)


@pytest.fixture(scope="session")
def words(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of a tiny run that has trained its vocabularies."""
    return shared_folder(tmp_path_factory, "words", lambda folder: tokens.train(tiny(data, folder))) / "work"


@pytest.fixture
def worded(run: TrainingRun, words: Path) -> TrainingRun:
    """A tiny run of its own with vocabularies."""
    run.work.mkdir(parents=True)
    (run.work / "tokens").symlink_to(words / "tokens")
    return run


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All stages, exported and judged, once for all test processes: read it, and write elsewhere."""
    folder = shared_folder(tmp_path_factory, "trained", lambda folder: _train(tiny(data, folder)))
    run = tiny(data, folder)
    return Trained(run, json.loads((run.folder("judge") / "figures.json").read_text(encoding="utf-8")))


def _train(run: TrainingRun) -> None:
    for name in stages.STAGES:
        stages.train(
            dataclasses.replace(run, iterations=LENGTHS.get(name, 1), batch=BATCHES.get(name, 16)), only=[name]
        )
    tiny_vae.train(dataclasses.replace(run, iterations=60, batch=8))
    export.export(run)
    judge.judge(run, 24)
    export.rewrite_cards(run)
