"""What LoRAs cost, at small scale: what is told, and what cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import loras
from benchmarks.harness import models, record
from benchmarks.loras import LAYERS, LoraStep
from core.config import Settings
from core.ops.cuda import CudaLowering
from pipeline.checkpoints import tiny
from tests.core.quant.stage import CACHE, kernels
from tests.core.tape import Tape

SETTINGS = Settings(model=tiny.TINY, precision="fp32", device="cpu", threads=1, cache_dir=CACHE.parent)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("sdxl", [False, True])
def test_a_step_with_and_without_is_timed_in_turns(
    layers: str, sdxl: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels()
    wanted = LoraStep(rows=3, loras=2, rank=2, layers=layers, rounds=2)
    result = loras.run(SETTINGS, wanted, sdxl=sdxl, widths=models.SMALL, side=8, results=tmp_path)
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == json.loads((tmp_path / "loras.json").read_text())
    ((kind, measured),) = result["layers"].items()
    ((way, told),) = measured["ways"].items()
    assert len(measured["plain_all_ms"]) == len(told["all_ms"]) == 2 and min(measured["plain_all_ms"]) > 0
    assert kind == layers and way in out and told["equal"] and told["changed"]
    assert told["ratio"] == measured["plain_ms"] / told["ms"] and measured["adapter_bytes"] > 0
    assert (result["model"], result["precision"]) == ((models.SDXL, "int8") if sdxl else (tiny.TINY, "fp32"))


def test_more_layers_are_more_bytes(tmp_path: Path) -> None:
    kernels()
    found = loras.run(SETTINGS, LoraStep(2, 1, 2, "all,attention,linear", 1), side=4, results=tmp_path)["layers"]
    sizes = [measured["adapter_bytes"] for measured in found.values()]
    assert sizes == sorted({*sizes}) and [*found] == [*LAYERS] == ["attention", "linear", "all"]


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        (SETTINGS, LoraStep(rows=2, loras=3), "--loras must be between 1 and --rows"),
        (SETTINGS, LoraStep(rank=0), "--rank and --rounds at least 1"),
        (SETTINGS, LoraStep(layers="linear,conv"), "--layers: conv is none of attention, linear, all"),
        pytest.param(
            SETTINGS.model_copy(update={"device": "cuda"}),
            LoraStep(),
            "DIPTYCH_DEVICE: there is no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (SETTINGS.model_copy(update={"model": "random:tiny-z"}), LoraStep(), "has no UNet"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: Settings, options: LoraStep, said: str, tmp_path: Path) -> None:
    with pytest.raises(record.BenchError, match=said):
        loras.run(settings, options, results=tmp_path)


def test_a_gpus_steps_are_replayed_as_graphs() -> None:
    """On the kernels' references, with a recorder that needs no GPU."""
    unet, tape = models.random_unet(models.SMALL, torch.device("cpu")), Tape()
    wanted = LoraStep(rows=3, loras=2, rank=2, layers="linear", rounds=1)
    result = loras.measure(CudaLowering(torch.float32, 3, unet), unet, wanted, 4, tape)
    assert [*result["ways"]] == [*loras.PLACES] and all(told["changed"] for told in result["ways"].values())
    assert (tape.recordings, tape.replays) == (3, 12)
