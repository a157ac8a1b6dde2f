"""Control networks in INT8: found beside their model's, near to fp32, and with bits that depend on no companion."""

from __future__ import annotations

import ctypes
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.errors import Invalid
from contract.image import ImageParameters
from contract.plan import AUTO
from core.quant.linear import Int8Conv2d, Int8Linear
from core.quant.store import MANIFEST
from evaluation.pairs import psnr
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import ImageModel, load
from pipeline.checkpoints.tiny import SDXLShape
from pipeline.extensions import control_file, control_variant
from pipeline.quantization import control_quantized, quantized
from tests.pipeline.controls import adapter, control, controlnet, save, union
from tests.pipeline.worlds import Crank, Watching, apart, levels, shared_lane, solo, together

SHAPE = SDXLShape(channels=(16, 32), heads=(1, 2))
PROMPTS = ["a red cat", "a slice of pizza", "two boats"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kernels: ctypes.CDLL) -> Path:
    """A model with an INT8 variant, and controls: `edges` with one, `plain` without."""
    where = tmp_path_factory.mktemp("models")
    model = load(str(tiny.save(where / "model", SHAPE)))
    quantized.make(model, PROMPTS, where / "model", kernels=kernels)
    for name in ("edges", "plain"):
        save(controlnet(model), where / "controls", name)
    make(where, "edges", kernels)
    return where


def make(where: Path, name: str, kernels: ctypes.CDLL | None, **options: Any) -> Any:
    model, path = load(str(where / "model")), control_file.find(where / "controls", name)
    return control_quantized.make(model, name, path, PROMPTS, where / "controls", kernels=kernels, **options)


def model_of(folder: Path, precision: str) -> ImageModel:
    return load(str(folder / "model"), precision=precision)


def runner_of(where: Path, controls: Path | None = None, **options: Any) -> Watching:
    """The INT8 model of a folder with its controls, or those of another."""
    return Watching(model_of(where, "int8"), lane=shared_lane(), controls=controls or where / "controls", **options)


def wanted(name: str | None, seed: int = 1, **options: Any) -> ImageParameters:
    controls = () if name is None else (control(name, 32, seed),)
    return ImageParameters("a red cat", seed, 32, 32, **{"steps": 6, "control": controls, **options})


def decibels(one: Any, other: Any) -> float:
    return psnr(levels(one), levels(other))


def test_its_layers_are_in_8_bits_and_few_are_left(folder: Path) -> None:
    path = control_file.find(folder / "controls", "edges")
    found = control_variant.read("edges", path, model_of(folder, "int8"))
    changed = {name for name, module in found.network.named_modules() if isinstance(module, Int8Linear | Int8Conv2d)}
    assert {"down_blocks.1.attentions.0.transformer_blocks.0.ff.net.2", "mid_block.resnets.1.conv2"} <= changed
    told = json.loads((folder / "controls" / "edges-int8" / MANIFEST).read_text())
    assert set(told["layers"]) == changed and "conv_in" in told["skipped"] and told["calibration"]["prompts"] == 3
    plain = control_file.read("edges", path, model_of(folder, "fp32"), torch.float32)
    assert found.digest != plain.digest
    assert control_file.offered(folder / "controls") == ["edges", "plain"]


def test_pictures_are_near_those_of_fp32(folder: Path, kernels: ctypes.CDLL) -> None:
    """The base model in INT8 both times: what is measured is the control network's share."""
    eight = runner_of(folder, kernels=kernels)
    drawn = {name: [solo(eight, wanted(name, seed)) for seed in range(1, 5)] for name in ("plain", "edges", None)}
    found, without = ([*map(decibels, drawn[name], drawn["plain"])] for name in ("edges", None))
    assert min(found) > 25 and np.mean(found) > np.mean(without) + 8, (found, without)


def test_bits_depend_on_no_companion(folder: Path, kernels: ctypes.CDLL) -> None:
    runner = runner_of(folder, kernels=kernels, frugal=True)
    asked = [
        wanted("edges", 1), wanted(None, 2), wanted("plain", 3, guidance_scale=1.0), wanted("edges", 4, steps=4),
        wanted("edges", 5, deepcache=AUTO), wanted(None, 6, deepcache=AUTO),
    ]  # fmt: skip
    for one, picture in zip(asked, together(runner, asked), strict=True):
        assert apart(picture, solo(runner, one)) == 0
    assert any({"0", "1"} <= ride for ride in runner.companions)


@pytest.mark.long
def test_the_fused_layers_run_it(folder: Path, kernels: ctypes.CDLL) -> None:
    programs, fused = runner_of(folder, kernels=kernels), runner_of(folder, fused=True)
    assert decibels(solo(programs, wanted("edges")), solo(fused, wanted("edges"))) > 25


@pytest.mark.long
def test_scales_alone_give_the_same_network(folder: Path, kernels: ctypes.CDLL, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    shutil.copytree(folder / "controls", tmp_path / "controls")
    _, size = make(tmp_path, "edges", kernels, weights=False)
    _, whole = make(tmp_path, "plain", kernels)
    assert size < whole / 4
    runner = runner_of(tmp_path, kernels=kernels)
    assert decibels(solo(runner, wanted("edges")), solo(runner, wanted("plain"))) > 40  # unquantized layers are rounded


@pytest.mark.long
def test_a_union_is_quantized_and_an_adapter_is_not(folder: Path, kernels: ctypes.CDLL, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    model = load(str(tmp_path / "model"))
    for name, made in (("one", union(model)), ("two", union(model)), ("adapter", adapter(model))):
        save(made, tmp_path / "controls", name)
    report, _ = make(tmp_path, "one", kernels)
    assert not any(name.startswith(("transformer_layes", "control_add")) for name in report.changed)
    runner = runner_of(tmp_path, kernels=kernels)
    asked = [replace(wanted(name), control=(control(name, 32, 1, mode=3),)) for name in ("one", "two")]
    assert decibels(*(solo(runner, one) for one in asked)) > 25
    with pytest.raises(ModelError, match="is a T2I-Adapter, which runs once a picture"):
        make(tmp_path, "adapter", kernels)


def test_a_variant_of_other_weights_is_refused_by_name(folder: Path, kernels: ctypes.CDLL, tmp_path: Path) -> None:
    where = shutil.copytree(folder / "controls", tmp_path / "controls")
    save(controlnet(load(str(folder / "model")), 5), where, "edges")
    runner = runner_of(folder, where, kernels=kernels)
    with pytest.raises(Invalid, match="edges-int8: was quantized from other weights") as caught:
        Crank(runner).submit("x", wanted("edges"))
    assert str(tmp_path) not in caught.value.message
    shutil.copytree(folder / "controls" / "edges-int8", where / "plain-int8")
    (where / "plain-int8" / "model.safetensors").write_bytes(b"none")
    with pytest.raises(Invalid, match=r"plain-int8/model\.safetensors: is not the file"):
        Crank(runner).submit("y", wanted("plain"))
    fp32 = Watching(model_of(folder, "fp32"), lane=shared_lane(), controls=where)
    assert solo(fp32, replace(wanted("edges"), steps=2)) is not None  # which reads no variant
