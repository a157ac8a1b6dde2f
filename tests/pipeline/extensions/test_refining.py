"""SDXL's refiner for the last steps: diffusers' denoising_end and denoising_start, alone and in mixed batches."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.errors import Invalid
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
from tests.core.tape import Tape
from tests.pipeline import worlds
from tests.pipeline.embeddings import runner_of as with_embeddings
from tests.pipeline.embeddings import write
from tests.pipeline.pixels.test_edit import hole, photograph
from tests.pipeline.refiners import SECOND, second
from tests.pipeline.worlds import Crank, Watching, levels, model, solo, stock, together

# Stock diffusers hands torch tensors to numpy in a way that numpy 2 complains about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

SHAPE = "refined"


@pytest.fixture(scope="module", autouse=True)
def shapes() -> None:
    worlds.MORE[SHAPE] = tiny.SDXLShape(heads=(1, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models") / "tiny-refiner"
    second(worlds.shape(SHAPE)).save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def refiner(folder: Path) -> ImageModel:
    return load(str(folder))


def wanted(start: float = 0.6, **options: Any) -> ImageParameters:
    refining = Refining(model="tiny-refiner", **{"from": start})
    return ImageParameters(**{"prompt": "a red cat", "seed": 1, "width": 32, "height": 32, "steps": 6, **options},
                           refiner=refining)  # fmt: skip


@functools.cache
def expected(one: ImageParameters) -> np.ndarray:
    """What diffusers' two pipelines make of it, [H, W, 3] in levels."""
    from tests.schedulers import replaced, scheduler

    assert one.refiner is not None
    base, then, name = stock(SHAPE), second(worlds.shape(SHAPE)), one.scheduler or "euler"
    own, generator = (base.scheduler, then.scheduler), torch.Generator().manual_seed(one.seed)
    given = {
        "negative_prompt": one.negative_prompt, "num_inference_steps": one.steps, "guidance_scale": one.guidance_scale,
        "generator": generator, "clip_skip": one.clip_skip,
    }  # fmt: skip
    try:
        base.scheduler, then.scheduler = (scheduler(one_.config, name, **replaced(one.schedule_type)) for one_ in own)
        latents = base(
            one.prompt, prompt_2=one.prompt_2, width=one.width, height=one.height, denoising_end=one.refiner.start,
            output_type="latent", **given,
        ).images  # fmt: skip
        made = then(one.prompt, image=latents, denoising_start=one.refiner.start, **given).images[0]
    finally:
        base.scheduler, then.scheduler = own
    return np.asarray(made).astype(int)


def mixture() -> list[ImageParameters]:
    """Every sampler, with and without guidance, of several sizes and shares."""
    shares, sizes = itertools.cycle((0.8, 0.5, 0.3)), itertools.cycle(((32, 32), (32, 32), (40, 24)))
    drawn = [
        wanted(next(shares), seed=seed, scheduler=name, guidance_scale=guidance, steps=5 + seed % 3, **_size(sizes))
        for seed, (name, guidance) in enumerate(itertools.product(samplers.SCHEDULERS, (1.0, 6.0)))
    ]
    return [
        *drawn, wanted(negative_prompt="fog", prompt_2="a moor"), wanted(schedule_type="karras"), wanted(clip_skip=1),
    ]  # fmt: skip


def _size(sizes: Any) -> dict[str, int]:
    width, height = next(sizes)
    return {"width": width, "height": height}


@pytest.mark.quick("kernels", "graphs")
@pytest.mark.parametrize("backend", ["torch", "kernels", "graphs"])
def test_pictures_are_diffusers_alone_and_among_others(backend: str, refiner: ImageModel, kernels: ctypes.CDLL) -> None:
    options: dict[str, Any] = {
        "torch": {}, "kernels": {"kernels": kernels}, "graphs": {"fused": True, "recorder": Tape()},
    }[backend]  # fmt: skip
    runner = Watching(model(SHAPE), refiner=refiner, max_rows=64, **options)
    crank, parameters = Crank(runner), mixture()
    if backend != "torch":  # samplers are the same code: both guidances, all shares and sizes
        parameters = [*parameters[:6], *parameters[-3:]]
    for index, one in enumerate(parameters):
        crank.submit(str(index), one)
        crank.submit(f"plain {index}", replace(one, refiner=None))
        crank.turn()
    pictures = crank.pictures()
    mixed = [{name.startswith("plain") for name, _ in ride} for phase, ride in runner.rides if phase == "deep"]
    assert {True, False} in mixed, "the first steps shared no forward with requests without a refiner"
    shared = [ride for phase, ride in runner.rides if phase == "deep" and len(ride) > 1]
    assert any(len({step for _, step in ride}) > 1 for ride in shared), "nobody shared a forward at another step"
    for index, one in enumerate(parameters):
        assert expected(one).std() > 5, "a flat picture would prove nothing"
        assert np.abs(levels(pictures[str(index)]) - expected(one)).max() <= 1, one
        assert np.abs(levels(pictures[f"plain {index}"]) - expected(one)).max() > 3, "the refiner made no difference"
    for one in parameters[::5]:
        assert np.abs(levels(solo(runner, one)) - expected(one)).max() <= 1
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
    runner = Watching(model(SHAPE), refiner=refiner, **({} if backend == "torch" else {"kernels": kernels}))
    one = wanted(deterministic=True, scheduler="euler-ancestral")
    others = [replace(one, seed=seed, refiner=one.refiner if seed % 2 else None) for seed in range(10, 14)]
    alone = solo(runner, one)
    assert together(runner, [*others, one])[-1].png() == alone.png()
    assert alone.parameters.to_dict()["refiner"] == {"model": "tiny-refiner", "from": 0.6}
    assert f"Refiner: tiny-refiner [{refiner.digest[:10]}], Refiner switch at: 0.6, " in alone.infotext


