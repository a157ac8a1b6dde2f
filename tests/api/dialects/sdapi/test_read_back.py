"""What a picture's parameters say makes the request that drew it, whatever its sampler, noise schedule and prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from api import schemas
from api.dialects.sdapi import infotext as texts
from api.dialects.sdapi import requests, translation
from api.dialects.sdapi.requests import Txt2Img
from api.errors import ApiError
from contract import prompts
from contract.card import ImageCard, SizeRange
from contract.image import ImageParameters
from contract.image_request import ImageRequest
from contract.sampler_labels import SCHEDULE_TYPES
from contract.schedule import CURVES, SPACINGS, TYPES
from pipeline.pixels.infotext import infotext
from pipeline.sampling import samplers, sigmas
from tests.api.dialects.sdapi import studio
from tests.api.dialects.sdapi.studio import FINGERPRINT
from tests.pipeline.worlds import Watching, apart, model, solo

CARD = replace(studio.CARD, size_range=SizeRange(8, 8, 256, 256 * 256))
BETAS = {
    "num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon", "steps_offset": 1,
}  # fmt: skip
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
EDM = {"_class_name": "EDMEulerScheduler", "sigma_schedule": "karras", "prediction_type": "epsilon"}
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"spaced {spacing}": {**BETAS, "timestep_spacing": spacing} for spacing in SPACINGS},
    **{f"by {curve}": {**BETAS, f"use_{curve}_sigmas": True} for curve in CURVES},
    "of its class": BETAS,
    "by defaults": {**BETAS, "timestep_spacing": "trailing", "_use_default_values": ["timestep_spacing"]},
    "by zero SNR": {**BETAS, "prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
}  # fmt: skip
COMBINATIONS = [
    (config, name, schedule_type)
    for config, name in product(CONFIGS, samplers.SCHEDULERS)
    for schedule_type in (None, *SCHEDULE_TYPES.get(name, ()))
] + [(kind, name, type_) for kind, name in (("flow", "flow-euler"), ("edm", "edm-euler"))
     for type_ in (None, *SCHEDULE_TYPES.get(name, ()))]  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    return {"flow": FLOW, "edm": EDM}.get(name) or {"_class_name": "EulerDiscreteScheduler", **CONFIGS[name]}


def drawn(**fields: Any) -> ImageParameters:
    return ImageParameters(**{"prompt": "a cat", "seed": 7, "width": 64, "height": 48, "steps": 12, **fields})


def written(parameters: ImageParameters, config: dict[str, Any], sampler: str) -> str:
    own = samplers.schedule_type(config, sampler, parameters.schedule)
    return infotext(parameters, sampler, FINGERPRINT, own)


def read_back(text: str, card: ImageCard = CARD) -> tuple[ImageParameters, list[str]]:
    """The request that a client of the web UI's API makes of the parameters of a picture, and its warnings."""
    said = texts.parse(text)
    width, _, height = said["Size"].partition("x")
    options = {"CLIP_stop_at_last_layers": said.get("Clip skip"), "sd_vae": said.get("VAE")}
    body = requests.parse(Txt2Img, {
        "prompt": said["Prompt"], "negative_prompt": said["Negative prompt"], "steps": said["Steps"],
        "cfg_scale": said["CFG scale"], "seed": said["Seed"], "width": width, "height": height,
        "sampler_name": said["Sampler"], "scheduler": said.get("Schedule type"), "eta": said.get("Eta"),
        "override_settings": {name: value for name, value in options.items() if value is not None},
    })  # fmt: skip
    result = translation.translate(body, translation.options_of({}, body), card, lambda *_: pytest.fail("a picture"))
    job = schemas.read(ImageRequest, result.fields).complete(card.offer)
    return replace(job.picture, preview_every=0, deepcache=None), result.warnings


def card_of(names: tuple[str, ...]) -> ImageCard:
    return replace(CARD, schedulers=names, default_scheduler=names[0])


