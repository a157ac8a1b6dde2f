"""Calibration: by the CPU's kernels as by torch, in one pass for both parts, and without a trace on the model."""

from __future__ import annotations

import copy
import ctypes
from pathlib import Path

import pytest
import torch

from core.quant.linear import Int8Conv2d, Int8Linear
from core.quant.statistics import Statistics
from pipeline.checkpoints import sdxl, tiny
from pipeline.checkpoints.load import ImageModel, load, weights_digest
from pipeline.families.sdxl import FAMILY
from pipeline.quantization import quantized
from pipeline.quantization.calibration import collect, default_prompts
from unet_opt.calibrate import CalibrationSettings
from unet_opt.recipe import ALPHA

SHAPES = {
    "wide-heads": tiny.SDXLShape(channels=(16, 32), heads=(1, 2)),
    "deep": tiny.SDXLShape(native=64, channels=(16, 32, 64), transformers=(1, 1, 2), heads=(1, 2, 4), resnets=2),
    "distilled": tiny.SDXLShape(channels=(16, 32), heads=(1, 2), time_cond=32, force_zeros=False),
}
PROMPTS = default_prompts()[:11]  # a whole batch, and a part of one
QUICK = CalibrationSettings(steps=4, watched_steps=2)


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    return load(str(tiny.save(tmp_path_factory.mktemp("models") / "model", SHAPES[request.param])))


def ranges(model: ImageModel, kernels: ctypes.CDLL | None = None) -> quantized.Ranges:
    return quantized.ranges(model, PROMPTS, settings=QUICK, kernels=kernels)


def check_close(found: Statistics, wanted: Statistics) -> None:
    assert found.batches == wanted.batches and {*found.largest} == {*wanted.largest}
    for name, largest in wanted.largest.items():
        assert largest.max() > 0.01, "of nothing all is close"
        # Kernels see a map before it is doubled, which moves ranks but not the largest.
        for kind in ("largest", "smallest", *(() if "samplers" in name else ("typical",))):
            one, other = (getattr(each, kind)[name] for each in (found, wanted))
            # Two kinds of fp32 kernels part by rounding, which every step hands on to the next.
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3 * float(largest.max()))


@pytest.mark.quick("deep", "wide-heads")
def test_the_cpu_kernels_find_the_ranges_that_torch_finds(model: ImageModel, kernels: ctypes.CDLL) -> None:
    plain, programs = ranges(model), ranges(model, kernels)
    assert {part: found.batches for part, found in plain.items()} == {"unet": [2] * QUICK.watched_steps, "vae": [2]}
    for part in FAMILY.quantized:
        check_close(programs[part], plain[part])
        assert {*plain[part].largest} == {*FAMILY.recipes(model.parts, ALPHA)[part].targets(model.parts[part])}


def test_one_pass_finds_what_the_unet_alone_and_the_decoder_alone_read(kernels: ctypes.CDLL, tmp_path: Path) -> None:
    model = load(str(tiny.save(tmp_path / "model", SHAPES["deep"])))
    both = ranges(model, kernels)
    for part, recipe in FAMILY.recipes(model.parts, ALPHA).items():
        layers = recipe.targets(model.parts[part])
        alone = collect(model, {part: layers}, PROMPTS, settings=QUICK, kernels=kernels)[part]
        assert alone.batches == both[part].batches
        assert all(torch.equal(alone.largest[name], both[part].largest[name]) for name in layers)


@pytest.mark.parametrize(("model", "with_kernels"), [("deep", True), ("distilled", False)], indirect=["model"])
def test_the_model_is_left_as_it_was(
    model: ImageModel, kernels: ctypes.CDLL, with_kernels: bool, tmp_path: Path
) -> None:
    parts = [model.parts[part] for part in FAMILY.quantized]
    states = copy.deepcopy([part.state_dict() for part in parts])
    processors = [*map(type, model.denoiser.attn_processors.values())]
    quantized.make(model, PROMPTS, tmp_path / "out", settings=QUICK, kernels=kernels if with_kernels else None)
    assert [*map(type, model.denoiser.attn_processors.values())] == processors
    for module, before in zip(parts, states, strict=True):
        after = module.state_dict()
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        for layer in module.modules():
            assert not isinstance(layer, (Int8Linear, Int8Conv2d)) and not layer._forward_pre_hooks


@pytest.mark.long
def test_a_quantized_part_shares_what_is_not_quantized(tmp_path: Path) -> None:
    """SDXL's UNet is 5 GB in bf16: a copy of it would not fit beside it on every device that holds it."""
    model = load(str(tiny.save(tmp_path / "model", SHAPES["deep"])))
    found = ranges(model)
    for part in FAMILY.quantized:
        made, report = quantized.in_8_bits(model, part, found)
        own, kept = (dict(each.named_parameters()) for each in (model.parts[part], made))
        assert report.changed and kept
        assert all(tensor.data_ptr() == own[name].data_ptr() for name, tensor in kept.items())


@pytest.mark.long
def test_half_precision_is_calibrated_in_its_own_type(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", SHAPES["wide-heads"])
    model = load(str(folder), precision="bf16")
    quantized.make(model, PROMPTS, tmp_path / "out", settings=QUICK)
    load(str(folder), precision="int8", unet=tmp_path / "out" / "unet-int8")
    exact, close = ranges(load(str(folder))), ranges(model)
    for part in FAMILY.quantized:
        for name, largest in exact[part].largest.items():
            error = (close[part].largest[name] - largest).norm() / largest.norm()
            assert error < 0.05, f"{part} {name}: bf16 finds other ranges than fp32"


def test_the_captions_that_come_with_the_code_are_plain_and_distinct() -> None:
    prompts = default_prompts()
    assert 64 <= len(prompts) <= 128 and len({*prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt == prompt.strip() and 3 <= len(prompt.split()) <= 20 and prompt.isascii()


def test_the_digest_is_known_before_a_model_is_loaded(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", SHAPES["wide-heads"])
    for name in (str(folder), tiny.TINY):
        assert weights_digest(name) == load(name).digest
    assert weights_digest(tiny.TINY) != weights_digest(str(folder))
    # Its weights are drawn on the device, where another generator draws others.
    assert weights_digest(sdxl.NAME, device="cpu").endswith("-cpu")
