"""Edits: parity with diffusers' image-to-image and inpainting, alone and among others; what is kept stays as it was."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from contract.errors import Invalid
from contract.image import Edit, ImageParameters
from contract.plan import DeepCache
from pipeline.backends.phases import IMAGE
from pipeline.pixels import edit
from pipeline.sampling import samplers, sigmas
from tests.pipeline import worlds
from tests.pipeline.worlds import (
    Crank,
    Watching,
    apart,
    levels,
    model,
    shared_lane,
    solo,
    stock,
    stock_options,
    stock_parts,
    together,
)  # fmt: skip


def photograph(side: int, seed: int = 0) -> Image.Image:
    """Something with large shapes and small ones."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def hole(side: int) -> np.ndarray:
    """A mask that is no multiple of a latent on any side, [H, W]: 128 or more where it is drawn anew, else an edge."""
    mask = np.zeros((side, side), dtype=np.uint8)
    mask[side // 4 + 3 : side - 5, 2 : side // 2 + 1] = 255
    mask[side // 4 + 3], mask[0] = mask[side // 4 + 3] // 255 * 128, 127  # by which diffusers draws the line
    mask[1] = np.arange(side) * 126 // side
    return mask


def wanted(
    shape: str = "plain", *, strength: float = 0.6, masked: bool = False, picture: int = 0, **options: Any
) -> ImageParameters:
    side = worlds.shape(shape).native
    mask = hole(side).tobytes() if masked else None
    edit = Edit(photograph(side, picture).tobytes(), mask, strength)
    given_options = {"prompt": "a red cat", "seed": 1, "width": side, "height": side, "steps": 6, **options}
    return ImageParameters(**given_options, edit=edit)


@functools.cache
def stock_edit(shape: str, one: ImageParameters) -> np.ndarray:
    """What diffusers makes of it, [H, W, 3] in levels."""
    return np.asarray(edited(shape, one)).astype(int)


def pipeline_of(shape: str, one: ImageParameters, kind: Any) -> Any:
    """A pipeline of diffusers of this kind, of the shape's parts and the request's scheduler."""
    from tests.schedulers import replaced, scheduler

    drawing = stock(shape)
    parts = stock_parts(shape)
    parts["scheduler"] = scheduler(drawing.scheduler.config, one.scheduler or "euler", **replaced(one.schedule_type))
    pipeline = kind(
        **parts, force_zeros_for_empty_prompt=drawing.config.force_zeros_for_empty_prompt, add_watermarker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def edited(shape: str, one: ImageParameters, **more: Any) -> Any:
    """What diffusers' pipeline gives for it, with `more` options."""
    from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLInpaintPipeline

    assert one.edit is not None
    kind = StableDiffusionXLImg2ImgPipeline if one.edit.mask is None else StableDiffusionXLInpaintPipeline
    options, size = stock_options(one), (one.width, one.height)
    options |= {"image": Image.frombytes("RGB", size, one.edit.image), "strength": one.edit.strength}
    if one.edit.mask is None:
        del options["width"], options["height"]
    else:
        options["mask_image"] = Image.frombytes("L", size, one.edit.mask)
    options |= {name: [*given] for name in ("timesteps", "sigmas") if (given := getattr(one, name)) is not None}
    return pipeline_of(shape, one, kind)(**options | more).images[0]


def check_parity(shape: str, one: ImageParameters, picture: Any) -> None:
    assert one.edit is not None
    expected = stock_edit(shape, one)
    assert expected.std() > 5, "a flat picture would prove nothing"
    assert apart(picture, with_kept(one, expected)) <= 1, one


def with_kept(one: ImageParameters, expected: np.ndarray) -> np.ndarray:
    """What diffusers made, with the kept pixels as they were: it gives back what its VAE makes of them. Below one half
    the mask is an edge, in which AUTOMATIC1111 puts the source over it, as opaque as twice the mask is short of 255.
    """
    if one.edit is None or one.edit.mask is None:
        return expected
    size = (one.width, one.height)
    source, mask = Image.frombytes("RGB", size, one.edit.image), Image.frombytes("L", size, one.edit.mask)
    source.putalpha(mask.point(lambda value: 255 - min(2 * value, 255)))
    made = Image.fromarray(expected.astype(np.uint8)).convert("RGBA")
    return np.asarray(Image.alpha_composite(made, source).convert("RGB")).astype(int)


def test_an_edge_is_blended_to_the_nearest_level() -> None:
    """Each value of a mask below one half, with pixels that a rounding up or down would change."""
    side, values = 128, np.arange(128, dtype=np.uint8)
    source, drawn = np.random.default_rng(0).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
    mask = np.repeat(values[:, None], side, axis=1)
    edit_ = Edit(source.tobytes(), mask.tobytes(), 0.5)
    parameters = ImageParameters(prompt="x", seed=1, width=side, height=side, steps=4, edit=edit_)
    shares = 2 * values.astype(int)[:, None, None]
    expected = np.rint((shares * drawn + (255 - shares) * source.astype(int)) / 255)
    assert np.array_equal(edit.finish(parameters, torch.from_numpy(drawn)).numpy(), expected)


def mixture() -> list[ImageParameters]:
    """Every scheduler, with and without guidance and mask, of several strengths: each pair of them."""
    strengths = itertools.cycle((0.3, 0.6, 1.0, 0.85, 0.5))
    every = [(name, *one) for name in samplers.SCHEDULERS for one in itertools.product((1.0, 6.0), (False, True))]
    cases = [case for index, case in enumerate(every) if (index // 4 + index // 2 + index) % 2]
    return [
        wanted(seed=seed, scheduler=name, guidance_scale=guidance, masked=masked, strength=next(strengths),
               steps=5 + seed % 4, picture=seed)
        for seed, (name, guidance, masked) in enumerate(cases)
    ]  # fmt: skip


def test_each_edit_equals_diffusers_alone_and_among_others() -> None:
    """Of other shapes see tests/pipeline/backends/test_programs.py."""
    runner = Watching(model("plain"), lane=shared_lane(), max_rows=64)
    edits, crank = mixture(), Crank(runner)
    for index, one in enumerate(edits):
        crank.submit(str(index), one)
        crank.submit(f"plain {index}", replace(one, edit=None))
        for _ in range(3):
            crank.turn()
    pictures = crank.pictures()
    mixed = [{name.startswith("plain") for name in ride} for ride in runner.companions]
    assert {True, False} in mixed, "no edit shared a forward with a request that is none"
    for index, one in enumerate(edits):
        check_parity("plain", one, pictures[str(index)])
    for one in edits[:: len(edits) // 4]:
        check_parity("plain", one, solo(runner, one))


def test_what_lies_beyond_a_picture_is_diffusers_inpainting_of_the_larger_one() -> None:
    """Of a size of its own, which no level of the UNet halves evenly."""
    small = np.asarray(photograph(24).crop((0, 0, 24, 16)))
    image = np.pad(small, ((0, 8), (11, 5), (0, 0)), mode="edge")  # 40×24
    mask = np.pad(np.zeros((16, 24), np.uint8), ((0, 8), (11, 5)), constant_values=255)
    one = wanted(width=40, height=24, guidance_scale=5.0)
    one = replace(one, edit=Edit(image.tobytes(), mask.tobytes(), 0.7))
    runner = Watching(model("plain"), lane=shared_lane())
    picture = solo(runner, one)
    check_parity("plain", one, picture)
    assert np.array_equal(levels(picture)[:16, 11:35], small.astype(int))


def test_companions_change_no_bit_of_a_deterministic_edit() -> None:
    """Its picture is encoded alone, in an iteration of its own."""
    runner = Watching(model("plain"), lane=shared_lane())
    edits = [
        wanted(seed=seed, deterministic=True, masked=seed > 1, picture=seed, scheduler="euler-ancestral")
        for seed in range(4)
    ]
    pictures = together(runner, [*edits, *(replace(one, edit=None) for one in edits)], lambda: 0)
    assert sorted(riders for phase, riders in runner.rides if phase == IMAGE) == [[(str(k), -1)] for k in range(4)]
    assert any(len(ride) > 2 for ride in runner.companions), "nobody shared a forward"
    for one, picture in list(zip(edits, pictures, strict=False))[::2]:
        assert picture.png() == solo(runner, one).png()


def test_what_fails_among_others_and_is_tried_again_draws_the_same() -> None:
    runner = Watching(model("plain"), lane=shared_lane())
    edits = {str(masked): wanted(masked=masked, scheduler="euler-ancestral") for masked in (False, True)}
    crank = Crank(runner)
    for name, one in edits.items():
        crank.submit(name, one)
    failed: set[str] = set()

    def once(batch: Any, ticket: Any) -> Any:
        phase = batch.requests[0].phase
        if phase in failed or len(batch.requests) < 2:
            return ticket
        failed.add(phase)
        return worlds.broken(batch, ticket)

    while crank.turn(once):
        pass
    assert failed >= {"deep", "vae"}
    for name, one in edits.items():
        assert apart(crank.ended[name].result, solo(runner, one)) <= 1


def test_deepcache_counts_the_steps_that_are_made() -> None:
    runner = Watching(model("three-levels"), lane=shared_lane())
    cached = DeepCache(interval=2, last=0)
    one = wanted("three-levels", steps=10, strength=0.5, deepcache=cached)
    assert (one.skipped, one.made) == (5, 5)
    crank = Crank(runner)
    crank.submit("it", one)
    crank.pictures()
    assert [phase for phase, _ in runner.rides] == [IMAGE, "encode", *["deep", "shallow"] * 2, "deep", "vae"]
    with pytest.raises(Invalid, match=r"deepcache"):
        crank.submit("no", replace(one, deepcache=DeepCache(deep_steps=(0, 7))))


@settings(max_examples=60, deadline=None)
@given(steps=st.integers(1, 60), strength=st.floats(0, 1), name=st.sampled_from(samplers.SCHEDULERS))
def test_a_cut_table_is_the_end_of_the_whole_one(steps: int, strength: float, name: str) -> None:
    config = model("plain").scheduler_config
    if name in ("lcm", "tcd"):
        steps = min(steps, 50)
    one = replace(wanted(strength=strength), steps=steps)
    if one.made < 1:
        return
    whole, cut = sigmas.table(config, name, steps), sigmas.table(config, name, steps, one.skipped)
    assert cut.steps == one.made == int(steps * strength) == len(cut.timesteps) == len(cut.noisy)
    assert torch.equal(cut.timesteps, whole.timesteps[one.skipped :])
    assert torch.equal(cut.levels, whole.levels[one.skipped :]) and cut.levels[-1].tolist() == [1, 0]
    # The second order needs a step before it, and the first that is made has none.
    later = cut.coefficients[1:]
    assert torch.equal(later, whole.coefficients[one.skipped + 1 :])
    assert (cut.coefficients[0, sigmas.COLUMNS.index("b_p")] == 0).all()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"strength": 0.1}, "strength"),
        ({"strength": float("nan")}, "strength"),
        ({"image": b"\0" * 7}, "image"),
        ({"mask": b"\0" * 7}, "mask"),
    ],
)
def test_an_edit_that_makes_no_sense_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    runner = Watching(model("plain"), lane=shared_lane())
    one = wanted(masked=True)
    assert one.edit is not None
    with pytest.raises(Invalid, match=f"^{field}: "):
        Crank(runner).submit("it", replace(one, edit=replace(one.edit, **change)))


def test_a_file_names_a_mask_by_its_hash_and_no_bytes_are_shown() -> None:
    masked = wanted(masked=True)
    assert len(masked.to_dict()["edit"]["mask"]) == 64 and wanted().to_dict()["edit"]["mask"] is None
    assert "\\x" not in repr(masked)
