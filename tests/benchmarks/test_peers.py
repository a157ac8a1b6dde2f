"""The peers' race at small scale: who takes part, what is told of those who cannot, and that all read the same rows."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import compiling, openvino_unet, peers, record
from core import graphs
from core.config import Settings
from core.kernels.cpu.library import KernelsUnavailable, library
from pipeline import tiny
from pipeline.denoise import DenoiserInputs
from pipeline.families.sdxl import FAMILY
from tests.core.quant.stage import CACHE, warm

NAME = "random:test-peers"
SHAPE = tiny.SDXLShape(channels=(16, 32), heads=(1, 2))  # heads of 16, as our kernels want them
ALL = list(peers.CONTENDERS)
OPTIONAL = {"openvino-fp32", "openvino-int8"}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setitem(tiny.SHAPES, NAME, SHAPE)
    monkeypatch.setattr(peers, "_REST_S", 0.0)
    return Settings(model=NAME, cache_dir=CACHE.parent, threads=torch.get_num_threads())


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("openvino", "nncf"):
        monkeypatch.setitem(sys.modules, package, None)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """None for torch.compile, that is: it takes a minute, and our kernels are compiled already."""
    monkeypatch.setattr(peers, "compiler", lambda: None)


def have_kernels() -> bool:
    try:
        library(CACHE)
    except KernelsUnavailable:
        return False
    return True


@pytest.mark.usefixtures("without_packages", "without_compiler")
def test_what_is_not_installed_is_left_out_by_name(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    result = peers.run(settings, steps=20, pictures=64, results=tmp_path, rows=4, forwards=3)
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == json.loads((tmp_path / "peers.json").read_text())

    ours = {"diptych-fp32", "diptych-int8"} if have_kernels() else set()
    assert set(result["unet_ms"]) == set(result["unet_ms_2_rows"]) == {"diffusers-fp32"} | ours
    assert all(ms > 0 for ms in [*result["unet_ms"].values(), *result["unet_ms_2_rows"].values(), result["keys_ms"]])
    assert result["rows"] == 4 and result["model"] == NAME
    assert {"torch", "diffusers"} <= set(result["versions"]) and result["provenance"]["machine"]["cores"]

    assert set(result["left_out"]) == set(ALL) - {"diffusers-fp32"} - ours
    assert {result["left_out"][name] for name in OPTIONAL} == {"not installed: openvino"}
    table = out[: out.rindex("\n{")]
    for name in ALL:
        (line,) = (line for line in table.splitlines() if name in line)
        assert ("not installed: openvino" in line) == (name in OPTIONAL)


@pytest.mark.skipif(not have_kernels(), reason="no kernels for this machine")
@pytest.mark.usefixtures("without_packages", "without_compiler")
def test_errors_are_those_of_the_precision(settings: Settings, tmp_path: Path) -> None:
    errors = peers.run(settings, results=tmp_path, rows=4, forwards=2)["relative_error"]
    assert errors["diffusers-fp32"] == 0
    assert 0 < errors["diptych-fp32"] < 1e-5
    assert 1e-4 < errors["diptych-int8"] < 0.03  # 0.014 with AVX2; in fp32 it would be under 1e-5


def test_compiled_code_is_that_of_the_stock_unet_in_bf16(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    # That torch compiles is tests/core/test_graphs.py's; here, what is given to it.
    for module in (graphs, peers):
        monkeypatch.setattr(module, "compiler", lambda: "g++")
    monkeypatch.setattr(compiling, "ahead", lambda *arguments, **options: None)  # which tests/…/test_compiling.py holds
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    stage, drawn = peers._set(settings)
    given = peers._mixed(drawn, 2)
    with torch.inference_mode():
        (forward,) = peers._torch_compile(stage)(given).values()
        found, truth = forward(), FAMILY.call(stage.model.denoiser, given)[0]
    assert [type(function) for function in compiled] == [type(stage.model.denoiser)]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), truth, rtol=0, atol=0.02 * float(truth.abs().max()))


def test_what_compiles_too_long_is_left_out_and_others_are_told_before(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("diffusers-fp32", "torch-compile-bf16")
    assert list(peers.CONTENDERS)[-1] == "torch-compile-bf16"
    monkeypatch.setattr(peers, "CONTENDERS", {name: peers.CONTENDERS[name] for name in names})
    monkeypatch.setattr(peers, "compiler", lambda: "g++")
    small = settings.model_copy(update={"model": tiny.TINY, "cache_dir": warm(tmp_path / "cache")})
    result = peers.run(small, results=tmp_path, rows=4, forwards=2, compile_limit_s=0.001)
    assert result["left_out"] == {"torch-compile-bf16": "torch.compile took more than 0.001 s"}
    assert list(result["unet_ms"]) == ["diffusers-fp32"]
    told = [re.sub(r"[\d.]+ ms", "… ms", line) for line in capsys.readouterr().err.splitlines()]
    assert told[:5] == [
        "drawing what the contenders will read",
        "preparing diffusers-fp32",
        "diffusers-fp32: … ms at 4 rows, once",
        "preparing torch-compile-bf16 (torch.compile, at most 0.001 s)",
        "torch-compile-bf16 is left out: torch.compile took more than 0.001 s",
    ]


def test_optional_packages_run_the_same_unet(settings: Settings) -> None:
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    """Their INT8 lies 0.02 (two rows) and 0.05 (four) from fp32 here: twice that would be another model."""
    stage, drawn = peers._set(settings)
    for name, least, most in (("openvino-fp32", 0.0, 1e-5), ("openvino-int8", 1e-3, 0.11)):
        bind = peers.CONTENDERS[name](stage)
        for rows in (4, 2):
            given = peers._mixed(drawn, rows)
            truth = FAMILY.call(stage.model.denoiser, given)[0]
            for forward in bind(given).values():
                error = torch.linalg.vector_norm(forward() - truth) / torch.linalg.vector_norm(truth)
                assert least <= error < most
    parts = openvino_unet._arrays(given, 1, 2)
    assert [len(part) for part in parts] == [1] * 5


def test_rows_stand_at_different_steps(settings: Settings) -> None:
    stage, drawn = peers._set(settings)
    assert len(stage.forwards) == 2 * len(drawn) == 2 * 20 and stage.forwards[0].sample.shape[0] == 16
    assert stage.ranges.batches == [2] * 8, "the recipe's ranges are of the first steps"
    mixed = peers._mixed(drawn, 16)
    assert mixed.timestep[0::2].tolist() == mixed.timestep[1::2].tolist(), "guidance brings two rows of one step"
    assert len(set(mixed.timestep.tolist())) == 8
    alone = peers._mixed(drawn, 2)
    assert alone.sample.shape[0] == 2 and alone.timestep[0] == drawn[10].timestep[0]


def test_the_fastest_setting_counts() -> None:
    truth = torch.ones(3)

    def slow() -> torch.Tensor:
        time.sleep(0.05)
        return truth

    measured = peers._race({"diffusers-fp32": {"": lambda: truth}, "peer": {"a": slow, "b": lambda: 1.5 * truth}}, 3)
    assert measured["peer"].best == "b" and measured["peer"].ms["a"][0] > 45
    assert measured["peer"].error == 0.5 and measured["diffusers-fp32"].error == 0


def test_who_fails_when_given_rows_is_left_out_too(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(stage: peers.Stage) -> peers.Bind:
        def bind(inputs: DenoiserInputs) -> dict[str, peers.Forward]:
            raise peers.Missing(f"cannot do {inputs.sample.shape[0]} rows")

        return bind

    monkeypatch.setattr(peers, "CONTENDERS", {"diffusers-fp32": peers.CONTENDERS["diffusers-fp32"], "peer": fails})
    measured, left_out, _ = peers._compare(settings, 4, 2)
    assert left_out == {"peer": "cannot do 4 rows"} and list(measured[4]) == ["diffusers-fp32"]


def test_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(record.BenchError, match="--device"):
        peers.run(Settings(model=tiny.TINY, device="cuda"), results=tmp_path)
