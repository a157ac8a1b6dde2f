"""What a device lacks is refused early and by name, and what draws is said in the log and in the card."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from core.config import Settings
from core.kernels import describe as description
from core.kernels.cpu.library import identity
from core.kernels.cuda import driver
from core.kernels.device import DeviceInfo, say
from llm.families import tiny as tiny_text
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from tests.core.kernels.test_device import A100, L4, NO_TRITON, V100
from tests.core.quant import stage
from tests.workers.stage import handler_of
from workers.build import build
from workers.build_images import precision
from workers.build_text import text_runner
from workers.devices import keep_compiled

DEVICES = {"V100": V100, "A100": A100, "L4": L4, "H200 without Triton": NO_TRITON}


def settings(cache: Path, **given: object) -> Settings:
    return Settings(cache_dir=cache, **{"model": tiny.TINY, "compile": False, **given})  # type: ignore[arg-type]


def stand(device: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this device were there, up to where something would be computed on it."""
    monkeypatch.setattr(description, "describe", lambda *_: device)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("V100", "int8", "int8 needs compute capability 8.0, Tesla V100 has 7.0; take fp16"),
        ("V100", "fp8", "fp8 needs compute capability 8.9, Tesla V100 has 7.0; take fp16"),
        ("A100", "fp8", "fp8 needs compute capability 8.9, NVIDIA A100 has 8.0; take int8 or bf16"),
        ("L4", "fp8", None),
        ("H200 without Triton", "int8", "Triton is not installed; take bf16"),
        ("V100", "fp16", None),
    ],
)
def test_eight_bits_are_refused_where_the_device_does_not_multiply_them(
    name: str, asked: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand(DEVICES[name], monkeypatch)
    wanted = settings(tmp_path, precision=asked)
    if said is None:
        assert precision(wanted, "cuda") == asked
        return
    with pytest.raises(ModelError) as refused:
        precision(wanted, "cuda")
    assert str(refused.value) == f"{asked} does not run on cuda: {said}"


def test_a_texts_precision_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand(A100, monkeypatch)
    monkeypatch.setattr(driver, "_kept_in", driver._kept_in)
    wanted = settings(tmp_path, device="cuda", text_model="nowhere", text_precision="fp8")
    said: list[str] = []
    with pytest.raises(ModelError, match=r"fp8 does not run on cuda: .* 8\.9, NVIDIA A100 has 8\.0; take int8 or bf16"):
        text_runner(wanted, None, said.append)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_what_is_compiled_for_a_gpu_is_kept_in_the_settings_cache(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = driver._kept_in
    monkeypatch.setattr(driver, "_kept_in", before)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # which is put back
    keep_compiled(settings(tmp_path / "cache"), device)
    on_gpu = device != "cpu"
    assert driver._kept_in == (tmp_path / "cache" / "kernels" if on_gpu else before)
    assert os.environ["TRITON_CACHE_DIR"] == (str(tmp_path / "cache" / "kernels" / "triton") if on_gpu else "")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith(("workers", "core.kernels"))]


def test_kernels_are_said_to_be_compiled_where_they_are_not_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded, which takes long too; not where there is nothing to compile, or to compile with."""
    library = Path(stage.kernels()._name)

    def starts(cache: Path, **fields: Any) -> list[str]:
        told: list[str] = []
        build(settings(cache, model="random:tiny", **fields), say=told.append).close()
        return told

    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" ]; do [ "$1" = -o ] && cp {library} "$2"; shift; done\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    compiling = "compiling kernels, once for this machine"
    first, second = (starts(tmp_path / "cache", device="cpu") for _ in range(2))
    assert first[:2] == [compiling, "loading random:tiny"] and compiling not in second
    assert compiling not in starts(tmp_path / "none", device="cpu", kernels=False)
    with monkeypatch.context() as patch:
        patch.setattr("core.kernels.cpu.library._processor_flags", set)
        assert compiling not in starts(tmp_path / "old", device="cpu")
    compiler.write_bytes(b"\x7fELF, but not really")
    assert compiling not in starts(tmp_path / "without", device="cpu")


def test_our_kernels_are_said_and_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    instructions = identity(stage.kernels()).instructions
    say.cache_clear()
    folder = tiny.save(tmp_path / "tiny", tiny.SDXLShape(channels=(16, 32), heads=(1, 2)))
    cache = stage.warm(tmp_path / "cache")
    with caplog.at_level(logging.INFO), build(settings(cache, model=str(folder), device="cpu")) as works:
        card = handler_of(works).card()
    assert card.kernels == instructions
    title = {"avx512-vnni": "AVX-512 VNNI kernels", "avx2": "AVX2 kernels"}[instructions]
    found = lines(caplog)
    (said,) = [line for line in found if line.startswith("all layers")]
    assert said.startswith(f"all layers: {title}") and said.endswith(card.kernels_reason)
    (drawn,) = [line for line in found if " runs in " in line]
    assert drawn.startswith("tiny runs in fp32 on ")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"kernels": False}, "the native kernels are turned off"),
        ({"precision": "bf16"}, "the CPU kernels support fp32, int8, int8-dynamic, int8-sparse and w4a8, not bf16"),
        ({"model": "narrow"}, "heads of width 8"),
    ],
)
def test_torch_is_said_and_announced_with_the_reason(
    given: dict[str, object], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say.cache_clear()
    if "model" in given:
        given = {"model": str(tiny.save(tmp_path / "narrow", tiny.SDXLShape(channels=(16, 32), heads=(2, 4))))}
    with caplog.at_level(logging.INFO), build(settings(stage.warm(tmp_path / "cache"), device="cpu", **given)) as works:
        card = handler_of(works).card()
    assert card.kernels == "torch" and reason in card.kernels_reason
    assert f"all layers: torch: {card.kernels_reason}" in lines(caplog)
    level = "INFO" if given == {"kernels": False} else "WARNING"  # what was asked for is no reason to warn
    assert [record.levelname for record in caplog.records if "all layers" in record.getMessage()] == [level]


def test_a_text_model_announces_its_kernels(tmp_path: Path) -> None:
    instructions = identity(stage.kernels()).instructions
    for kernels, wanted, said in ((True, instructions, ""), (False, "torch", "the CPU kernels are turned off")):
        given = settings(stage.CACHE.parent, device="cpu", text_model=tiny_text.TINY, kernels=kernels)
        with build(given, text=True) as works:
            card = handler_of(works, "text").card()
        assert card.kernels == wanted
        assert card.kernels_reason.startswith(said) and bool(card.kernels_reason) == bool(said)
