"""A refiner together with edits, controls and image prompts: diffusers' two pipelines, alone and in mixed batches."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from contract.image import Edit, ImageParameters
from contract.plan import AUTO
from contract.refining import Refining
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel, load
from pipeline.sampling import samplers
from tests.pipeline import worlds
from tests.pipeline.controls import control, controlled, controlnet
from tests.pipeline.controls import save as save_control
from tests.pipeline.ip_adapters import encoder, prompt, prompted, save, state
from tests.pipeline.pixels.test_edit import edited, hole, photograph, with_kept
from tests.pipeline.refiners import second
from tests.pipeline.worlds import Crank, Watching, levels, model, solo, together

# Stock diffusers hands torch tensors to numpy in a way that numpy 2 complains about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

SHAPE, SIDE = "refined beside", 32


@pytest.fixture(scope="module", autouse=True)
def shapes() -> None:
    worlds.MORE[SHAPE] = tiny.SDXLShape(heads=(1, 2))


@pytest.fixture(scope="module")
def refiner(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    where = tmp_path_factory.mktemp("models") / "tiny-refiner"
    second(worlds.shape(SHAPE)).save_pretrained(where)
    return load(str(where))


def wanted(start: float = 0.7, **options: Any) -> ImageParameters:
    given = {"prompt": "a red cat", "seed": 1, "width": SIDE, "height": SIDE, "steps": 6, **options}
    return ImageParameters(**given, refiner=Refining(model="tiny-refiner", **{"from": start}))


def edit(strength: float = 0.9, *, masked: bool = False, picture: int = 0) -> Edit:
    return Edit(photograph(SIDE, picture).tobytes(), hole(SIDE).tobytes() if masked else None, strength)


def expected(one: ImageParameters, first: Callable[..., Any]) -> np.ndarray:
    """What diffusers' refiner makes of what its `first` pipeline gives, [H, W, 3] in levels."""
    from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLInpaintPipeline

    from tests.schedulers import scheduler

    assert one.refiner is not None
    generator, then = torch.Generator().manual_seed(one.seed), second(worlds.shape(SHAPE))
    latents = first(denoising_end=one.refiner.start, output_type="latent", generator=generator)[None]
    masked = one.edit is not None and one.edit.mask is not None
    parts = {**then.components, "scheduler": scheduler(then.scheduler.config, one.scheduler or "euler")}
    kept = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "unet", "scheduler")
    kind = StableDiffusionXLInpaintPipeline if masked else StableDiffusionXLImg2ImgPipeline
    pipeline = kind(
        **{name: parts[name] for name in kept}, requires_aesthetics_score=True, force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {}
    if one.edit is not None and one.edit.mask is not None:
        mask = Image.frombytes("L", (one.width, one.height), one.edit.mask)
        options = {"mask_image": mask, "width": one.width, "height": one.height}
    made = pipeline(
        one.prompt, image=latents, denoising_start=one.refiner.start, negative_prompt=one.negative_prompt,
        num_inference_steps=one.steps, guidance_scale=one.guidance_scale, generator=generator, **options,
    ).images[0]  # fmt: skip
    found = np.asarray(made).astype(int)
    assert found.std() > 5, "a flat picture would prove nothing"
    return with_kept(one, found)


@functools.cache
def expected_edit(one: ImageParameters) -> np.ndarray:
    return expected(one, lambda **more: edited(SHAPE, one, **more))


def check(one: ImageParameters, picture: Any) -> None:
    """An edit's parity."""
    assert np.abs(levels(picture) - expected_edit(one)).max() <= 1, one


def mixture() -> list[ImageParameters]:
    """Edits by every sampler, with and without a mask and guidance, of several strengths and shares."""
    strengths, shares = itertools.cycle((1.0, 0.8, 0.95)), itertools.cycle((0.75, 0.6))
    return [
        wanted(next(shares), seed=seed, scheduler=name, guidance_scale=(1.0, 6.0)[seed % 4 < 2], steps=6 + seed % 3,
               edit=edit(next(strengths), masked=masked, picture=seed))
        for seed, (name, masked) in enumerate(itertools.product(samplers.SCHEDULERS, (False, True)))
    ]  # fmt: skip


@pytest.mark.quick("kernels")
@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_edits_are_diffusers_alone_and_among_others(backend: str, refiner: ImageModel, kernels: ctypes.CDLL) -> None:
    options = {} if backend == "torch" else {"kernels": kernels}
    runner = Watching(model(SHAPE), refiner=refiner, max_rows=64, **options)
    crank, parameters = Crank(runner), mixture()
    for index, one in enumerate(parameters):
        crank.submit(str(index), one)
        crank.submit(f"whole {index}", replace(one, refiner=None))
        crank.submit(f"plain {index}", replace(one, edit=None))
        crank.turn()
    pictures = crank.pictures()
    shared = [{name.split()[0] for name, _ in ride} for phase, ride in runner.rides if phase == "deep"]
    assert any({"whole", "plain"} <= kinds and len(kinds) > 2 for kinds in shared), "kinds did not share a forward"
    for index, one in enumerate(parameters):
        check(one, pictures[str(index)])
        assert np.abs(levels(pictures[f"whole {index}"]) - levels(pictures[str(index)])).max() > 3
    for one in parameters[::4]:
        alone = levels(solo(runner, one))
        assert np.abs(alone - levels(pictures[str(parameters.index(one))])).max() <= (backend == "torch")


def test_what_lies_beyond_a_picture_is_refined(refiner: ImageModel) -> None:
    """Outpainting, of a size that no level of the UNet halves evenly."""
    image = np.pad(np.asarray(photograph(24))[:16], ((0, 8), (11, 5), (0, 0)), mode="edge")  # 40×24
    mask = np.pad(np.zeros((16, 24), np.uint8), ((0, 8), (11, 5)), constant_values=255)
    one = wanted(width=40, height=24, edit=Edit(image.tobytes(), mask.tobytes(), 1.0))
    picture = solo(Watching(model(SHAPE), refiner=refiner), one)
    check(one, picture)
    assert np.array_equal(levels(picture)[:16, 11:35], image[:16, 11:35].astype(int))


@pytest.mark.parametrize("masked", [False, True])
def test_companions_change_no_bit_of_a_deterministic_edit(masked: bool, refiner: ImageModel) -> None:
    runner = Watching(model(SHAPE), refiner=refiner)
    one = wanted(deterministic=True, scheduler="euler-ancestral", edit=edit(masked=masked))
    others = [replace(one, seed=seed, edit=edit(masked=seed % 2 == 0, picture=seed)) for seed in range(2, 6)]
    assert together(runner, [*others, one])[-1].png() == solo(runner, one).png()


def test_a_handing_over_that_fails_among_others_draws_the_same_again(refiner: ImageModel) -> None:
    runner = Watching(model(SHAPE), refiner=refiner)
    edits = {str(seed): wanted(seed=seed, scheduler="euler-ancestral", edit=edit(masked=True)) for seed in range(2)}
    crank = Crank(runner)
    for name, one in edits.items():
        crank.submit(name, one)
    broken = 0

    class Broken:
        def outcome(self) -> Any:
            raise RuntimeError("this once")

    def once(batch: Any, ticket: Any) -> Any:
        nonlocal broken
        works = [request.work for request in batch.requests]
        if len(works) < 2 or batch.requests[0].phase != "deep" or works[0].step + 1 != works[0].refinement.at:
            return ticket
        worlds.await_end(ticket)
        broken += 1
        return Broken()

    while crank.turn(once):
        pass
    assert broken == 1
    for name, one in edits.items():
        check(one, crank.ended[name].result)


def test_what_an_edit_holds_is_given_back(refiner: ImageModel) -> None:
    runner = Watching(model(SHAPE), refiner=refiner, memory_bytes=2**24)
    one = wanted(edit=edit(masked=True))
    assert runner.holdings.size_bytes(one) > runner.holdings.size_bytes(replace(one, edit=None))
    solo(runner, one)
    assert runner.held() == 0 and runner.holdings.memory.take(2**24)


# -- what acts on the model's own steps --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def net() -> Any:
    return controlnet(model(SHAPE))


@pytest.fixture(scope="module")
def folder(net: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A control network, and an IP-Adapter with its encoder."""
    where = tmp_path_factory.mktemp("beside")
    save_control(net, where / "controls", "edges")
    encoder(where)
    save(state(model(SHAPE), plus=False), where, "base")
    return where


def beside() -> list[ImageParameters]:
    """With controls, also of an edit and in a window of all steps, and with image prompts."""
    edges = control("edges", SIDE)
    return [
        wanted(seed=1, control=(edges,)),
        wanted(seed=2, control=(replace(edges, strength=0.6, start=0.2, end=0.9),), steps=8, guidance_scale=1.0),
        wanted(seed=3, control=(edges,), edit=edit(masked=True)),
        wanted(seed=4, image_prompts=(prompt("base"),)),
        wanted(seed=5),
        replace(wanted(seed=6, control=(edges,)), refiner=None),
    ]


@pytest.mark.quick("torch", "kernels")
@pytest.mark.parametrize("backend", ["torch", "kernels", "graphs"])
def test_controls_and_image_prompts_act_on_the_models_own_steps(
    backend: str, refiner: ImageModel, net: Any, folder: Path, kernels: ctypes.CDLL
) -> None:
    options = {"torch": {}, "kernels": {"kernels": kernels}, "graphs": {"fused": True}}[backend]
    runner = Watching(model(SHAPE), refiner=refiner, controls=folder / "controls", image_prompts=folder, **options)
    asked = beside()
    for one, picture in zip(asked, together(runner, asked), strict=True):
        if backend == "kernels":
            assert np.array_equal(levels(picture), levels(solo(runner, one)))
        if one.refiner is None or not one.added:
            continue
        assert np.abs(levels(picture) - expected(one, lambda one=one, **more: first(net, folder, one, more))).max() <= 1


def first(net: Any, folder: Path, one: ImageParameters, more: dict[str, Any]) -> Any:
    if one.control:
        return controlled(SHAPE, (net,), one, **more)
    return prompted(SHAPE, folder, one, lambda pipeline: (pipeline, more))


@pytest.mark.long
def test_deterministic_ones_keep_their_bits_on_torch(refiner: ImageModel, folder: Path) -> None:
    runner = Watching(model(SHAPE), refiner=refiner, controls=folder / "controls", image_prompts=folder)
    asked = [replace(one, deterministic=True, deepcache=AUTO) for one in beside()]
    for one, picture in zip(asked, together(runner, asked), strict=True):
        assert np.array_equal(levels(picture), levels(solo(runner, one)))