def test_what_it_holds_is_given_back(refiner: ImageModel) -> None:
    runner = Watching(model(SHAPE), refiner=refiner, memory_bytes=2**24)
    assert runner.holdings.size_bytes(wanted()) > runner.holdings.size_bytes(wanted(guidance_scale=1.0))
    assert runner.holdings.size_bytes(wanted()) > runner.holdings.size_bytes(replace(wanted(), refiner=None))
    solo(runner, wanted(guidance_interval=(0.0, 0.3)))
    assert runner.held() == 0 and runner.holdings.memory.take(2**24)


def test_what_cannot_be_refined_is_refused_by_field(refiner: ImageModel) -> None:
    runner = Watching(model(SHAPE), refiner=refiner)
    for one, said in (
        (wanted(0.01), r"^refiner\.from: 0\.01 of 6 steps leaves the model itself no step"),
        (wanted(0.999), r"^refiner\.from: 0\.999 of 6 steps leaves the refiner no step"),
        (
            replace(wanted(), edit=Edit(photograph(32).tobytes(), hole(32).tobytes(), 0.5, soft_mask=True)),
            "^refiner: is not supported together with soft_mask",
        ),
        (
            replace(wanted(0.4), edit=Edit(photograph(32).tobytes(), None, 0.5)),
            r"^refiner\.from: 0\.4 of 6 steps, of which this strength makes the last 3, leaves the model itself",
        ),
        (replace(wanted(), refiner=Refining(model="other")), r"^refiner\.model: is not offered .* it has tiny-refiner"),
        (replace(wanted(), refiner=Refining(model="../x")), r"^refiner\.model: must be a name"),
    ):
        with pytest.raises(Invalid, match=said):
            Crank(runner).submit("it", one)
    with pytest.raises(Invalid, match=r"^refiner: there is none"):
        Crank(Watching(model(SHAPE))).submit("it", wanted())


def test_it_is_named_as_its_folder_is(refiner: ImageModel) -> None:
    named = replace(refiner, name="SDXL refiner (0.9)")
    one = replace(wanted(), refiner=Refining(model="SDXL refiner (0.9)", **{"from": 0.6}))
    assert np.array_equal(
        levels(solo(Watching(model(SHAPE), refiner=named), one)),
        levels(solo(Watching(model(SHAPE), refiner=refiner), wanted())),
    )


def test_its_prompts_do_not_count_as_what_others_cost_to_encode(refiner: ImageModel) -> None:
    runner = Watching(model(SHAPE), refiner=refiner)
    curve = runner.backend.costs.curve(ENCODE, (0, 0), False)
    solo(runner, wanted())
    assert not curve.measured
    solo(runner, replace(wanted(prompt="a moor"), refiner=None))
    assert [*curve.measured] == [2]


def test_another_noise_schedule_is_refused(refiner: ImageModel) -> None:
    other = replace(refiner, scheduler_config={**refiner.scheduler_config, "timestep_spacing": "trailing"})
    with pytest.raises(Invalid, match=r"^refiner: tiny-refiner has other timesteps"):
        Crank(Watching(model(SHAPE), refiner=other)).submit("it", wanted())


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


def edited(folder: Path, where: Path, part: str, **changes: Any) -> Path:
    """A copy with another config of this part."""
    copy = shutil.copytree(folder, where / "copy")
    file = copy / part / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return copy


def test_parts_of_another_model_are_named(folder: Path, refiner: ImageModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="copy: not an SDXL refiner: unet projection_class_embeddings_input_dim"):
        tiny.save(tmp_path / "base", SECOND)
        copy = shutil.copytree(folder, tmp_path / "copy")
        shutil.rmtree(copy / "unet")
        shutil.copytree(tmp_path / "base" / "unet", copy / "unet")
        config = json.loads((copy / "unet" / "config.json").read_text())
        load(str(_narrow(copy, config)))
    scaled = edited(folder, tmp_path / "scaled", "vae", scaling_factor=0.5)
    with pytest.raises(ModelError, match=r"its VAE's scaling_factor is 0\.5, and that of test-refined is 0\.13025"):
        check_pair(load(str(scaled)), replace(model(SHAPE), name="test-refined"))


def _narrow(copy: Path, config: dict[str, Any]) -> Path:
    """A UNet whose attention fits the refiner's encoder, and whose size conditioning does not."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    told = {name: value for name, value in config.items() if not name.startswith("_")}
    UNet2DConditionModel(**{**told, "cross_attention_dim": SECOND.text_width}).save_pretrained(copy / "unet")
    return copy


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
    assert np.array_equal(levels(picture), levels(whole)) and picture.fingerprint == whole.fingerprint
    assert runner.held() == 0 and runner.holdings.memory.taken == 0