@pytest.mark.parametrize(("config", "sampler", "schedule_type"), COMBINATIONS)
def test_every_sampler_takes_the_same_steps_again(config: str, sampler: str, schedule_type: str | None) -> None:
    settings, card = config_of(config), card_of((sampler,) if config not in CONFIGS else samplers.SCHEDULERS)
    asked = drawn(scheduler=sampler, schedule_type=schedule_type)
    expected = sigmas.table(settings, sampler, asked.steps, schedule=asked.schedule)
    again, warnings = read_back(written(asked, settings, sampler), card)
    assert not warnings and again.scheduler == sampler
    found = sigmas.table(settings, sampler, again.steps, schedule=again.schedule)
    assert found.coefficients.equal(expected.coefficients) and found.timesteps.equal(expected.timesteps)
    assert found.init_noise_sigma == expected.init_noise_sigma
    if schedule_type is not None:
        assert replace(again, prompt_weighting=False) == replace(asked, prompt_weighting=False)


@pytest.mark.parametrize("lists", [{"timesteps": (900, 400, 10)}, {"sigmas": (9.0, 2.0, 0.5)}])
def test_a_schedule_without_a_name_is_refused_and_not_replaced(lists: dict[str, Any]) -> None:
    text = written(drawn(scheduler="euler", steps=3, **lists), config_of("spaced leading"), "euler")
    assert texts.parse(text)["Schedule type"] == "Custom"
    with pytest.raises(ApiError, match="must be one of Automatic"):
        read_back(text)
    lu = {**BETAS, "use_lu_lambdas": True}
    assert samplers.schedule_type(lu, "dpm++2m", drawn().schedule) == ""
    assert samplers.schedule_type(lu, "euler", drawn().schedule) == "linspace"


# -- prompts -----------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from([
    "a cat", "(tabby)", "[old]", "(red)1.3", "hat++", "dim--", "\\", "\\(", ":1.3)", ":", "|", "[a|b]", "[a:b:0.5]",
    "BREAK", "AND", "BREAK:", "aANDb", "<lora:x:1>", "<lyco:y>", "<b>", "Negative prompt: x",
    "Steps: 1, Seed: 2, Size: 1", "é", "🦊", "((", "))", "[", "]", '"', ",", "\n", " ",
])  # fmt: skip
TEXTS = st.lists(WORDS, min_size=1, max_size=8).map("".join).filter(lambda text: bool(text.strip()))


def same_words(one: str, other: str) -> bool:
    """Whether CLIP reads the same: its tokenizers take blanks together."""
    return one.split() == other.split()


@given(TEXTS, st.none() | TEXTS)
def test_prompts_without_weights_are_read_back_as_text(prompt: str, negative: str | None) -> None:
    asked = drawn(prompt=prompt, negative_prompt=negative)
    again, warnings = read_back(written(asked, config_of("spaced leading"), "euler"))
    assert not warnings and not again.lora
    plain = prompts.read(again.prompt, again.prompt_weighting)
    assert isinstance(plain, str) and same_words(plain, prompt)
    assert (again.negative_prompt is None) == (negative is None)
    if negative is not None and again.negative_prompt is not None:
        plain = prompts.read(again.negative_prompt, again.prompt_weighting)
        assert isinstance(plain, str) and same_words(plain, negative)


@given(TEXTS)
def test_models_that_read_no_weights_get_the_text(prompt: str) -> None:
    card = replace(CARD, prompt_fields=())
    again, warnings = read_back(written(drawn(prompt=prompt), config_of("spaced leading"), "euler"), card)
    assert not warnings and same_words(again.prompt, prompt) and not again.prompt_weighting


WEIGHTED = st.sampled_from(
    ["a cat", "(red:1.3)", "((big))", "[dim]", " AND ", " BREAK ", "\\(x\\)", "\nNegative prompt: y"]
)


