"""Few-step students: which configs and names are recognised, and what a request is given for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from contract import students
from contract.card import MAX_GUIDANCE, ImageDefaults, ImageOffer
from contract.errors import Invalid
from contract.image_request import ImageRequest

BASE: dict[str, Any] = {
    "_class_name": "EulerDiscreteScheduler", "prediction_type": "epsilon", "timestep_spacing": "leading",
}  # fmt: skip
TRAILING = {**BASE, "timestep_spacing": "trailing"}
ANCESTRAL = {**TRAILING, "_class_name": "EulerAncestralDiscreteScheduler"}  # as stabilityai/sdxl-turbo has it
LCM = {**BASE, "_class_name": "LCMScheduler"}
TCD = {**BASE, "_class_name": "TCDScheduler"}


@pytest.mark.parametrize(
    ("name", "scheduler", "method", "steps", "most"),
    [
        ("sdxl-turbo", ANCESTRAL, "turbo", 4, 4),
        ("my-sd-turbo", ANCESTRAL, "turbo", 4, 4),
        ("my-model", LCM, "lcm", 4, 8),
        ("sdxl-dmd2", LCM, "dmd2", 4, 4),
        ("my-model", TCD, "tcd", 4, 8),
        ("sdxl-lightning", TRAILING, "lightning", 4, 8),
        ("sdxl_lightning_8step", BASE, "lightning", 8, 8),
        ("Hyper-SDXL-2-steps", BASE, "hyper", 2, 2),
    ],
)
def test_students_are_recognised_by_their_configs(
    name: str, scheduler: dict[str, Any], method: str, steps: int, most: int
) -> None:
    found = students.of_model(name, scheduler, {"sample_size": 64})
    assert found is not None
    assert (found.student, found.steps, found.most_steps, found.guidance_scale) == (method, steps, most, 1.0)
    assert found.rows(found.guidance_scale) == 1


def test_a_models_own_scheduler_says_more_than_a_name_of_another_method() -> None:
    found = students.of_model("my-turbo", {"_class_name": "LCMScheduler"}, {})
    assert found is not None and (found.student, found.scheduler) == ("lcm", "lcm")
    kept = students.of_model("dmd2-4step", {"_class_name": "LCMScheduler"}, {})
    assert kept is not None and kept.student == "dmd2"


def test_a_guidance_embedding_has_guidance_in_one_row() -> None:
    found = students.of_model("lcm-sdxl", LCM, {"time_cond_proj_dim": 256})
    assert found is not None and (found.student, found.guidance_scale) == ("lcm", 8.0)
    assert found.rows(8.0) == found.rows(MAX_GUIDANCE) == 1


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("stable-diffusion-xl-base-1.0", BASE),
        ("turbo-fans-of-the-world", BASE),  # a word alone, of a model with an ordinary scheduler
        ("hyperrealism-xl", BASE),
        ("my-model", TRAILING),
        ("zero-snr-turbo", {**TRAILING, "prediction_type": "v_prediction"}),
        ("zero-snr-turbo", {**TRAILING, "rescale_betas_zero_snr": True}),
        ("first-steps", BASE),
        ("step-1-turbo", BASE),
        ("animagine-xl", ANCESTRAL),  # of 1024 pixels: its sampler alone says nothing
    ],
)
def test_ordinary_models_are_none(name: str, scheduler: dict[str, Any]) -> None:
    assert students.of_model(name, scheduler, {"time_cond_proj_dim": None, "sample_size": 128}) is None


@pytest.mark.parametrize(
    ("name", "method", "steps", "scheduler", "kind"),
    [
        ("lcm-lora-sdxl", "lcm", 4, "lcm", None),
        ("sdxl_lightning_4step_lora", "lightning", 4, "euler", "trailing"),
        ("sdxl_lightning_8step_lora", "lightning", 8, "euler", "trailing"),
        ("Hyper-SDXL-8steps-lora", "hyper", 8, "euler", "trailing"),
        ("TCD-SDXL-LoRA", "tcd", 4, "tcd", None),
        ("dmd2_sdxl_4step_lora", "dmd2", 4, "lcm", None),
        ("sd_xl_turbo_lora_v1", "turbo", 4, "euler-ancestral", "trailing"),
        ("Hyper-SD15-lora", "hyper", 4, "euler", "trailing"),
        ("Hyper-SDXL-1step-lora", "hyper", 4, "tcd", None),
    ],
)
def test_published_loras_are_recognised(name: str, method: str, steps: int, scheduler: str, kind: str | None) -> None:
    found = students.of_lora(name)
    assert found is not None
    assert (found.student, found.steps, found.scheduler, found.schedule_type) == (method, steps, scheduler, kind)


def test_hyper_sds_kinds_are_told_apart() -> None:
    """One LoRA for one to eight steps is TCD's; one UNet for one step begins at 800; others keep guidance."""
    unified, guided = students.of_lora("Hyper-SDXL-1step-lora"), students.of_lora("Hyper-SDXL-8steps-CFG-lora")
    assert unified is not None and (unified.eta, unified.most_steps) == (1.0, 8)
    assert guided is not None and guided.guidance_scale == 5.0 and guided.rows(5.0) == 2
    assert not students.warnings(ImageDefaults(), SAMPLERS, "Hyper-SDXL-8steps-CFG-lora", 8, 7.0)
    (told,) = students.warnings(ImageDefaults(), SAMPLERS, "Hyper-SDXL-8steps-CFG-lora", 20, 7.0)
    assert told.endswith("for up to 8 steps; this image had 20 steps")
    single = students.of_model("Hyper-SDXL-1step-Unet", BASE, {})
    assert single is not None and (single.steps, single.scheduler, single.timesteps) == (1, "lcm", (800,))


