"""The ladder at small scale: every rate is told when it is known; what cannot be measured is left out by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ladder, record
from contract.image import ImageParameters
from contract.plan import DeepCache
from core import graphs
from core.batching.engine import Engine
from core.batching.request import Request
from core.config import Settings
from pipeline import plans, tiny
from pipeline.tiny_zimage import TINY_Z
from tests.core.quant.stage import CACHE


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(ladder, "_ROUND", 2)
    return Settings(model=tiny.TINY, cache_dir=tmp_path / "cache")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' samplers
def test_a_rung_that_compiles_too_long_comes_last_and_is_left_out(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rungs = ("diffusers", "+compile", "step-batching")
    result = ladder.run(settings, steps=1, pictures=4, results=tmp_path, rungs=rungs, compile_limit_s=0.001)
    assert [rung["name"] for rung in result["rungs"]] == ["diffusers", "step-batching"]
    assert result["left_out"] == {"+compile": "torch.compile took more than 0.001 s"}
    assert json.loads((tmp_path / "ladder.json").read_text())["left_out"] == result["left_out"]
    told = [line.split(" pictures/s")[0] for line in capsys.readouterr().err.splitlines()]
    turns = [line.rpartition(" ")[0] for line in told if line.startswith("turn")]
    assert turns == [
        "turn 1 of 2: diffusers", "turn 1 of 2: step-batching", "turn 2 of 2: diffusers", "turn 2 of 2: step-batching",
    ]  # fmt: skip
    assert told.index("preparing +compile (torch.compile, at most 0.001 s)") > told.index("warming up step-batching")


def test_why_a_rung_is_left_out_is_kept(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "compiler", lambda: None)
    rungs = ("step-batching", "+compile", "+int8")
    result = ladder.run(settings, steps=1, pictures=2, results=tmp_path, rungs=rungs)
    # A model without an INT8 variant is given one, in the cache.
    assert [rung["name"] for rung in result["rungs"]] == ["step-batching", "+int8"]
    assert result["left_out"] == {"+compile": "there is no C++ compiler"}


def test_no_rung_at_all_is_an_error(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(record.BenchError, match=r"\+compile.*more than"):
        ladder.run(settings, steps=1, pictures=2, results=tmp_path, rungs=("+compile",), compile_limit_s=0.001)
    with pytest.raises(record.BenchError, match="--rungs: there is no stairs"):
        ladder.run(settings, steps=1, pictures=2, results=tmp_path, rungs=("stairs",))


def test_a_z_image_is_drawn_with_its_own_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By diffusers' own pipeline of the family, and by the engine: at the native size, without guidance."""
    monkeypatch.setattr(ladder, "_ROUND", 4)
    rungs = ("diffusers", "diffusers-static-batch", "step-batching", "+kernels")
    settings = Settings(model=TINY_Z, cache_dir=CACHE.parent)
    result = ladder.run(settings, steps=2, pictures=4, results=tmp_path, rungs=(*rungs, "+gate", "+plan"))
    assert [rung["name"] for rung in result["rungs"]] == list(rungs) and result["model"] == TINY_Z
    assert result["left_out"] == {
        "+gate": "the model draws without guidance",
        "+plan": "the model was not tuned; `diptych tune` finds plans",
    }
    assert all(rung["images_per_s"] > 0 for rung in result["rungs"])


def test_the_tuned_plan_is_a_rung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "_ROUND", 2)
    drawn: list[ImageParameters] = []
    submit = Engine.submit

    def noted(self: Engine, request: Request) -> Any:
        drawn.append(request.parameters)
        return submit(self, request)

    monkeypatch.setattr(Engine, "submit", noted)
    found = {"steps": 3, "deepcache": {"interval": 2}, "guidance_interval": [0.0, 0.5], "scheduler": "dpm++2m"}
    plans.write(tmp_path / "plans.json", "int8", {"plans": {"balanced": found}})
    settings = Settings(model=tiny.TINY, cache_dir=tmp_path / "cache", plans=str(tmp_path / "plans.json"))
    result = ladder.run(settings, steps=5, pictures=2, results=tmp_path, rungs=("+int8", "+plan"))
    assert [rung["name"] for rung in result["rungs"]] == ["+int8", "+plan"]
    assert {one.steps for one in drawn} == {5, 3}
    planned = next(one for one in drawn if one.steps == 3)
    assert (planned.scheduler, planned.guidance_interval) == ("dpm++2m", (0.0, 0.5))
    assert planned.deepcache == DeepCache(2)


def test_a_student_draws_in_its_own_steps(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = "the model has no student beside it, of its name and -turbo; --student names one"
    rungs = ("step-batching", "+tiny", "turbo", "turbo+tiny")
    result = ladder.run(settings, steps=1, pictures=2, results=tmp_path, rungs=rungs)
    assert result["left_out"] == {
        "+tiny": "the model was not tuned; `diptych tune` finds plans",
        "turbo": absent,
        "turbo+tiny": absent,
    }
    student = tiny.save(tmp_path / "quick-turbo", tiny.SDXLShape(heads=(1, 2)))
    result = ladder.run(
        settings, steps=1, pictures=2, results=tmp_path, rungs=("turbo", "turbo+tiny"), student=str(student)
    )
    assert [(rung["name"], rung["model"]) for rung in result["rungs"]] == [("turbo", "quick-turbo")]
    assert result["left_out"] == {"turbo+tiny": "the model has no tiny decoder"}
    assert "warming up turbo" in capsys.readouterr().err