@given(st.lists(WEIGHTED, min_size=1, max_size=6).map("".join))
def test_weights_are_read_back(prompt: str) -> None:
    asked = drawn(prompt=prompt, prompt_weighting="a1111")
    assume(prompt.replace("BREAK", "").strip())
    again, _ = read_back(written(asked, config_of("spaced leading"), "euler"))
    before, after = (prompts.read(one.prompt.strip(), "a1111") for one in (asked, again))
    if isinstance(before, str) or isinstance(after, str):
        assert before == after
    else:
        assert before.breaks == after.breaks and [w for _, w in before.parts] == [w for _, w in after.parts]
        assert same_words(before.text, after.text)


def test_compels_weights_are_the_web_uis_numbers_and_the_file_says_so() -> None:
    asked = drawn(prompt="a (red)1.3 hat++, (x) \\(y\\)", prompt_weighting="compel")
    text = written(asked, config_of("spaced leading"), "euler")
    assert texts.parse(text)["Prompt"] == "a (red :1.3)(hat:1.21), x \\(y\\)"
    assert texts.parse(text)["Prompt weighting"] == "compel"
    assert "Prompt weighting" not in texts.parse(written(drawn(), config_of("spaced leading"), "euler"))


@pytest.mark.parametrize("negative", [None, "", " "])
def test_an_empty_negative_prompt_is_not_none(negative: str | None) -> None:
    asked = drawn(negative_prompt=negative, guidance_scale=5.0)
    again, _ = read_back(written(asked, config_of("spaced leading"), "euler"))
    if negative is None:
        assert again.negative_prompt is None
    else:
        assert again.negative_prompt is not None and prompts.read(again.negative_prompt, "a1111") == ""


@pytest.mark.parametrize(
    "fields", [{"clip_skip": 2}, {"vae": "tiny"}, {"lora": "sepia:0.123456789"}, {"guidance_scale": 7.123456789}]
)
def test_other_fields_that_readers_know_are_read_back(fields: dict[str, Any]) -> None:
    again, warnings = read_back(written(drawn(**fields), config_of("spaced leading"), "euler"))
    assert not warnings
    for name, value in fields.items():
        assert getattr(again, name) == value


def test_tcds_noise_is_read_back() -> None:
    card = card_of(samplers.SCHEDULERS)
    again, _ = read_back(written(drawn(scheduler="tcd", eta=0.3), config_of("spaced leading"), "tcd"), card)
    assert again.eta == 0.3
    assert read_back(written(drawn(scheduler="tcd"), config_of("spaced leading"), "tcd"), card)[0].eta is None


# -- pictures ----------------------------------------------------------------------------------------------------------


@cache
def runner() -> Watching:
    return Watching(model("many-heads"))


@pytest.mark.parametrize(
    ("sampler", "fields"),
    [
        ("dpm++2m", {}), ("dpm++2m-sde", {}), ("euler", {"schedule_type": "trailing"}), ("euler-ancestral", {}),
        ("dpm++2m", {"schedule_type": "linspace"}), ("euler", {"schedule_type": "beta"}), ("lcm", {"steps": 4}),
        ("euler", {"prompt": "a cat (tabby), [old] AND BREAK <lora:x:1>"}),
        ("euler", {"prompt": "a (red:1.3) [hat]", "prompt_weighting": "a1111", "negative_prompt": ""}),
    ],
)  # fmt: skip
def test_the_same_picture_is_drawn_again(sampler: str, fields: dict[str, Any]) -> None:
    asked = replace(drawn(scheduler=sampler, width=32, height=32, steps=5), **fields)
    picture = solo(runner(), asked)
    again, warnings = read_back(picture.infotext, card_of(samplers.SCHEDULERS))
    assert not warnings
    assert apart(picture, solo(runner(), replace(again, width=32, height=32))) == 0


def test_every_type_has_a_label() -> None:
    from contract.sampler_labels import SCHEDULE_LABELS, SCHEDULES

    named = dict(SCHEDULES.values())
    assert {type_: named[SCHEDULE_LABELS[type_]] for type_ in TYPES} == {type_: type_ for type_ in TYPES}
