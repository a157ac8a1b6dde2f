"""UNets of nine input channels: parity with diffusers' inpainting, alone, among others, on CPU kernels and in INT8."""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from contract.card import ImageOffer
from contract.errors import Invalid
from contract.image import ImageParameters
from contract.image_request import ImageRequest
from contract.plan import DeepCache
from pipeline.backends.phases import IMAGE, VAE
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.checkpoints.single_file import CheckpointOptions, convert
from pipeline.extensions import lora
from pipeline.quantization import quantized
from pipeline.sampling import samplers
from tests.pipeline import loras, worlds
from tests.pipeline.original_layout import checkpoint
from tests.pipeline.pixels.test_edit import check_parity, hole, stock_edit, wanted
from tests.pipeline.worlds import (
    Crank,
    Watching,
    apart,
    levels,
    model,
    options_of,
    shared_lane,
    solo,
    stock,
    together,
)  # fmt: skip

SHAPES = {
    "inpaint": tiny.SDXLShape(input_channels=9, heads=(1, 2), channels=(16, 32)),
    "inpaint-v": tiny.SDXLShape(
        input_channels=9, channels=(16, 32), heads=(1, 2), resnets=2, prediction_type="v_prediction",
        scheduler={"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
    ),
}  # fmt: skip


worlds.MORE.update(SHAPES)


def mixture(shape: str) -> list[ImageParameters]:
    """Every scheduler, with and without guidance, of several strengths."""
    strengths = itertools.cycle((1.0, 0.6, 0.85))
    return [
        wanted(shape, seed=seed, scheduler=name, guidance_scale=guidance, masked=True, strength=next(strengths),
               steps=5 + seed % 4, picture=seed)
        for seed, (name, guidance) in enumerate(itertools.product(samplers.SCHEDULERS, (1.0, 6.0)))
    ]  # fmt: skip


# Every sampler on torch; samplers and shapes do not depend on the backend.
@pytest.mark.parametrize(
    ("shape", "backend", "count"), [("inpaint", "torch", 12), ("inpaint", "kernels", 6), ("inpaint-v", "graphs", 6)]
)
def test_pictures_equal_diffusers_alone_and_among_others(
    shape: str, backend: str, count: int, kernels: ctypes.CDLL
) -> None:
    runner = Watching(model(shape), lane=shared_lane(), max_rows=64, **options_of(backend, kernels))
    edits = mixture(shape)[:count]
    pictures = together(runner, edits, lambda: 3)
    assert any(len(steps) > 1 for steps in runner.shared_steps), "nobody shared a forward with another step"
    for one, picture in zip(edits, pictures, strict=True):
        check_parity(shape, one, picture)
    for one in edits[::4]:
        check_parity(shape, one, solo(runner, one))


def test_deepcache_and_previews_take_it(kernels: ctypes.CDLL) -> None:
    one = wanted("inpaint", masked=True, steps=8, strength=1.0, deepcache=DeepCache(interval=2, depth="block"))
    on_torch, programs = (Watching(model("inpaint"), lane=shared_lane(), **more) for more in ({}, {"kernels": kernels}))
    found = solo(on_torch, replace(one, preview_every=2))
    assert apart(found, solo(programs, replace(one, preview_every=2))) <= 1
    assert apart(found, solo(on_torch, replace(one, deepcache=None))) > 1


def test_every_phase_is_prepared_and_timed(kernels: ctypes.CDLL) -> None:
    for options in ({}, {"kernels": kernels}):
        runner = Watching(model("inpaint"), lane=shared_lane(), **options)
        runner.prepare(measure_s=0.3)
        assert runner.backend.costs.measured()
        check_parity("inpaint", mixture("inpaint")[0], solo(runner, mixture("inpaint")[0]))


def test_companions_change_no_bit_of_a_deterministic_request() -> None:
    runner = Watching(model("inpaint"), lane=shared_lane())
    one = replace(mixture("inpaint")[3], deterministic=True)
    alone = solo(runner, one).png()
    others = [replace(one, seed=seed) for seed in range(10, 13)]
    assert together(runner, [*others, one], lambda: 3)[-1].png() == alone
    assert {phase for phase, _ in runner.rides} >= {IMAGE, VAE}


def test_a_request_that_is_no_inpainting_is_refused() -> None:
    crank = Crank(Watching(model("inpaint"), lane=shared_lane()))
    with pytest.raises(Invalid, match=r"^model: only inpaints"):
        crank.submit("it", replace(wanted("inpaint"), edit=None))
    with pytest.raises(Invalid, match=r"^mask: is missing"):
        crank.submit("it", wanted("inpaint"))
    runner = crank.runner
    offer = ImageOffer(runner.sizes, runner.schedulers, (32, 32), inpaint_only=True)
    fields = ImageRequest(prompt="a cat")
    with pytest.raises(Invalid, match=r"^model: only inpaints"):
        fields.complete(offer)
    with pytest.raises(Invalid, match=r"^mask: is missing"):
        fields.complete(offer, (32, 32))
    assert fields.complete(offer, (32, 32), masked=True).picture.edit is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kernels: ctypes.CDLL) -> Path:
    """An inpainting checkpoint of one file, converted with a base that does not inpaint, and its INT8 variant."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    where = tmp_path_factory.mktemp("models")
    base = tiny.save(where / "base", replace(SHAPES["inpaint"], input_channels=4), seed=5)
    save_file(checkpoint(stock("inpaint")), where / "mine.safetensors")
    found = convert(where / "mine.safetensors", where / "mine", CheckpointOptions(str(base)))
    quantized.make(
        load(str(found)), [f"a {colour} hat" for colour in ("red", "green", "blue", "old")], found, kernels=kernels
    )
    return found


def test_a_checkpoint_of_one_file_draws_what_diffusers_draws(folder: Path) -> None:
    from diffusers import StableDiffusionXLInpaintPipeline

    found = load(str(folder))
    assert found.inpaints and found.input_channels == 9
    assert '"StableDiffusionXLInpaintPipeline"' in (folder / "model_index.json").read_text()
    StableDiffusionXLInpaintPipeline.from_pretrained(folder)
    runner = Watching(found, lane=shared_lane())
    for one in mixture("inpaint")[:3]:
        check_parity("inpaint", one, solo(runner, one))


def test_a_lora_of_one_request_is_drawn_as_fused_weights(folder: Path, tmp_path: Path) -> None:
    """Beside a request without it, in one engine."""
    plain = load(str(folder))
    loras.write(plain, tmp_path, "ink")
    one = mixture("inpaint")[1]
    runner = Watching(plain, loras=tmp_path, lane=shared_lane())
    with_it, without = together(runner, [replace(one, lora="ink:0.7"), one])
    fused = Watching(load(str(folder), loras=lora.find("ink:0.7", str(tmp_path))), lane=shared_lane())
    assert apart(with_it, solo(fused, one)) <= 1 and apart(with_it, without) > 3
    check_parity("inpaint", one, without)


def test_a_base_that_inpaints_gives_a_plain_checkpoint_its_own_pipeline(folder: Path, tmp_path: Path) -> None:
    plain = tiny.make(replace(SHAPES["inpaint"], input_channels=4), seed=2)
    save_file(checkpoint(plain), tmp_path / "plain.safetensors")
    found = load(str(convert(tmp_path / "plain.safetensors", tmp_path / "plain", CheckpointOptions(str(folder)))))
    assert not found.inpaints and '"StableDiffusionXLPipeline"' in (tmp_path / "plain/model_index.json").read_text()
    assert torch.equal(found.denoiser.conv_in.weight, plain.unet.conv_in.weight)


def test_int8_is_near_fp32_and_does_not_depend_on_the_batch(folder: Path, kernels: ctypes.CDLL) -> None:
    int8 = load(str(folder), precision="int8")
    edits = [replace(one, guidance_scale=min(one.guidance_scale, 3.0)) for one in mixture("inpaint")]
    runner = Watching(int8, kernels=kernels, lane=shared_lane(), max_rows=64)
    errors, mask = [], hole(SHAPES["inpaint"].native) > 127
    for one, picture in zip(edits, together(runner, edits, lambda: 3), strict=True):
        assert apart(picture, solo(runner, one)) <= 1
        errors.append((levels(picture) - stock_edit("inpaint", one))[mask])
    psnr = 10 * math.log10(255**2 / np.mean(np.square(np.concatenate(errors))))
    assert psnr > 22, "dB under the mask; it was 24.3, and 22.3 for a UNet of four channels of this shape"
