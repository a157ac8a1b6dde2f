"""The image runner on our own CPU kernels: parity with diffusers, and pictures that do not depend on their batch."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.image import ImageParameters
from evaluation.pairs import psnr
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import ImageModel, load
from tests.pipeline import worlds
from tests.pipeline.pixels import test_edit
from tests.pipeline.worlds import Watching, apart, check_parity, in_int8, levels, model, solo, together

SHAPES = {
    "wide-heads": tiny.SDXLShape(channels=(16, 32), heads=(1, 2)),
    "deep": tiny.SDXLShape(native=64, channels=(16, 32, 64), transformers=(1, 1, 2), heads=(1, 2, 4), resnets=2),
}


worlds.MORE.update(SHAPES)


def mixture(shape: str) -> list[ImageParameters]:
    side = SHAPES[shape].native
    return [
        ImageParameters(
            f"a {colour} hat", seed, side, side, steps=steps, guidance_scale=guidance, scheduler=scheduler,
            deterministic=bool(seed % 2),
        )
        for seed, (colour, steps, guidance, scheduler) in enumerate(
            (("red", 4, 5.0, None), ("teal", 3, 1.0, "euler"), ("pink", 5, 7.0, "dpm++2m"), ("big", 4, 3.0, "lcm"),
             ("old", 6, 0.5, "euler-ancestral"), ("new", 3, 2.0, "euler"))
        )
    ]  # fmt: skip


def runner_of(model: ImageModel, kernels: ctypes.CDLL, **options: Any) -> Watching:
    return Watching(model, kernels=kernels, **options)


@pytest.mark.quick(0)
@pytest.mark.parametrize("shape", SHAPES)
def test_pictures_and_edits_equal_diffusers_and_do_not_depend_on_the_batch(shape: str, kernels: ctypes.CDLL) -> None:
    """With weights let go, but for what edits need; bits in any company are those of tests/pipeline/test_mixes.py."""
    edits = [
        test_edit.wanted(shape, seed=seed, strength=strength, masked=bool(seed % 2), picture=seed, scheduler=scheduler)
        for seed, (strength, scheduler) in enumerate(((0.4, None), (1.0, "euler-ancestral"), (0.7, "dpm++2m")))
    ]
    model(shape)  # which names it
    runner = runner_of(load(f"random:test-{shape}"), kernels, frugal=True, max_rows=64)
    pictures = together(runner, [*edits, *mixture(shape)])
    assert any({"3", "4"} < ride for ride in runner.companions), "a deterministic one rode with nobody"
    for one, picture in zip(edits, pictures[: len(edits)], strict=True):
        test_edit.check_parity(shape, one, picture)
        assert picture.png() == solo(runner, one).png()
    for one, picture in zip(mixture(shape), pictures[len(edits) :], strict=True):
        check_parity(shape, one, picture)
        assert (picture.fingerprint["executable"], picture.fingerprint["bucket"]) == ("kernels", None)
        # Prompts that are encoded in different batches may differ in their last bits.
        assert apart(picture, solo(runner, one)) <= (not one.deterministic)


def test_deterministic_bytes_do_not_depend_on_threads(kernels: ctypes.CDLL) -> None:
    one = ImageParameters("a red hat", 3, 32, 32, steps=4, deterministic=True)
    before, pixels = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            pixels.append(solo(runner_of(model("wide-heads"), kernels), one).image.tobytes())
    finally:
        torch.set_num_threads(before)
    assert len(set(pixels)) == 1


def test_a_model_that_the_kernels_do_not_know_is_refused(kernels: ctypes.CDLL) -> None:
    for options in ({"kernels": kernels}, {"fused": True}):
        with pytest.raises(ModelError, match="heads of width 8"):
            Watching(model("plain"), **options)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_int8(tmp_path_factory.mktemp("models"), SHAPES["wide-heads"], None)


def test_int8_is_picked_up_and_is_close_to_fp32(quantized: Path, kernels: ctypes.CDLL) -> None:
    one = mixture("wide-heads")[0]
    exact, eight = (
        solo(runner_of(load(str(quantized), precision=precision), kernels), one) for precision in ("fp32", "int8")
    )
    assert 25 < psnr(levels(exact), levels(eight)) < 99
    assert eight.fingerprint["precision"] == "int8"
    assert eight.fingerprint["weights"] != exact.fingerprint["weights"]


def test_int8_pixels_do_not_depend_on_the_batch(quantized: Path, kernels: ctypes.CDLL) -> None:
    """Also of a size that no level halves evenly."""
    runner, alone = (runner_of(load(str(quantized), precision="int8"), kernels) for _ in range(2))
    parameters = [one for one in mixture("wide-heads") if one.deterministic]
    parameters += [replace(one, width=40, height=24) for one in parameters]
    for one, picture in zip(parameters, together(runner, parameters), strict=True):
        assert picture.png() == solo(alone, one).png()


def test_int8_without_a_variant_says_what_makes_one_and_refuses_another_models(quantized: Path, tmp_path: Path) -> None:
    folder = str(tiny.save(tmp_path / "plain", SHAPES["wide-heads"], seed=1))
    for name, unet, told in (
        (folder, None, "diptych quantize"),
        (folder, tmp_path / "nowhere", "diptych quantize"),
        (tiny.TINY, None, "diptych quantize"),
        (folder, quantized / "unet-int8", "other weights"),
    ):
        with pytest.raises(ModelError, match=told):
            load(name, precision="int8", unet=unet)
