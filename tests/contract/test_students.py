"""Few-step students: which configs and names are recognised, and what a request is given for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from contract import students
from contract.card import MAX_GUIDANCE, ImageDefaults, ImageOffer
from contract.errors import Invalid
from contract.image_request import ImageRequest
from tests.core.present import present

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
        ("my-turbo", {"_class_name": "LCMScheduler"}, "lcm", 4, 8),  # which says more than a name of another method
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
    found = present(students.of_model(name, scheduler, {"sample_size": 64}))
    assert (found.student, found.steps, found.most_steps, found.guidance_scale) == (method, steps, most, 1.0)
    assert found.rows(found.guidance_scale) == 1


def test_a_guidance_embedding_has_guidance_in_one_row() -> None:
    found = present(students.of_model("lcm-sdxl", LCM, {"time_cond_proj_dim": 256}))
    assert (found.student, found.guidance_scale) == ("lcm", 8.0)
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
    found = present(students.of_lora(name))
    assert (found.student, found.steps, found.scheduler, found.schedule_type) == (method, steps, scheduler, kind)


def test_hyper_sds_kinds_are_told_apart() -> None:
    """One LoRA for one to eight steps is TCD's; one UNet for one step begins at 800; others keep guidance."""
    unified, guided = students.of_lora("Hyper-SDXL-1step-lora"), students.of_lora("Hyper-SDXL-8steps-CFG-lora")
    assert unified is not None and (unified.eta, unified.most_steps) == (1.0, 8)
    assert guided is not None and guided.guidance_scale == 5.0 and guided.rows(5.0) == 2
    assert not students.warnings(ImageDefaults(), SAMPLERS, "Hyper-SDXL-8steps-CFG-lora", 8, 7.0)
    (told,) = students.warnings(ImageDefaults(), SAMPLERS, "Hyper-SDXL-8steps-CFG-lora", 20, 7.0)
    assert told.endswith("for up to 8 steps; this image had 20 steps")
    single = present(students.of_model("Hyper-SDXL-1step-Unet", BASE, {}))
    assert (single.steps, single.scheduler, single.timesteps) == (1, "lcm", (800,))


@pytest.mark.parametrize("name", ["ink", "hyperrealism", "hyper-detail", "lightning-bolts", "turbo-fan", "steps_xl"])
def test_styles_are_no_students(name: str) -> None:
    assert students.of_lora(name) is None


SAMPLERS = ("euler", "euler-ancestral", "lcm", "tcd")
LIGHTNING, DMD2, TCD_LORA = "sdxl_lightning_4step_lora", "dmd2_sdxl_4step_lora", "TCD-SDXL-LoRA"
TIMESTEPS = (999, 749, 499, 249)


def offer(defaults: ImageDefaults | None = None, **limits: Any) -> ImageOffer:
    loras = ("ink", DMD2, LIGHTNING, TCD_LORA)
    return ImageOffer([(64, 64)], SAMPLERS, (64, 64), loras=loras, defaults=defaults or ImageDefaults(), **limits)


def check_drawn(offered: ImageOffer, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare some fields of what a request becomes; None: it is not given."""
    found = ImageRequest(prompt="x", **fields).complete(offered).to_dict()
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("lora", "fields", "expected"),
    [
        (
            f"ink,{LIGHTNING}:0.9",
            {},
            {"steps": 4, "guidance_scale": 1.0, "scheduler": "euler", "schedule_type": "trailing"},
        ),
        (DMD2, {}, {"steps": 4, "timesteps": TIMESTEPS, "scheduler": "lcm"}),
        (TCD_LORA, {}, {"eta": 0.3}),
        *((lora, {}, {"steps": 20, "scheduler": None}) for lora in ("ink", f"{LIGHTNING}:-1", f"{LIGHTNING}:0")),
        # What a request says is kept.
        (DMD2, {"steps": 4}, {"timesteps": TIMESTEPS}),
        (TCD_LORA, {"eta": 0.5}, {"scheduler": "tcd", "eta": 0.5, "steps": 4}),
        (DMD2, {"steps": 3}, {"steps": 3, "timesteps": None, "scheduler": "lcm"}),
        (
            DMD2,
            {"scheduler": "euler", "guidance_scale": 2.0},
            {"steps": 4, "scheduler": "euler", "guidance_scale": 2.0, "timesteps": None},
        ),
        (DMD2, {"timesteps": [900, 300]}, {"steps": 2, "timesteps": (900, 300), "scheduler": None}),
        (DMD2, {"schedule_type": "karras"}, {"schedule_type": "karras", "scheduler": None, "steps": 4}),
    ],
)
def test_a_request_with_a_students_lora_is_drawn_as_its_authors_draw(
    lora: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    check_drawn(offer(), {"lora": lora, **fields}, expected)


def test_a_lora_that_is_not_there_is_refused() -> None:
    with pytest.raises(Invalid, match="lora: there is no LoRA hare"):
        ImageRequest(prompt="x", lora="hare").complete(offer())


def test_a_lora_whose_method_the_model_cannot_draw_says_nothing() -> None:
    flow = ImageOffer([(64, 64)], ("flow-euler",), (64, 64), loras=("z_turbo_8steps",))
    check_drawn(flow, {"lora": "z_turbo_8steps"}, {"steps": 20, "scheduler": None, "guidance_scale": 5.0})
    assert not students.warnings(ImageDefaults(), ("flow-euler",), "z_turbo_8steps", 30, 5.0)


def test_a_models_own_student_is_filled_in_within_the_limits() -> None:
    found, dmd2 = students.of_model("sdxl_lightning_8step", BASE, {}), students.of_lora("dmd2")
    check_drawn(offer(found), {}, {"schedule_type": "trailing", "steps": 8})
    check_drawn(offer(found, max_steps=5), {}, {"steps": 5})
    check_drawn(offer(dmd2, max_steps=3), {}, {"steps": 3, "timesteps": None})


def test_too_many_steps_and_guidance_are_told() -> None:
    student = present(students.of_lora(LIGHTNING))
    assert not students.warnings(student, SAMPLERS, "", 4, 1.0)
    assert not students.warnings(ImageDefaults(), SAMPLERS, "ink", 50, 7.0)
    assert students.warnings(student, SAMPLERS, "", 30, 5.0) == [
        "the model is a few-step student (lightning) for up to 4 steps without guidance; "
        "this image had 30 steps with guidance 5"
    ]
    (told,) = students.warnings(ImageDefaults(), SAMPLERS, "TCD-SDXL-LoRA:0.8", 20, 0.0)
    assert told.startswith("a LoRA of this request is a few-step student (tcd) for up to 8 steps without guidance")
    embedded = present(students.of_model("x", LCM, {"time_cond_proj_dim": 256}))
    assert students.warnings(embedded, SAMPLERS, "", 8, 12.0) == []
    assert students.warnings(replace(embedded, most_steps=4), SAMPLERS, "", 8, 12.0) == [
        "the model is a few-step student (lcm) for up to 4 steps; this image had 8 steps"
    ]
