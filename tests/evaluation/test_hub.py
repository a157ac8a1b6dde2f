"""Folders of feature networks: plain and as the hub's cache lays them out, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from evaluation import hub, judges
from evaluation.dinov2 import DinoV2
from evaluation.inception import WeightsError
from tests.evaluation.conftest import read_json


def test_a_hubs_cache_is_a_folder_too(dino: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--someone--dinov2-tiny"
    shutil.copytree(dino, cache / "snapshots" / "0123")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123")
    assert hub.snapshot(cache) == cache / "snapshots" / "0123" and hub.snapshot(dino) == dino
    found = DinoV2(cache)
    assert found.name == "dinov2-tiny" and found.digest == DinoV2(dino).digest


def test_other_weights_are_refused(dino: Path, tmp_path: Path) -> None:
    """Also those of a deeper network, whose last layers would be drawn at random."""
    deeper = tmp_path / "deeper"
    shutil.copytree(dino, deeper)
    config = read_json(deeper / "config.json")
    (deeper / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    for folder, told in ((deeper, r"no encoder\.layer"), (tmp_path / "gone", "gone: is not a Dinov2Model")):
        with pytest.raises(WeightsError, match=told):
            judges.open_judge("fd-dinov2", folder)
