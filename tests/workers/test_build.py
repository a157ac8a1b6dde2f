"""Settings to an engine: which precision runs where, what is refused, and what requests may hold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from contract.plan import AUTO, DeepCache
from core.batching.runner import Lane
from core.config import Settings
from core.kernels import describe as description
from core.kernels.cpu import library as kernels
from core.kernels.cpu.library import KernelsUnavailable
from core.kernels.cuda import driver
from core.kernels.device import say
from llm.checkpoints.load import load as load_text
from llm.checkpoints.quantized import make as quantize_text
from llm.families import tiny as texts
from llm.runner import TextRunner
from pipeline.backends.backend import ImageBackend, Widths
from pipeline.backends.programs import ProgramBackend
from pipeline.backends.torch_backend import TorchBackend
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import ImageModel, load
from pipeline.extensions.lora_extension import LoraExtension
from pipeline.quantization import quantized
from tests.core.kernels.test_device import H200
from tests.core.quant.stage import CACHE
from tests.workers.crew import eventually
from tests.workers.desk import JOB, torch_settings
from tests.workers.stage import handler_of
from workers import app, backends, build_images, variants
from workers.build import build
from workers.build_images import memory_bytes, precision
from workers.build_text import text_runner
from workers.serving_runtime import ModelRuntime, build_serving_runtime
from workers.text.pool import later_bytes

SHAPE = tiny.SDXLShape(channels=(16, 32), heads=(1, 2))


@pytest.fixture(scope="module")
def cache() -> Path:
    """Where the tests' kernels are kept."""
    return CACHE.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its INT8 variant."""
    folder = tiny.save(tmp_path_factory.mktemp("models") / "tiny", SHAPE)
    quantized.make(load(str(folder)), ["a hat", "a cat"], folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "plain", SHAPE, seed=1)


@pytest.fixture
def has_kernels(cache: Path) -> None:
    try:
        kernels.library(cache / "kernels")
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def settings(model: Path | str, cache: Path, **given: object) -> Settings:
    return Settings(model=str(model), cache_dir=cache, device="cpu", **given)  # type: ignore[arg-type]


@pytest.mark.usefixtures("has_kernels")
def test_auto_takes_int8_where_the_model_has_it_and_the_kernels_run(model: Path, cache: Path, tmp_path: Path) -> None:
    assert precision(settings(model, cache), "cpu") == "int8"
    assert precision(settings(model, cache, kernels=False), "cpu") == "fp32"
    with pytest.raises(ModelError, match="fp8 does not run on"):
        precision(settings(model, cache, precision="fp8"), "cpu")
    with build(settings(model, cache)) as works:
        assert works.images.model.precision == "int8" and isinstance(works.images.backend, ProgramBackend)


def test_without_a_compiler_auto_is_fp32_and_the_log_says_why(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What must run in 8 bits is refused, before a model without a variant is calibrated."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    kernels.library.cache_clear()
    with caplog.at_level(logging.WARNING), build(settings(model, tmp_path, compile=False)) as works:
        assert works.images.model.precision == "fp32" and isinstance(works.images.backend, TorchBackend)
    assert "fp32 instead of int8" in caplog.text
    said: list[str] = []
    for name in (model, tiny.TINY):
        with pytest.raises(ModelError, match=r"int8 does not run here: .*compiler"):
            build(settings(name, tmp_path, precision="int8"), say=said.append)
    assert not [line for line in said if "prompts" in line]


@pytest.mark.usefixtures("has_kernels")
def test_int8_of_a_model_without_a_variant_makes_one_in_the_cache_which_auto_takes(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = str(tiny.save(tmp_path / "plain", SHAPE))
    mine = tmp_path / "cache"
    mine.mkdir()
    (mine / "kernels").symlink_to(cache / "kernels")
    with caplog.at_level(logging.INFO, "workers"):
        assert precision(settings(plain, mine), "cpu") == "fp32"
    assert "no int8 variant; `--precision int8` or `diptych quantize` makes one" in caplog.text
    said: list[str] = []
    with build(settings(plain, mine, precision="int8"), say=said.append) as works:
        assert works.images.model.precision == "int8" and isinstance(works.images.backend, ProgramBackend)
        digest = works.images.model.digest
    assert [line for line in said if "to int8: 0 of 64 prompts" in line or "to int8: 64 of 64 prompts" in line]
    caplog.clear()
    with caplog.at_level(logging.INFO, "workers"):
        assert precision(settings(plain, mine), "cpu") == "int8"
    assert "such a variant in the cache" in caplog.text
    again: list[str] = []
    with build(settings(plain, mine, precision="int8"), say=again.append) as works:
        assert works.images.model.digest == digest
    assert not [line for line in again if "quantizing" in line]


@pytest.mark.usefixtures("has_kernels")
def test_a_model_in_8_bits_takes_loras_and_keeps_no_weights_for_any(model: Path, cache: Path, tmp_path: Path) -> None:
    with build(settings(model, cache, lora_dir=str(tmp_path))) as works:
        assert works.images.model.precision == "int8" and works.images.extensions["lora"].folder is not None
        assert works.images.model.denoiser.conv_in.weight.numel() == 0


@pytest.mark.usefixtures("has_kernels")
def test_over_a_lora_nothing_is_quantized_by_itself(tmp_path: Path, cache: Path) -> None:
    folder = tiny.save(tmp_path / "plain", SHAPE)
    asked = settings(folder, cache, precision="int8", lora="any", lora_dir=str(tmp_path))
    assert variants.unet_of(asked, "cpu", "int8", "fp32", pytest.fail, pytest.fail, None) is None
    assert precision(asked.model_copy(update={"precision": "auto"}), "cpu") == "fp32"


def test_heads_that_the_kernels_do_not_know_are_refused_before_they_are_calibrated(tmp_path: Path, cache: Path) -> None:
    narrow = tiny.save(tmp_path / "narrow", tiny.SDXLShape())
    said: list[str] = []
    with pytest.raises(ModelError, match=r"int8 does not run here: unet .*no multiple of 16"):
        build(settings(narrow, cache, precision="int8"), say=said.append)
    assert not [line for line in said if "prompts" in line]


@pytest.mark.usefixtures("has_kernels")
def test_text_takes_its_variant_where_the_kernels_run_and_the_log_says_why(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = texts.save(tmp_path / "small", texts.SHAPES[texts.TINY])
    quantize_text(load_text(str(folder)), [(1, 7, 8, 9)], folder)
    for given, wanted, said in (
        ({"text_model": str(folder)}, "int8", "the model has such a variant"),
        ({"text_model": str(folder), "kernels": False}, "fp32", "the native kernels are turned off"),
        ({"text_model": str(folder), "text_precision": "fp32"}, "fp32", "as the settings say"),
        ({"text_model": texts.TINY}, "fp32", "no variant in 8 bits"),
    ):
        caplog.clear()
        lane = Lane("tests-text")
        with caplog.at_level(logging.INFO, "workers"):
            runner = text_runner(settings(tiny.TINY, cache, text_memory_mib=1, **given), lane, lambda text: None)
        assert runner is not None and runner.model.precision == wanted
        assert f"in {wanted}: " in caplog.text and said in caplog.text
        runner.close()
        lane.close()


def test_a_text_model_that_cannot_be_loaded_is_left_out_and_one_that_is_nowhere_refused(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut, whole = (texts.save(tmp_path / name, texts.SHAPES[texts.TINY]) for name in ("cut", "whole"))
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    given = settings(
        tiny.TINY, cache, text_models=f"{texts.TINY},{cut},{whole}", text_memory_mib=1, kernels=False, compile=False
    )
    with caplog.at_level(logging.ERROR), closing(build_serving_runtime(build(given, text=True))) as equipment:
        eventually(lambda: "whole" in equipment.handlers)
        assert [*equipment.handlers] == [tiny.TINY, texts.TINY, "whole"]
    assert "cut is not served: text: " in caplog.text
    (tmp_path / "other").mkdir()
    twin = texts.save(tmp_path / "other" / "whole", texts.SHAPES[texts.TINY])
    for name, wrong in (("nowhere", "text: nowhere: no such folder"), (f"{whole},{twin}", "must have different names")):
        with pytest.raises(ModelError, match=wrong):
            app._build(given.model_copy(update={"text_models": f"{texts.TINY},{name}"}), pytest.fail)


def test_what_requests_may_hold_is_set_or_most_of_what_is_free(model: Path, cache: Path) -> None:
    loaded = load(str(model))
    assert memory_bytes(settings(model, cache, memory_mib=3), loaded) == 3 * 2**20
    # Others use memory meanwhile. What caches of files hold counts as free: Linux lets them fill nearly all of it.
    assert memory_bytes(settings(model, cache), loaded) > max(2**26, 0.5 * psutil.virtual_memory().available)


@pytest.mark.parametrize("free", [2**20, 141 * 2**30])
def test_forwards_buffers_and_loras_get_what_requests_may_not_hold(
    free: int, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven tenths are for requests, after what was set aside for LoRAs; never less than nothing."""
    loaded = load(str(model))
    monkeypatch.setattr("workers.build_images.free_bytes", lambda device: free)
    assert memory_bytes(settings(model, cache), loaded) == pytest.approx(0.7 * free, abs=1)
    with_loras = settings(model, cache, lora_dir=str(cache), lora_mib=1024)
    extensions = [LoraExtension.open(with_loras, loaded, TorchBackend(loaded))]
    beside = memory_bytes(with_loras, loaded, extensions)
    assert beside == pytest.approx(max(0.0, 0.7 * (free - 2**30)), abs=1)


