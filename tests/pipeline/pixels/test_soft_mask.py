"""Soft masks: Differential Diffusion's rule as its authors published it, with diffusers' own parts."""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from contract.card import ImageOffer
from contract.errors import Invalid
from contract.image import Edit, ImageParameters
from contract.image_request import EditRequest
from pipeline.checkpoints import tiny
from pipeline.sampling import samplers
from pipeline.sampling.denoise import InpaintMask
from tests.pipeline import worlds
from tests.pipeline.pixels.test_edit import edited, photograph, pipeline_of
from tests.pipeline.worlds import Crank, Watching, apart, levels, model, options_of, solo, together

SHAPE, INPAINTS = "soft", "soft-inpaint"
SIDE = 32


worlds.MORE[SHAPE] = tiny.SDXLShape(heads=(1, 2))
worlds.MORE[INPAINTS] = tiny.SDXLShape(heads=(1, 2), input_channels=9)


def ramp() -> np.ndarray:
    """A mask of all values, [H, W]: rising from left to right, with a part of nothing and one of everything."""
    mask = np.tile(np.linspace(0, 255, SIDE).round().astype(np.uint8), (SIDE, 1))
    mask[:6], mask[-6:] = 0, 255
    return mask


def wanted(strength: float = 1.0, mask: np.ndarray | None = None, **options: Any) -> ImageParameters:
    mask = ramp() if mask is None else mask
    edit = Edit(photograph(SIDE).tobytes(), mask.tobytes(), strength, soft_mask=True)
    return ImageParameters(**{"prompt": "a red cat", "seed": 1, "width": SIDE, "height": SIDE, "steps": 6, **options},
                           edit=edit)  # fmt: skip


@functools.cache
def by_the_rule(one: ImageParameters) -> np.ndarray:
    """Image-to-image of diffusers, in which each step begins with the source put back where 1 - mask > i / n."""
    from diffusers import StableDiffusionXLImg2ImgPipeline

    assert one.edit is not None and one.edit.mask is not None
    pipeline = pipeline_of(SHAPE, one, StableDiffusionXLImg2ImgPipeline)
    source = Image.frombytes("RGB", (SIDE, SIDE), one.edit.image)
    generator = torch.Generator().manual_seed(one.seed)
    with torch.no_grad():
        found = pipeline.vae.encode(pipeline.image_processor.preprocess(source)).latent_dist.sample(generator)
    original = found * pipeline.vae.config.scaling_factor
    noise = torch.randn(original.shape, generator=generator)
    values = torch.from_numpy(np.frombuffer(one.edit.mask, np.uint8).reshape(1, 1, SIDE, SIDE).copy()).float() / 255
    kept = 1 - F.interpolate(values, size=original.shape[-2:], mode="area")

    def put_back(pipe: Any, i: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        following = i + 1
        if following < one.made:
            noisy = pipe.scheduler.add_noise(original, noise, pipe.scheduler.timesteps[one.skipped :][following:][:1])
            mask = (kept > torch.tensor(following / one.made)).float()
            tensors["latents"] = noisy * mask + tensors["latents"] * (1 - mask)
        return tensors

    made = edited(SHAPE, replace(one, edit=replace(one.edit, mask=None)), callback_on_step_end=put_back)
    own = np.frombuffer(one.edit.image, np.uint8).reshape(SIDE, SIDE, 3)
    return np.where(np.frombuffer(one.edit.mask, np.uint8).reshape(SIDE, SIDE, 1) > 0, np.asarray(made), own)


def check_parity(one: ImageParameters, picture: Any) -> None:
    expected = by_the_rule(one).astype(int)
    assert expected.std() > 5, "a flat picture would prove nothing"
    assert apart(picture, expected) <= 1, one
    kept = ramp() == 0
    assert np.array_equal(levels(picture)[kept], expected[kept])


def mixture() -> list[ImageParameters]:
    return [
        wanted((1.0, 0.7, 0.4)[seed % 3], scheduler=name, seed=seed, steps=5 + seed % 4, guidance_scale=guidance)
        for seed, (name, guidance) in enumerate(itertools.product(samplers.SCHEDULERS, (1.0, 6.0)))
    ]


@pytest.mark.quick("kernels")
@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_each_is_drawn_by_the_rule_alone_and_among_others(backend: str, kernels: ctypes.CDLL) -> None:
    runner = Watching(model(SHAPE), max_rows=64, **options_of(backend, kernels))
    edits = mixture()
    hard = [replace(one, edit=replace(one.edit, soft_mask=False)) for one in edits[:3] if one.edit is not None]
    pictures = together(runner, [*edits, *hard, *(replace(one, edit=None) for one in edits[:3])])
    assert any(len(ride) > 4 for ride in runner.companions), "nobody shared a forward"
    for one, picture in zip(edits, pictures, strict=False):
        check_parity(one, picture)
    for soft, one in zip(pictures, pictures[len(edits) :][:3], strict=False):
        assert apart(soft, one) > 10, "the mask's values made no difference"
    check_parity(edits[1], solo(runner, edits[1]))
    if backend == "kernels":
        one = replace(edits[1], deterministic=True)
        assert together(runner, [*edits[2:5], one])[-1].png() == solo(runner, one).png()


def test_the_more_the_mask_says_the_more_steps_are_drawn() -> None:
    """Each value's region is put back before as many steps as the rule says."""
    steps, values = 8, torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]).view(1, 1, 1, 5)
    kept = InpaintMask(values, torch.full((1, 1, 1, 5), 2.0), torch.zeros(1, 1, 1, 5), steps)
    drawn = sum((kept.put_back(torch.ones(1, 1, 1, 5), step, 1.0, 0.0) == 1).int() for step in range(steps + 1))
    assert torch.as_tensor(drawn).flatten().tolist() == [1, 3, 5, 7, 9]  # of steps 0 to 8, the last of which is none


def test_what_it_cannot_be_combined_with_is_refused() -> None:
    with pytest.raises(Invalid, match=r"^soft_mask: is not supported by this model, which"):
        Crank(Watching(model(INPAINTS))).submit("it", wanted())
    one = wanted()
    assert one.edit is not None
    with pytest.raises(Invalid, match=r"^soft_mask: needs a mask"):
        Crank(Watching(model(SHAPE))).submit("it", replace(one, edit=replace(one.edit, mask=None)))
    fields = EditRequest(prompt="a cat", soft_mask=True)
    for offer, masked, why in (
        (ImageOffer([(32, 32)], ("euler",), (32, 32)), False, "needs a mask"),
        (ImageOffer([(32, 32)], ("euler",), (32, 32), inpaint_only=True), True, "is not supported"),
    ):
        with pytest.raises(Invalid, match=f"^soft_mask: {why}"):
            fields.complete(offer, (32, 32), masked=masked)
