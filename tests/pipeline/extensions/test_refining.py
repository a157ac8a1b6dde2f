"""SDXL's refiner for the last steps: diffusers' denoising_end and denoising_start, alone and in mixed batches."""

from __future__ import annotations

import ctypes
import functools
import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.image import Edit, ImageParameters
from contract.plan import DeepCache
from contract.refining import Refining
from pipeline.backends.phases import ENCODE
from pipeline.backends.torch_backend import TorchBackend
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import ImageModel, load
from pipeline.extensions import refining
from pipeline.extensions.refining import REFINER, check_pair
from pipeline.families.sdxl_refiner import FAMILY
from pipeline.sampling import samplers
from tests.pipeline import worlds
from tests.pipeline.damage import edit, rebuilt
from tests.pipeline.embeddings import runner_of as with_embeddings
from tests.pipeline.embeddings import write
from tests.pipeline.extensions.checks import refusal
from tests.pipeline.pixels.test_edit import hole, photograph, pipeline_of
from tests.pipeline.refiners import SECOND, load_second, refined
from tests.pipeline.worlds import Crank, Watching, apart, model, options_of, solo, stock_options, together

SHAPE = "refined"


@pytest.fixture(scope="module", autouse=True)
def shapes() -> None:
    worlds.MORE[SHAPE] = tiny.SDXLShape(heads=(1, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "tiny-refiner"


@pytest.fixture(scope="module")
def refiner(folder: Path) -> ImageModel:
    return load_second(folder, SHAPE)


def wanted(start: float = 0.6, **options: Any) -> ImageParameters:
    refining = Refining(model="tiny-refiner", **{"from": start})
    return ImageParameters(**{"prompt": "a red cat", "seed": 1, "width": 32, "height": 32, "steps": 6, **options},
                           refiner=refining)  # fmt: skip


@functools.cache
def expected(one: ImageParameters) -> np.ndarray:
    """What diffusers' two pipelines make of it, [H, W, 3] in levels."""
    from diffusers import StableDiffusionXLPipeline

    def first(**more: Any) -> Any:
        options = stock_options(one) | {"prompt_2": one.prompt_2, "clip_skip": one.clip_skip, **more}
        return pipeline_of(SHAPE, one, StableDiffusionXLPipeline)(**options).images[0]

    return refined(SHAPE, one, first)


def mixture() -> list[ImageParameters]:
    """Every sampler, with and without guidance, of several sizes and shares."""
    sizes = ((32, 32), (32, 32), (40, 24))
    drawn = [
        wanted(
            (0.8, 0.5, 0.3)[seed % 3], seed=seed, scheduler=name, guidance_scale=guidance, steps=5 + seed % 3,
            width=sizes[seed % 3][0], height=sizes[seed % 3][1],
        )
        for seed, (name, guidance) in enumerate(itertools.product(samplers.SCHEDULERS, (1.0, 6.0)))
    ]  # fmt: skip
    return [
        *drawn, wanted(negative_prompt="fog", prompt_2="a moor"), wanted(schedule_type="karras"), wanted(clip_skip=1),
    ]  # fmt: skip


@pytest.mark.quick("kernels", "graphs")
@pytest.mark.parametrize("backend", ["torch", "kernels", "graphs"])
def test_pictures_are_diffusers_alone_and_among_others(backend: str, refiner: ImageModel, kernels: ctypes.CDLL) -> None:
    runner = Watching(model(SHAPE), refiner=refiner, max_rows=64, **options_of(backend, kernels))
    crank, parameters = Crank(runner), mixture()
    if backend != "torch":  # samplers are the same code: both guidances, all shares and sizes
        parameters = [*parameters[:6], *parameters[-3:]]
    for index, one in enumerate(parameters):
        crank.submit(str(index), one)
        crank.submit(f"plain {index}", replace(one, refiner=None))
        crank.turn()
    pictures = crank.pictures()
    mixed = [{name.startswith("plain") for name in riders} for riders in runner.companions]
    assert {True, False} in mixed, "the first steps shared no forward with requests without a refiner"
    assert any(len(steps) > 1 for steps in runner.shared_steps), "nobody shared a forward at another step"
    for index, one in enumerate(parameters):
        assert apart(pictures[str(index)], expected(one)) <= 1, one
        assert apart(pictures[f"plain {index}"], expected(one)) > 3, "the refiner made no difference"
    for one in parameters[::5]:
        assert apart(solo(runner, one), expected(one)) <= 1
    runner.close()


@pytest.mark.parametrize("start", [0.3, 0.5, 0.8])
def test_estimates_know_which_steps_are_the_models_own(refiner: ImageModel, start: float) -> None:
    """Within one, whatever offset its timesteps have."""
    for steps in range(4, 31):
        one = wanted(start, steps=steps)
        _, at = refining.table(model(SHAPE), refiner, one, "euler")
        assert abs(one.own_steps - at) <= 1


def test_its_steps_are_a_group_of_their_own_and_count_as_its_cost(refiner: ImageModel) -> None:
    runner = Watching(model(SHAPE), refiner=refiner)
    crank = Crank(runner)
    request = crank.submit("it", wanted(0.6, guidance_interval=(0.0, 0.7), deepcache=DeepCache(2, "block")))
    seen: list[tuple[str, str, int]] = []
    while crank.turn():
        if request.work is not None and request.phase in ("deep", "shallow"):
            group = runner.group(request)
            seen.append((group.phase, group.backend, runner.rows(request)))
            assert runner.left_s(request, runner.rows(request)) == request.work.trajectory.left
    assert [backend for _, backend, _ in seen] == [""] * 3 + [REFINER] * 3
    assert [phase for phase, _, _ in seen] == ["deep", "shallow", "deep"] + ["deep"] * 3
    assert [rows for _, _, rows in seen] == [2, 2, 2, 2, 1, 1]
    assert crank.ended["it"].result.fingerprint["refiner"]["weights"] == refiner.digest


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_companions_change_no_bit_of_a_deterministic_picture(
    backend: str, refiner: ImageModel, kernels: ctypes.CDLL
) -> None:
    runner = Watching(model(SHAPE), refiner=refiner, **options_of(backend, kernels))
    one = wanted(deterministic=True, scheduler="euler-ancestral")
    others = [replace(one, seed=seed, refiner=one.refiner if seed % 2 else None) for seed in range(10, 14)]
    alone = solo(runner, one)
    assert together(runner, [*others, one])[-1].png() == alone.png()
    assert alone.parameters.to_dict()["refiner"] == {"model": "tiny-refiner", "from": 0.6}
    assert f"Refiner: tiny-refiner [{refiner.digest[:10]}], Refiner switch at: 0.6, " in alone.infotext


def test_what_it_holds_is_given_back(refiner: ImageModel) -> None:
    runner = Watching(model(SHAPE), refiner=refiner, memory_bytes=2**24)
    edit = Edit(photograph(32).tobytes(), hole(32).tobytes(), 0.9)
    plain, size_bytes = wanted(guidance_interval=(0.0, 0.3)), runner.holdings.size_bytes
    assert size_bytes(plain) > size_bytes(wanted(guidance_scale=1.0))
    assert size_bytes(replace(plain, edit=edit)) > size_bytes(plain) > size_bytes(replace(plain, refiner=None))
    for one in (plain, replace(plain, edit=edit)):
        solo(runner, one)
    assert runner.held() == 0 and runner.holdings.memory.take(2**24)


def test_what_cannot_be_refined_is_refused_by_field(refiner: ImageModel) -> None:
    runner = Watching(model(SHAPE), refiner=refiner)
    edit = Edit(photograph(32).tobytes(), None, 0.5)
    soft = replace(edit, mask=hole(32).tobytes(), soft_mask=True)
    for one, field, said in (
        (wanted(0.01), "refiner.from", "0.01 of 6 steps leaves the model itself no step"),
        (wanted(0.999), "refiner.from", "0.999 of 6 steps leaves the refiner no step"),
        (wanted(edit=soft), "refiner", "is not supported together with soft_mask"),
        (
            wanted(0.4, edit=edit), "refiner.from",
            "0.4 of 6 steps, of which this strength makes the last 3, leaves the model itself",
        ),
        (replace(wanted(), refiner=Refining(model="other")), "refiner.model", "it has tiny-refiner"),
        (replace(wanted(), refiner=Refining(model="../x")), "refiner.model", "must be a name"),
    ):  # fmt: skip
        error = refusal(runner, one)
        assert error.field == field and said in error.message, error
    error = refusal(Watching(model(SHAPE)), wanted())
    assert error.field == "refiner" and error.message.startswith("there is none")


def test_it_is_named_as_its_folder_is(refiner: ImageModel) -> None:
    name = "SDXL refiner (0.9)"
    one = replace(wanted(), refiner=Refining(model=name, **{"from": 0.6}))
    assert apart(solo(Watching(model(SHAPE), refiner=replace(refiner, name=name)), one), expected(wanted())) <= 1


def test_its_prompts_do_not_count_as_what_others_cost_to_encode(refiner: ImageModel) -> None:
    runner = Watching(model(SHAPE), refiner=refiner)
    curve = runner.backend.costs.curve(ENCODE, (0, 0), False)
    solo(runner, wanted())
    assert not curve.measured
    solo(runner, replace(wanted(prompt="a moor"), refiner=None))
    assert [*curve.measured] == [2]


def test_another_noise_schedule_is_refused(refiner: ImageModel) -> None:
    other = replace(refiner, scheduler_config={**refiner.scheduler_config, "timestep_spacing": "trailing"})
    assert "tiny-refiner has other timesteps" in refusal(Watching(model(SHAPE), refiner=other), wanted()).message


# -- its folder --------------------------------------------------------------------------------------------------------


def test_its_folder_is_known_by_the_missing_encoder(refiner: ImageModel) -> None:
    assert refiner.family is FAMILY and "text_encoder" not in refiner.parts
    check_pair(refiner, model(SHAPE))
    for one, base, said in (
        (model(SHAPE), model(SHAPE), "is no SDXL refiner"),
        (refiner, refiner, "is no SDXL that draws any"),
    ):
        with pytest.raises(ModelError, match=said):
            check_pair(one, base)


def test_parts_of_another_model_are_named(folder: Path, refiner: ImageModel, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    edit("vae/config.json", scaling_factor=0.5)(copy)
    with pytest.raises(ModelError, match=r"its VAE's scaling_factor is 0\.5, and that of test-refined is 0\.13025"):
        check_pair(load(str(copy)), replace(model(SHAPE), name="test-refined"))
    # Attention that fits the refiner's encoder, and a size conditioning that does not.
    rebuilt("unet", "UNet2DConditionModel", **SECOND.unet() | {"cross_attention_dim": SECOND.text_width})(copy)
    with pytest.raises(ModelError, match="copy: not an SDXL refiner: unet projection_class_embeddings_input_dim"):
        load(str(copy))


def test_admission_and_encoding_read_no_embedding_again(refiner: ImageModel, tmp_path: Path) -> None:
    """One that is damaged behind a request's check takes no slot with it."""
    base = model(SHAPE)
    path = write(base, tmp_path, "ink", 3, seed=1)
    runner = with_embeddings(base, tmp_path, refiner=TorchBackend(refiner))
    whole = solo(runner, wanted(prompt="a cat in ink"))
    crank = Crank(runner)
    crank.submit("it", wanted(prompt="a cat in ink"))
    path.write_bytes(b"none")
    picture = crank.pictures()["it"]
    assert apart(picture, whole) == 0 and picture.fingerprint == whole.fingerprint
    assert runner.held() == 0 and runner.holdings.memory.taken == 0