@pytest.mark.parametrize("name", ["ink", "hyperrealism", "hyper-detail", "lightning-bolts", "turbo-fan", "steps_xl"])
def test_styles_are_no_students(name: str) -> None:
    assert students.of_lora(name) is None


SAMPLERS = ("euler", "euler-ancestral", "lcm", "tcd")


def offer(defaults: ImageDefaults | None = None, **limits: Any) -> ImageOffer:
    names = ("ink", "dmd2_sdxl_4step_lora", "sdxl_lightning_4step_lora", "TCD-SDXL-LoRA")
    return ImageOffer([(64, 64)], SAMPLERS, (64, 64), loras=names, defaults=defaults or ImageDefaults(), **limits)


def asked(offered: ImageOffer, **fields: Any) -> dict[str, Any]:
    return ImageRequest(prompt="x", **fields).complete(offered).to_dict()


def test_a_request_with_a_students_lora_is_drawn_as_its_authors_draw() -> None:
    found = asked(offer(), lora="ink,sdxl_lightning_4step_lora:0.9")
    assert (found["steps"], found["guidance_scale"]) == (4, 1.0)
    assert (found["scheduler"], found["schedule_type"]) == ("euler", "trailing")
    found = asked(offer(), lora="dmd2_sdxl_4step_lora")
    assert (found["steps"], found["timesteps"], found["scheduler"]) == (4, (999, 749, 499, 249), "lcm")
    assert asked(offer(), lora="TCD-SDXL-LoRA")["eta"] == 0.3
    for lora in ("ink", "sdxl_lightning_4step_lora:-1", "sdxl_lightning_4step_lora:0"):
        assert (asked(offer(), lora=lora)["steps"], asked(offer(), lora=lora)["scheduler"]) == (20, None)


def test_what_a_request_says_is_kept() -> None:
    lora = "dmd2_sdxl_4step_lora"
    assert asked(offer(), lora=lora, steps=4)["timesteps"] == (999, 749, 499, 249)
    found = asked(offer(), lora="TCD-SDXL-LoRA", eta=0.5)
    assert (found["scheduler"], found["eta"], found["steps"]) == ("tcd", 0.5, 4)
    found = asked(offer(), lora=lora, steps=3)
    assert found["steps"] == 3 and "timesteps" not in found and found["scheduler"] == "lcm"
    found = asked(offer(), lora=lora, scheduler="euler", guidance_scale=2.0)
    assert (found["steps"], found["scheduler"], found["guidance_scale"]) == (4, "euler", 2.0)
    assert "timesteps" not in found
    found = asked(offer(), lora=lora, timesteps=[900, 300])
    assert (found["steps"], found["timesteps"], found["scheduler"]) == (2, (900, 300), None)
    found = asked(offer(), lora=lora, schedule_type="karras")
    assert (found["schedule_type"], found["scheduler"], found["steps"]) == ("karras", None, 4)
    with pytest.raises(Invalid, match="lora: there is no LoRA hare"):
        asked(offer(), lora="hare")


def test_a_lora_whose_method_the_model_cannot_draw_says_nothing() -> None:
    flow = ImageOffer([(64, 64)], ("flow-euler",), (64, 64), loras=("z_turbo_8steps",))
    found = asked(flow, lora="z_turbo_8steps")
    assert (found["steps"], found["scheduler"], found["guidance_scale"]) == (20, None, 5.0)
    assert not students.warnings(ImageDefaults(), ("flow-euler",), "z_turbo_8steps", 30, 5.0)


def test_a_models_own_student_is_filled_in_within_the_limits() -> None:
    found = students.of_model("sdxl_lightning_8step", BASE, {})
    assert found is not None
    assert asked(offer(found))["schedule_type"] == "trailing"
    assert asked(offer(found, max_steps=5))["steps"] == 5
    dmd2 = students.of_lora("dmd2")
    assert dmd2 is not None
    short = asked(offer(dmd2, max_steps=3))
    assert short["steps"] == 3 and "timesteps" not in short


def test_too_many_steps_and_guidance_are_told() -> None:
    student = students.of_lora("sdxl_lightning_4step_lora")
    assert student is not None
    assert (
        students.warnings(student, SAMPLERS, "", 4, 1.0)
        == []
        == students.warnings(ImageDefaults(), SAMPLERS, "ink", 50, 7.0)
    )
    assert students.warnings(student, SAMPLERS, "", 30, 5.0) == [
        "the model is a few-step student (lightning) for up to 4 steps without guidance; "
        "this image had 30 steps with guidance 5"
    ]
    (told,) = students.warnings(ImageDefaults(), SAMPLERS, "TCD-SDXL-LoRA:0.8", 20, 0.0)
    assert told.startswith("a LoRA of this request is a few-step student (tcd) for up to 8 steps without guidance")
    embedded = students.of_model("x", LCM, {"time_cond_proj_dim": 256})
    assert embedded is not None and students.warnings(embedded, SAMPLERS, "", 8, 12.0) == []
    assert students.warnings(replace(embedded, most_steps=4), SAMPLERS, "", 8, 12.0) == [
        "the model is a few-step student (lcm) for up to 4 steps; this image had 8 steps"
    ]
