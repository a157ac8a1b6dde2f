"""The engine's plans beside published helpers: plans of the same kind draw the same pictures, with less work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from pipeline.checkpoints import tiny
from tests.core.quant.stage import CACHE
from tests.evaluation import published

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning"),  # of diffusers' FasterCache
]
CAPTIONS = ["a red hat", "a green hat", "an old hat"]
ONLY = ("cfg-cutoff", "MagCache", "diptych-full", "diptych-gate", "diptych-auto-gate", "diptych-resnet2")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("published")
    tiny.save(folder / "model", tiny.SDXLShape())
    (folder / "captions.json").write_text(json.dumps(CAPTIONS), "utf-8")
    words = ["--captions", folder / "captions.json", "--model", folder / "model", "--cache", CACHE, "--only", *ONLY]
    out = folder / "out.json"
    with pytest.MonkeyPatch.context() as patch, out.open("w") as stream:
        patch.setattr(sys, "argv", ["published", *map(str, words)])
        patch.setattr(sys, "stdout", stream)
        published.main()
    whole: dict[str, Any] = json.loads(out.read_text())
    return whole


def test_plans_of_the_same_kind_draw_the_same_pictures(found: dict[str, Any]) -> None:
    beside = found["contenders"]
    assert set(beside) == {"full", *ONLY} - {"MagCache"}
    assert beside["full"]["psnr_db"] == 100 and beside["full"]["clip_ratio"] == [1, 1, 1]
    assert beside["diptych-full"]["psnr_db"] > 55
    assert beside["diptych-gate"]["psnr_db"] == pytest.approx(beside["cfg-cutoff"]["psnr_db"], abs=0.2)
    assert beside["cfg-cutoff"]["psnr_db"] < beside["diptych-full"]["psnr_db"]


def test_work_is_that_of_the_steps_and_what_does_nothing_is_left_out(found: dict[str, Any]) -> None:
    work = {name: one["operations"] for name, one in found["contenders"].items()}
    assert work["full"] == 1 and 0.7 < work["cfg-cutoff"] < 0.8, "half of the steps at half the rows, and the VAE"
    assert work["diptych-auto-gate"] < work["diptych-gate"] < work["diptych-full"] <= 1
    assert work["diptych-resnet2"] < work["diptych-full"]
    assert "Left out: `MagCache` (wants one list of transformer" in tables.TABLES["published"].lines(found)[-1]


def test_the_model_s_own_plan_is_among_them(tmp_path: Path) -> None:
    assert published.TUNED not in published._plans(tmp_path)
    shipped = Path(published.__file__).resolve().parents[2] / "models" / "emoji-xl"
    assert published._plans(shipped)[published.TUNED]["steps"] < published.STEPS