def test_a_worker_measures_what_forwards_cost_before_its_first_job(cache: Path) -> None:
    """The scheduler chooses widths by cost curves: without them its first jobs would be batched blindly."""
    said: list[str] = []
    given = settings(tiny.TINY, cache, text_model="off", kernels=False, compile=False)
    with closing(app._build(given, said.append)) as equipment:
        assert isinstance(equipment, ModelRuntime)
        curves = equipment.runtime.images.backend.costs.measured()
        assert {key[0] for key in curves} >= {"deep", "vae"}
        assert all(seconds > 0 for curve in curves.values() for seconds in curve.values())
        assert any(key[0] == "deep" and len(curve) > 1 for key, curve in curves.items())
    assert "measuring what forwards cost" in said


@pytest.mark.parametrize(
    ("text", "schedule"), [("off", None), ("auto", AUTO), ("3", DeepCache(3)), ("4:resnet", DeepCache(4, "resnet"))]
)
def test_jobs_that_do_not_say_are_cached_as_the_settings_say(
    text: str, schedule: DeepCache | None, cache: Path
) -> None:
    with build(settings(tiny.TINY, cache, deepcache=text, kernels=False, compile=False)) as works:
        handler = handler_of(works)
        for asked, expected in ({}, schedule), ({"deepcache": "off"}, None):
            assert {one.deepcache for one in handler.requests(handler.read({**JOB, **asked}))} == {expected}


