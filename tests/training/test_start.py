"""What is kept of a run in training is exported elsewhere as the run itself would be."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from tests.training.world import Trained
from training import checkpoint, start, unet

# LCMScheduler and Euler's convert tensors the old way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def test_kept_weights_are_the_averages_in_half_precision(trained: Trained, tmp_path: Path) -> None:
    kept = start.keep(trained.run, tmp_path)
    assert {"vae", "clip", "unet"} <= set(kept)
    shutil.copytree(trained.run.work / "tokens", tmp_path / "tokens")
    elsewhere = dataclasses.replace(trained.run, work=tmp_path)
    for name, module in unet.load(elsewhere).modules().items():
        wanted = unet.load(trained.run).modules()[name].state_dict()
        for key, tensor in module.state_dict().items():
            expected = wanted[key].half().to(tensor.dtype) if tensor.is_floating_point() else wanted[key]
            assert torch.equal(tensor, expected), key
    state = checkpoint.load(tmp_path / "unet" / "state.pt")
    assert state is not None and list(state) == ["averaged"], "no optimizer travels"


def test_nothing_is_kept_of_what_is_not_trained(trained: Trained, tmp_path: Path) -> None:
    assert start.keep(dataclasses.replace(trained.run, work=tmp_path / "work"), tmp_path / "kept") == []
