"""Settings to an engine: which precision runs where, what is refused, and what requests may hold."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from core.config import Settings
from core.quant.kernels.cpu import library as kernels
from core.quant.kernels.cpu.library import Unavailable
from core.quant.kernels.cuda import language
from core.schedule import AUTO, DeepCache
from pipeline import quantized, tiny
from pipeline.folder import ModelError
from pipeline.load import load
from workers.build import build, memory_bytes, precision
from workers.equipment import panels_of

SHAPE = tiny.Shape(channels=(16, 32), heads=(1, 2))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its INT8 variant."""
    folder = tiny.save(tmp_path_factory.mktemp("models") / "tiny", SHAPE)
    quantized.make(load(str(folder)), ["a hat", "a cat"], folder)
    return folder


@pytest.fixture
def has_kernels(cache: Path) -> None:
    try:
        kernels.library(cache / "kernels")
    except Unavailable as error:
        pytest.skip(str(error))


def settings(model: Path | str, cache: Path, **given: object) -> Settings:
    return Settings(model=str(model), cache_dir=cache, device="cpu", **given)  # type: ignore[arg-type]


@pytest.mark.usefixtures("has_kernels")
def test_auto_takes_int8_where_the_model_has_it_and_the_kernels_run(model: Path, cache: Path) -> None:
    assert precision(settings(model, cache), "cpu") == "int8"
    assert precision(settings(tiny.TINY, cache), "cpu") == "fp32", "no such variant"
    with build(settings(model, cache)) as works:
        assert works.images.model.precision == "int8" and works.images.execution.programs


def test_without_a_compiler_auto_is_fp32_and_the_log_says_why(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    kernels.library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert precision(settings(model, tmp_path), "cpu") == "fp32"
    assert "fp32 instead of int8" in caplog.text
    with build(settings(model, tmp_path, compile=False)) as works:
        assert works.images.model.precision == "fp32" and not works.images.execution.programs
    with pytest.raises(ModelError, match="int8 does not run here"):
        build(settings(model, tmp_path, precision="int8"))


def test_kernels_that_are_switched_off_mean_fp32(model: Path, cache: Path) -> None:
    assert precision(settings(model, cache, kernels=False), "cpu") == "fp32"


@pytest.mark.parametrize(("asked", "device"), [("fp8", "cpu"), ("int8", "cuda"), ("fp8", "cuda:1")])
def test_a_precision_that_the_device_has_no_path_for_is_refused(
    asked: str, device: str, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "triton", None)
    with pytest.raises(ModelError, match=f"{asked} does not run on"):
        precision(settings(model, cache, precision=asked), device)


def test_int8_of_a_model_without_a_variant_says_what_makes_one(tmp_path: Path, cache: Path) -> None:
    folder = tiny.save(tmp_path / "plain", SHAPE)
    with pytest.raises(ModelError, match="diptych quantize"):
        build(settings(folder, cache, precision="int8"))


def test_what_requests_may_hold_is_set_or_most_of_what_is_free(model: Path, cache: Path) -> None:
    loaded = load(str(model))
    assert memory_bytes(settings(model, cache, memory_mib=3), loaded) == 3 * 2**20
    free = memory_bytes(settings(model, cache), loaded)
    assert free > 2**26


@pytest.mark.parametrize(
    ("text", "schedule"),
    [("off", None), ("auto", AUTO), ("3", DeepCache(3)), ("4:resnet", DeepCache(4, "resnet"))],
)
def test_jobs_that_do_not_say_are_cached_as_the_settings_say(
    text: str, schedule: DeepCache | None, cache: Path
) -> None:
    job = {"n": 1, "seed": 1, "prompt": "x", "width": 16, "height": 16, "steps": 4, "guidance_scale": 1.0}
    with build(settings(tiny.TINY, cache, deepcache=text, kernels=False, compile=False)) as works:
        panel = panels_of(works)["image"]
        assert [one.deepcache for one in panel.requests(job)] == [schedule]
        assert [one.deepcache for one in panel.requests({**job, "deepcache": "off"})] == [None]


@pytest.mark.parametrize("text", ["on", "0", "-1", "2:deep", "", "1001"])
def test_a_schedule_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="deepcache"):
        Settings(deepcache=text)
