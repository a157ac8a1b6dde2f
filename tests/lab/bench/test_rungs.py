"""What each rung draws, and why one is left out; here in this process, whose answers are collected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract.image import ImageParameters
from contract.plan import DeepCache
from core import graphs
from core.batching.engine import Engine
from core.batching.request import Request
from core.config import Settings
from lab.bench import rungs
from lab.bench.harness.turns import LeftOut
from lab.bench.harness.variants import Variant
from lab.bench.rungs import STOCK, first_request
from pipeline import plans
from pipeline.checkpoints import tiny
from pipeline.checkpoints.tiny_zimage import TINY_Z
from tests.core.quant.stage import CACHE


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rungs, "MEASURE_S", 0.1)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(model=tiny.TINY, cache_dir=CACHE.parent)


def served(name: str, settings: Settings, *requests: Any, steps: int = 1, student: str | None = None) -> list[Any]:
    """The answers of a rung to its description and to these requests."""
    answers: list[Any] = []
    first = first_request(name, settings, steps, student, None)
    rungs.serve(iter([first, *requests]), answers.append)
    return answers


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[ImageParameters]:
    """The parameters of every image that an engine is asked for."""
    found: list[ImageParameters] = []
    submit = Engine.submit

    def noted(self: Engine, request: Request) -> Any:
        found.append(request.parameters)
        return submit(self, request)

    monkeypatch.setattr(Engine, "submit", noted)
    return found


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' samplers
def test_the_stock_pipeline_draws_in_every_variant(settings: Settings) -> None:
    variants = (Variant(2, channels_last=True), Variant(3, bf16=True), Variant())
    images = {"first": 0, "count": 3}
    requests = [request for variant in variants for request in ({"variant": variant.__dict__}, images)]
    told, *answers = served(STOCK, settings, images, *requests)
    assert told["model"] == tiny.TINY and told["capability"]
    assert [answer["seconds"] > 0 for answer in answers[::2]] == [True] * 4 and answers[1::2] == [{}] * 3
    assert "lab/bench/rungs.py" in answers[0]["imported"]


def test_without_a_compiler_torch_compiles_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "compiler", lambda: None)
    with pytest.raises(LeftOut, match=r"there is no C\+\+ compiler"):
        served("+compile", settings)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_z_image_is_drawn_with_its_own_defaults() -> None:
    """By diffusers' own pipeline of the family, and by the engine: at the native size, without guidance."""
    settings = Settings(model=TINY_Z, cache_dir=CACHE.parent)
    for name in (STOCK, "+kernels"):
        told, answer = served(name, settings, {"first": 0, "count": 2}, steps=2)
        assert told["model"] == TINY_Z and answer["seconds"] > 0
    for name, why in (("+gate", "draws without guidance"), ("+plan", "was not tuned")):
        with pytest.raises(LeftOut, match=why):
            served(name, settings, steps=2)


@pytest.mark.long
def test_the_tuned_plan_is_a_rung(settings: Settings, tmp_path: Path, drawn: list[ImageParameters]) -> None:
    found = {"steps": 3, "deepcache": {"interval": 2}, "guidance_interval": [0.0, 0.5], "scheduler": "dpm++2m"}
    plans.write(tmp_path / "plans.json", "int8", {"plans": {"balanced": found}})
    tuned = Settings(model=tiny.TINY, cache_dir=CACHE.parent, plans=str(tmp_path / "plans.json"))
    told, _ = served("+plan", tuned, {"first": 0, "count": 2}, steps=5)
    assert told["kernels"] != "torch" and {one.steps for one in drawn} == {3}
    assert (drawn[0].scheduler, drawn[0].guidance_interval) == ("dpm++2m", (0.0, 0.5))
    assert drawn[0].deepcache == DeepCache(2)
    assert len({one.prompt for one in drawn}) == 2, "no rung lives on remembered embeddings"


@pytest.mark.long
def test_a_student_draws_in_its_own_steps(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(LeftOut, match="no student beside it"):
        served("turbo", settings)
    student = str(tiny.save(tmp_path / "quick-turbo", tiny.SDXLShape(heads=(1, 2))))
    told, answer = served("turbo", settings, {"first": 0, "count": 2}, student=student)
    assert told["model"] == "quick-turbo" and answer["seconds"] > 0
    with pytest.raises(LeftOut, match="no tiny decoder"):
        served("turbo+tiny", settings, student=student)
