"""What a control network costs, at small scale: what is told, and what cannot be measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks import control
from benchmarks.control import ControlStep
from benchmarks.harness import models, record
from core.config import Settings
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import load
from tests.core.quant.stage import CACHE, kernels
from tests.pipeline import controls

SETTINGS = Settings(model=tiny.TINY, precision="fp32", device="cpu", threads=1, cache_dir=CACHE.parent)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ControlNet and a T2I-Adapter of the tiny model."""
    found, model = tmp_path_factory.mktemp("controls"), load(tiny.TINY)
    controls.save(controls.controlnet(model), found, "edges")
    controls.save(controls.adapter(model), found, "sketch")
    return found


@pytest.mark.parametrize("sdxl", [False, True])
def test_steps_and_the_network_are_timed_in_turns(
    sdxl: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels()
    settings = SETTINGS.model_copy(update={"control_dir": str(folder), "precision": "auto" if sdxl else "fp32"})
    result = control.run(
        settings, ControlStep(rows=4, rounds=2), sdxl=sdxl, widths=models.SMALL, side=4, results=tmp_path
    )
    out = capsys.readouterr().out
    name = "control-sdxl" if sdxl else "control"
    assert json.loads(out.splitlines()[-1]) == json.loads((tmp_path / f"{name}.json").read_text())
    for kind in ("plain", "control", "mixed"):
        assert len(result[f"{kind}_all_ms"]) == 2 and min(result[f"{kind}_all_ms"]) > 0
        assert result[f"{kind}_ms"] == statistics.median(result[f"{kind}_all_ms"])
    assert result["ratio"] == (result["plain_ms"] + result["control_ms"]) / result["mixed_ms"]
    low, high = result["spread"]
    assert 0 < low <= high and result["changed"] and result["side"] == 32
    assert result["control_precision"] == ("int8" if sdxl else "floats")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (ControlStep(rows=3), record.BenchError, "--rows must be even"),
        (ControlStep(rounds=0), record.BenchError, "--rounds between 1 and 500"),
        (ControlStep(control="sketch"), record.BenchError, "--control: sketch is no ControlNet, but a T2IAdapter"),
        (ControlStep(control="depth"), ModelError, "depth"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: ControlStep, error: type[Exception], said: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        control.run(SETTINGS.model_copy(update={"control_dir": str(folder)}), options, results=tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(record.BenchError, match="--device: there is no GPU"):
        control.run(SETTINGS.model_copy(update={"device": "cuda"}), ControlStep(), results=tmp_path)
