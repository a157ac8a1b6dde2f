"""Layers' own scales, and layers left in floats: as variants hold them, resumed, and as sensitivity measures them."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from core.quant.convert import RecipeError
from core.quant.search import Choice, chosen
from core.quant.statistics import StatisticsError
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel, load
from pipeline.quantization import quantized, sensitivity
from pipeline.quantization.calibration import default_prompts
from pipeline.quantization.quantized import Layerwise
from unet_opt.calibrate import CalibrationSettings

SHAPE = tiny.SDXLShape(channels=(16, 32), heads=(1, 2))
PROMPTS = default_prompts()[:10]  # a whole batch, and a part of one
QUICK = CalibrationSettings(steps=4, watched_steps=2)
SEARCH = Layerwise(search=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "model", SHAPE)


@pytest.fixture(scope="module")
def model(folder: Path) -> ImageModel:
    return load(str(folder))


def make(model: ImageModel, out: Path, **options: Any) -> dict[str, Any]:
    """Of each part what its manifest says."""
    made = quantized.make(model, PROMPTS, out, settings=QUICK, **options)
    return {part: json.loads((out / f"{part}-int8" / "quantization.json").read_text()) for part in made}


@pytest.fixture(scope="module")
def searched(model: ImageModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make(model, tmp_path_factory.mktemp("searched") / "out", layerwise=SEARCH)


def tensors(folder: Path, unet: Path) -> dict[str, torch.Tensor]:
    return load(str(folder), precision="int8", unet=unet).denoiser.state_dict()  # type: ignore[no-any-return]


def test_a_searched_variant_says_what_was_chosen_and_its_scales_follow_from_it(
    model: ImageModel, folder: Path, tmp_path: Path, kernels: ctypes.CDLL
) -> None:
    about = make(model, tmp_path / "out", layerwise=SEARCH, kernels=kernels)
    found = quantized.calibrated(
        model, PROMPTS, tmp_path / "again", layerwise=SEARCH, settings=QUICK, kernels=kernels
    )  # fmt: skip
    for part, said in about.items():
        assert said["recipe"].endswith("-searched") and said["calibration"]["watched_steps"] == QUICK.steps
        choices = {name: Choice.read(one) for name, one in said["calibration"]["search"].items()}
        assert {*choices} == {*said["layers"]} and choices == found.choices[part]
        assert all(choice.error <= choice.usual for choice in choices.values())
    recipe = chosen(quantized.recipes_of(model)["unet"], found.choices["unet"])
    remade, _ = quantized.in_8_bits(model, "unet", found.statistics, recipe=recipe)
    stored = tensors(folder, tmp_path / "out" / "unet-int8")
    for name in about["unet"]["layers"]:
        assert torch.equal(stored[f"{name}.inverse"], remade.get_submodule(name).inverse)


@pytest.mark.long
def test_scales_alone_load_as_the_weights_do(model: ImageModel, folder: Path, tmp_path: Path) -> None:
    keep = Layerwise(search=True, keep=r"up_blocks\.1\.resnets\.0\.conv1")
    for name in ("whole", "scales"):
        about = make(model, tmp_path / name, layerwise=keep, weights=name == "whole")
        assert about["unet"]["skipped"]["up_blocks.1.resnets.0.conv1"].startswith("kept in floating point")
    whole, scales = (tensors(folder, tmp_path / name / "unet-int8") for name in ("whole", "scales"))
    assert whole.keys() == scales.keys() and all(torch.equal(whole[name], scales[name]) for name in whole)


def test_weights_that_gptq_rounded_are_stored_and_named(
    model: ImageModel, folder: Path, searched: dict[str, Any], tmp_path: Path
) -> None:
    about = make(model, tmp_path / "gptq", layerwise=Layerwise(search=True, gptq=True))
    assert about["unet"]["calibration"]["search"].keys() == searched["unet"]["calibration"]["search"].keys()
    rounded = {*about["unet"]["calibration"]["gptq"]}
    assert rounded and rounded <= {*about["unet"]["layers"]}
    only = make(model, tmp_path / "only", layerwise=Layerwise(gptq=True))["unet"]["calibration"]
    assert only["gptq"] and "search" not in only
    stored = tensors(folder, tmp_path / "gptq" / "unet-int8")
    assert all(stored[f"{name}.weight"].dtype is torch.int8 for name in rounded)
    with pytest.raises(RecipeError, match="which are to be stored"):
        make(model, tmp_path / "scales", layerwise=Layerwise(gptq=True), weights=False)


class Killed(BaseException):
    pass


def test_a_search_that_was_stopped_goes_on_to_the_same_scales(
    model: ImageModel, searched: dict[str, Any], tmp_path: Path
) -> None:
    def kill(done: int) -> None:
        if done:
            raise Killed

    with pytest.raises(Killed):
        make(model, tmp_path / "again", layerwise=SEARCH, tell=kill)
    told: list[int] = []
    again = make(model, tmp_path / "again", layerwise=SEARCH, tell=told.append)
    assert told == [8, 10] and again == searched
    assert not [*(tmp_path / "again").glob(".*.statistics")]


def test_ranges_without_rows_are_no_beginning_of_a_search(model: ImageModel, tmp_path: Path) -> None:
    quantized.calibrated(model, PROMPTS, tmp_path / "out", settings=QUICK)
    with pytest.raises(StatisticsError, match="was begun with another model or recipe"):
        make(model, tmp_path / "out", layerwise=SEARCH)


def test_layers_that_share_an_input_stay_in_floats_together(model: ImageModel, tmp_path: Path) -> None:
    about = make(model, tmp_path / "out", layerwise=Layerwise(keep=r".*attn1\.to_q"))
    attention = [name for name in about["unet"]["skipped"] if ".attn1.to_" in name]
    assert {name.rpartition(".")[2] for name in attention} == {"to_q", "to_k", "to_v"}
    assert not [name for name in about["unet"]["layers"] if name.endswith("attn1.to_k")]


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        ("up_blocks", "keep: no layer that would be quantized has a name that matches 'up_blocks'"),
        ("(", r"keep: '\(' is no regular expression"),
    ],
)
def test_a_pattern_of_no_layer_is_refused_before_anything_is_drawn(
    model: ImageModel, tmp_path: Path, keep: str, why: str
) -> None:
    told: list[int] = []
    with pytest.raises(RecipeError, match=why):
        make(model, tmp_path / "out", layerwise=Layerwise(keep=keep), tell=told.append)
    assert not told


@pytest.mark.long
def test_every_input_is_measured_alone_and_a_worse_one_costs_more(
    model: ImageModel, tmp_path: Path, kernels: ctypes.CDLL
) -> None:
    """Of the inputs that are not kept in floats: each costs a copy of the model."""
    kept = Layerwise(keep="down_blocks.*|mid_block.*")
    found = quantized.calibrated(model, PROMPTS, tmp_path / "out", layerwise=kept, settings=QUICK, kernels=kernels)
    recipe, statistics = found.recipes["unet"], found.statistics["unet"]
    rows = sensitivity.measure(model, recipe, statistics, PROMPTS[:2], pictures=2, kernels=kernels)
    families = recipe.families(model.denoiser)
    assert sorted(map(sorted, families)) == sorted(sorted(one.layers) for one in rows)
    assert [one.error for one in rows] == sorted((one.error for one in rows), reverse=True)
    assert all(0 < error < 0.2 for one in rows for error in one.errors) and 0 < sum(one.arithmetic for one in rows) < 1
    assert [one.psnr_db is not None for one in rows] == [True, True] + [False] * (len(rows) - 2)
    least = rows[-1].layers
    for name in least:
        statistics.largest[name] = 40 * statistics.largest[name]  # levels so wide that hardly any are used
    again = sensitivity.measure(model, recipe, statistics, PROMPTS[:2], pictures=0, kernels=kernels)
    wider = next(one for one in again if one.layers == least)
    assert wider.error > 3 * rows[-1].error
    assert {one.layers: one.errors for one in again} == {one.layers: one.errors for one in (*rows[:-1], wider)}


def test_arithmetic_counts_every_multiplication(model: ImageModel) -> None:
    side = model.native // model.vae_scale
    call = sensitivity.recorded(model, PROMPTS[:1]).calls[0]
    found, rows = sensitivity.arithmetic(model, call), len(call.inputs.sample)
    for name, times in (
        ("conv_in", side * side), ("down_blocks.0.downsamplers.0.conv", side * side // 4),
        ("time_embedding.linear_1", 1), ("conv_out", side * side),
    ):  # fmt: skip
        assert found[name] == rows * times * model.denoiser.get_submodule(name).weight.numel()
