"""A refiner together with edits, controls and image prompts: diffusers' two pipelines, alone and in mixed batches."""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.image import Edit, ImageParameters
from contract.refining import Refining
from core.batching.batcher import Batch
from core.batching.runner import Ticket
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel
from pipeline.sampling import samplers
from tests.pipeline import worlds
from tests.pipeline.controls import control, controlled, controlnet
from tests.pipeline.controls import save as save_control
from tests.pipeline.extensions.checks import check_bits
from tests.pipeline.ip_adapters import encoder, prompt, prompted, save, state
from tests.pipeline.pixels.test_edit import edited, hole, photograph, with_kept
from tests.pipeline.refiners import load_second, refined
from tests.pipeline.worlds import Crank, Watching, apart, broken, levels, model, options_of, solo, together

SHAPE, SIDE = "refined beside", 32


@pytest.fixture(scope="module", autouse=True)
def shapes() -> None:
    worlds.MORE[SHAPE] = tiny.SDXLShape(heads=(1, 2))


@pytest.fixture(scope="module")
def refiner(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    return load_second(tmp_path_factory.mktemp("models") / "tiny-refiner", SHAPE)


def wanted(start: float = 0.7, **options: Any) -> ImageParameters:
    given = {"prompt": "a red cat", "seed": 1, "width": SIDE, "height": SIDE, "steps": 6, **options}
    return ImageParameters(**given, refiner=Refining(model="tiny-refiner", **{"from": start}))


def edit(strength: float = 0.9, *, masked: bool = False, picture: int = 0) -> Edit:
    return Edit(photograph(SIDE, picture).tobytes(), hole(SIDE).tobytes() if masked else None, strength)


@functools.cache
def expected_edit(one: ImageParameters) -> np.ndarray:
    return with_kept(one, refined(SHAPE, one, lambda **more: edited(SHAPE, one, **more)))


def check(one: ImageParameters, picture: Any) -> None:
    """An edit's parity."""
    assert apart(picture, expected_edit(one)) <= 1, one


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
    runner = Watching(model(SHAPE), refiner=refiner, max_rows=64, **options_of(backend, kernels))
    crank, parameters = Crank(runner), mixture()
    for index, one in enumerate(parameters):
        crank.submit(str(index), one)
        crank.submit(f"whole {index}", replace(one, refiner=None))
        crank.submit(f"plain {index}", replace(one, edit=None))
        crank.turn()
    pictures = crank.pictures()
    shared = [{name.split()[0] for name in riders} for riders in runner.companions]
    assert any({"whole", "plain"} <= kinds and len(kinds) > 2 for kinds in shared), "kinds did not share a forward"
    for index, one in enumerate(parameters):
        check(one, pictures[str(index)])
        assert apart(pictures[f"whole {index}"], pictures[str(index)]) > 3
    for index, one in enumerate(parameters[::4]):
        assert apart(solo(runner, one), pictures[str(4 * index)]) <= (backend == "torch")


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
    crank, failed = Crank(runner), list[Batch]()
    for name, one in edits.items():
        crank.submit(name, one)

    def once(batch: Batch, ticket: Ticket) -> Any:
        works = [request.work for request in batch.requests]
        if len(works) < 2 or batch.requests[0].phase != "deep" or works[0].step + 1 != works[0].refinement.at:
            return ticket
        failed.append(batch)
        return broken(batch, ticket)

    while crank.turn(once):
        pass
    assert len(failed) == 1
    for name, one in edits.items():
        check(one, crank.ended[name].result)


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
@pytest.mark.parametrize("backend", ["torch", "kernels", "layers"])
def test_controls_and_image_prompts_act_on_the_models_own_steps(
    backend: str, refiner: ImageModel, net: Any, folder: Path, kernels: ctypes.CDLL
) -> None:
    options = options_of(backend, kernels)
    runner = Watching(model(SHAPE), refiner=refiner, controls=folder / "controls", image_prompts=folder, **options)
    asked = beside()
    for one, picture in zip(asked, (check_bits if backend == "kernels" else together)(runner, asked), strict=True):
        if one.refiner is not None and one.added:
            expected = refined(SHAPE, one, lambda one=one, **more: first(net, folder, one, more))
            assert apart(picture, with_kept(one, expected)) <= 1, one


def first(net: Any, folder: Path, one: ImageParameters, more: dict[str, Any]) -> Any:
    if one.control:
        return controlled(SHAPE, (net,), one, **more)
    return prompted(SHAPE, folder, one, lambda pipeline: (pipeline, more))
