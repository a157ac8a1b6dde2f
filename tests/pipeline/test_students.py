"""Few-step students: drawn as their authors draw them, quantized over their own steps, and asked for too much."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, EulerDiscreteScheduler, LCMScheduler, TCDScheduler

from contract import students
from contract.image import ImageParameters
from pipeline.backends.phases import on_torch
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel, defaults_of, load
from pipeline.drawing import Denoiser
from pipeline.families import sdxl
from pipeline.pixels.vae import decode
from pipeline.quantization import variant_cache
from pipeline.quantization.calibration import settings_of
from tests.pipeline.worlds import Watching, apart, levels, solo, together
from workers.images.cards import image_card

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "turbo": (EulerAncestralDiscreteScheduler, {"timestep_spacing": "trailing"}),
    "lcm": (LCMScheduler, {}),
    "tcd": (TCDScheduler, {}),
    "sdxl_lightning_2step": (EulerDiscreteScheduler, {}),
    "sdxl-dmd2": (LCMScheduler, {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of one model with the schedulers of students."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    pipeline = tiny.make(tiny.SHAPES[tiny.TINY])
    made = {}
    for name, (scheduler, settings) in KINDS.items():
        pipeline.scheduler = scheduler.from_config(EulerDiscreteScheduler(**SAMPLING).config, **settings)
        made[name] = tmp_path_factory.mktemp("models") / name
        pipeline.save_pretrained(made[name])
    return made


SAMPLING = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1,
            "timestep_spacing": "leading"}  # fmt: skip


def usual(model: ImageModel, **given: Any) -> ImageParameters:
    """A request that leaves the model's defaults."""
    fields = students.fill(given, model.defaults)
    return ImageParameters("a red cat", 7, model.native, model.native, **fields)


@pytest.mark.quick("turbo", "lcm")
@pytest.mark.parametrize("name", KINDS)
def test_its_defaults_are_its_authors_and_its_picture_diffusers(folders: dict[str, Path], name: str) -> None:
    model = load(str(folders[name]))
    defaults = model.defaults
    assert (defaults.student or "none") in name and defaults == defaults_of(str(folders[name]))
    runner = Watching(model)
    picture = solo(runner, usual(model))
    card = image_card(runner)
    assert card.defaults == defaults and card.offer.defaults == defaults
    runner.close()
    settings = KINDS[name][1] | ({"timestep_spacing": "trailing"} if defaults.schedule_type else {})
    scheduler = KINDS[name][0].from_config(model.scheduler_config, **settings)
    given: dict[str, Any] = {"num_inference_steps": 2 if name.endswith("2step") else 4}
    given |= {} if defaults.timesteps is None else {"timesteps": [*defaults.timesteps]}
    given |= {"eta": 0.3} if name == "tcd" else {}
    pipeline = tiny.make(tiny.SHAPES[tiny.TINY])
    pipeline.scheduler = scheduler
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline("a red cat", guidance_scale=0.0, generator=torch.Generator().manual_seed(7), **given).images[0]
    expected = np.asarray(image).astype(int)
    assert expected.std() > 10 and apart(picture, expected) <= 1


def test_students_and_full_models_requests_share_forwards_and_stay_as_alone(folders: dict[str, Path]) -> None:
    model = load(str(folders["turbo"]))
    runner = Watching(model)
    full = {"steps": 9, "guidance_scale": 6.0}
    wanted = [usual(model), usual(model, **full, scheduler="euler"), usual(model, steps=1), usual(model, **full)]
    wanted = [replace(one, seed=seed) for seed, one in enumerate(wanted)]
    pictures = together(runner, wanted, lambda: 0)
    assert {"0", "1", "2", "3"} in runner.companions and {"1", "3"} in runner.companions
    assert all(apart(picture, solo(runner, one)) <= 1 for picture, one in zip(pictures, wanted, strict=True))
    told = [picture.warnings for picture in pictures]
    assert told[0] == told[2] == () and [len(told[1]), len(told[3])] == [1, 1]
    assert "few-step student (turbo) for up to 4 steps without guidance; this image had 9 steps" in told[1][0]
    runner.close()


@pytest.mark.parametrize(("name", "steps"), [("sdxl_lightning_2step", 2), ("sdxl-dmd2", 4), ("turbo", 4)])
def test_calibration_draws_as_the_student_is_drawn(
    folders: dict[str, Path], tmp_path: Path, name: str, steps: int
) -> None:
    model = load(str(folders[name]))
    settings = settings_of(model.family, model.defaults)
    assert (settings.steps, settings.watched_steps, settings.guidance) == (steps, steps, 1.0)
    latents = Denoiser(model, on_torch(model).denoiser, guidance=1.0, steps=steps).latents(["a red cat"], [7])
    runner = Watching(model)
    expected = levels(solo(runner, usual(model)))
    runner.close()
    assert (decode(model, latents)[0].int() - torch.from_numpy(expected)).abs().max() <= 1
    own, full = (
        variant_cache.find(tmp_path, "x", sdxl.FAMILY, "int8", "fp32", given) for given in (model.defaults, None)
    )
    assert own.folder != full.folder
    assert full.folder == variant_cache.find(tmp_path, "x", sdxl.FAMILY, "int8", "fp32", sdxl.FAMILY.defaults).folder


def test_a_lora_in_the_weights_makes_a_student(tmp_path: Path, folders: dict[str, Path]) -> None:
    full = shutil.copytree(folders["sdxl_lightning_2step"], tmp_path / "base")
    assert not defaults_of(str(full)).student
    assert defaults_of(str(full), loras="lcm-lora-sdxl:0.9").student == "lcm"
    assert not defaults_of(str(full), loras="lcm-lora-sdxl:0,dmd2_sdxl_4step_lora:-1").student
    # A family is given no sampler that it lacks.
    assert defaults_of("random:tiny-z") == load("random:tiny-z").defaults