@pytest.mark.parametrize("text", ["on", "0", "2:deep", "", "1001"])
def test_a_schedule_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="deepcache"):
        Settings(deepcache=text)


class Built(Exception):
    """The backend of this name would be made with these widths."""

    def __init__(self, name: str, widths: Widths) -> None:
        super().__init__(name)
        self.name, self.widths = name, widths


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides how pictures are drawn finds an H200 with Triton, and goes as far as the backend."""

    def maker(name: str) -> Callable[..., ImageBackend]:
        def make(model: ImageModel, widths: Widths, **options: Any) -> ImageBackend:
            raise Built(name, widths)

        return make

    def load_on(name: str, *, device: str, **options: Any) -> Any:
        return replace(load(name, **options), device=torch.device(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(driver, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**36, 2**37))
    monkeypatch.setattr(description, "describe", lambda *_: H200)
    monkeypatch.setattr(driver, "_kept_in", driver._kept_in)  # which is put back
    monkeypatch.setenv("TRITON_CACHE_DIR", "/users/own")
    say.cache_clear()
    monkeypatch.setattr(build_images, "load", load_on)
    monkeypatch.setattr(backends, "TorchBackend", maker("torch"))
    monkeypatch.setattr(backends, "GraphBackend", maker("graphs"))


def drawn_with(given: Settings) -> Built:
    with pytest.raises(Built) as caught:
        build(given)
    return caught.value


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("given", "backend", "why"),
    [
        ({}, "graphs", ""),
        ({"precision": "fp16"}, "torch", "the GPU kernels support bf16 and 8 bits, not fp16"),
        ({"kernels": False}, "torch", "are turned off"),
    ],
)
def test_a_gpu_draws_on_fused_layers_or_says_why_not(
    given: dict[str, Any], backend: str, why: str, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = Settings(model=str(plain), device="cuda", cache_dir=tmp_path, **given)
    assert precision(found, "cuda") == given.get("precision", "bf16")
    with caplog.at_level(logging.INFO):
        assert drawn_with(found).name == backend
    assert ("all layers: torch: " in caplog.text) == bool(why) and why in caplog.text


@pytest.mark.usefixtures("gpu")
def test_widths_on_a_gpu_are_close_and_end_where_tiles_do(
    plain: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on = Settings(model=str(plain), device="cuda", cache_dir=cache, max_rows=32)
    with caplog.at_level(logging.INFO):
        widths = drawn_with(on).widths
    assert widths.max_rows == 32 and "no tiles were measured on NVIDIA H200" in caplog.text
    buckets = widths.descending
    assert max(buckets) == 32
    for rows in range(1, 33):
        padded = min(bucket for bucket in buckets if bucket >= rows)
        assert padded - rows <= max(1, rows / 5), "a forward costs what its rows cost, padding included"
    monkeypatch.setattr("unet_opt.widths.tuned_rows", lambda *_: 6)
    with caplog.at_level(logging.INFO):
        widths = drawn_with(on).widths
    assert widths.max_rows == widths.deterministic_rows == 6
    assert "at most 6 rows, not 32" in caplog.text


def test_requests_get_the_memory_that_the_depth_model_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    monkeypatch.setattr("workers.build.DepthEstimator", lambda path: order.append("depth model"))
    monkeypatch.setattr("workers.build_images.memory_bytes", lambda *given: order.append("memory") or 2**30)
    with build(torch_settings(cache_dir=tmp_path, depth_model="depth")):
        assert order == ["depth model", "memory"]


def test_requests_get_the_memory_that_text_may_take_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Adapters, and counts for penalties; a text model that fails before it serves takes none."""
    monkeypatch.setattr("workers.build_images.memory_bytes", lambda *given: 2**30)
    settings = torch_settings(
        cache_dir=tmp_path, text_requests=8, text_models=f"{texts.TINY},{texts.QWEN3_TINY}", text_loras=str(tmp_path),
        text_loras_mib=64,
    )  # fmt: skip
    with build(settings, text=True) as runtime:
        assert runtime.texts is not None and runtime.text_pool is not None
        later = later_bytes(settings, runtime.texts)
        assert later == 2**26 + 8 * 4 * runtime.texts.model.vocabulary
        assert 2**30 - runtime.image_runner.capacity.memory.capacity > 2 * later
        closed: list[object] = []
        close = TextRunner.close

        def fails(runner: TextRunner, **_: object) -> None:
            raise MemoryError("no graphs")

        monkeypatch.setattr(TextRunner, "prepare", fails)
        monkeypatch.setattr(TextRunner, "close", lambda runner: (closed.append(runner.model.name), close(runner)))
        (_, second) = runtime.text_pool.names
        with pytest.raises(MemoryError, match="no graphs"):
            runtime.text_pool.load(second)
        assert closed == [second]
