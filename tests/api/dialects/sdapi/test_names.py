"""AUTOMATIC1111's names of samplers, schedules and models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from api.dialects.sdapi import names
from api.errors import ApiError
from contract import sampler_labels
from pipeline.sampling.samplers import SAMPLERS, SCHEDULERS
from tests.api.dialects.sdapi.studio import CARD

ALL = replace(CARD, schedulers=SCHEDULERS)
FLOW = replace(CARD, schedulers=("flow-euler",), default_scheduler="flow-euler")
# Of versions 1.5 to 1.10.
THEIRS = (
    "Euler", "Euler a", "LMS", "Heun", "DPM2", "DPM2 a", "DPM++ 2S a", "DPM++ 2M", "DPM++ SDE", "DPM++ 2M SDE",
    "DPM++ 2M SDE Heun", "DPM++ 3M SDE", "DPM fast", "DPM adaptive", "Restart", "DDIM", "DDIM CFG++", "PLMS", "UniPC",
    "LCM", "k_euler", "k_euler_a", "k_dpmpp_2m", "DPM++ 2M Karras", "DPM++ SDE Karras", "DPM++ 2S a Karras",
    "DPM2 a Karras", "LMS Karras", "DPM++ 2M SDE Exponential", "DPM++ 3M SDE Exponential", "k_dpmpp_2m_ka",
)  # fmt: skip


@pytest.mark.parametrize(
    ("sampler", "schedule", "expected"),
    [
        ("Euler a", None, ("euler-ancestral", None)), ("euler A", "Automatic", ("euler-ancestral", None)),
        ("DPM++ 2M", None, ("dpm++2m", "karras")), ("DPM++ 2M", "automatic", ("dpm++2m", "karras")),
        ("DPM++ 2M", "Uniform", ("dpm++2m", "linspace")), ("DPM++ 2M SDE", None, ("dpm++2m-sde", "exponential")),
        ("DPM++ 2M Karras", None, ("dpm++2m", "karras")), ("DPM++ 2M SDE Karras", "", ("dpm++2m-sde", "karras")),
        ("Euler", "SGM Uniform", ("euler", "trailing")), ("Euler", "sgm_uniform", ("euler", "trailing")),
        ("dpm++2m", None, ("dpm++2m", "karras")), ("LCM", None, ("lcm", None)), (None, None, (None, None)),
        (None, "Karras", (None, "karras")), ("k_dpmpp_2m_ka", None, ("dpm++2m", "karras")),
    ],
)  # fmt: skip
def test_what_is_the_same_here_is_taken_as_it_is(
    sampler: str | None, schedule: str | None, expected: tuple[str | None, str | None]
) -> None:
    fields, warnings = names.sampling(ALL, sampler, schedule)
    assert (fields.get("scheduler"), fields.get("schedule_type")) == expected
    assert warnings == []


@pytest.mark.parametrize("sampler", THEIRS)
@pytest.mark.parametrize("card", [ALL, CARD, FLOW])
def test_each_of_theirs_is_drawn_by_a_sampler_of_the_model_or_told(sampler: str, card: object) -> None:
    fields, warnings = names.sampling(card, sampler, None)  # type: ignore[arg-type]
    ran = fields.get("scheduler") or card.default_scheduler  # type: ignore[attr-defined]
    assert ran in card.schedulers  # type: ignore[attr-defined]
    assert fields.get("schedule_type") in (None, *SAMPLERS[ran].schedule_types)
    exact = any(sampler.lower().removesuffix(" karras").removesuffix(" exponential") in (t.lower(), *aliases)
                and ran in ours for t, (ours, aliases) in sampler_labels.SAMPLERS.items())  # fmt: skip
    assert exact or sampler == "k_dpmpp_2m_ka" or any("sampler_name" in warning for warning in warnings)


def test_a_curve_that_a_sampler_does_not_take_is_told() -> None:
    fields, warnings = names.sampling(ALL, "Euler a", "Karras")
    assert "schedule_type" not in fields and "does not take karras" in warnings[0]


@pytest.mark.parametrize(
    ("sampler", "schedule", "field"),
    [("Eulers", None, "scheduler"), ("DPM++ 9M", None, "scheduler"), ("Karras", None, "scheduler"),
     ("Euler", "fast", "schedule_type"), (None, "x" * 200, "schedule_type")],
)  # fmt: skip
def test_an_unknown_name_is_refused(sampler: str | None, schedule: str | None, field: str) -> None:
    with pytest.raises(ApiError) as caught:
        names.sampling(ALL, sampler, schedule)
    assert caught.value.param == field


def test_the_tables_agree_with_those_of_the_pipeline() -> None:
    for labels in (sampler_labels.NEAREST.values(), (same for same, _ in sampler_labels.SAMPLERS.values())):
        assert {scheduler for chain in labels for scheduler in chain} <= {*SAMPLERS}
    assert {label.lower() for label in sampler_labels.SAMPLERS} <= sampler_labels.NEAREST.keys()
    assert {scheduler for schedulers, _ in sampler_labels.SAMPLERS.values() for scheduler in schedulers} == {*SAMPLERS}


@pytest.mark.parametrize(
    "title", ["emoji-xl", "emoji-xl.safetensors", "emoji-xl [0123abcdef]", "emoji-xl.safetensors [31e35c80fc]",
              "sdxl/emoji-xl.ckpt", "sdxl\\emoji-xl.safetensors [31e35c80fc]"],
)  # fmt: skip
def test_a_title_names_a_model(title: str) -> None:
    assert "emoji-xl" in names.model_names(title)
