"""The checks of an image request's prompts: the first wrong field by its name, and never its text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from contract import prompts
from contract.card import ImageOffer
from contract.errors import Invalid
from contract.image import ImageParameters

GOOD = ImageParameters("a fox", 7, 64, 64, negative_prompt="fog")
OFFER = ImageOffer([(64, 64)], ("euler",))


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"prompt_2": ""}, {"prompt_2": "b", "negative_prompt_2": "c"}, {"clip_skip": 0}, {"clip_skip": 31},
        {"prompt_weighting": "compel"}, {"prompt_weighting": "a1111", "prompt_2": "(b:1.2)"},
        {"prompt": "[a|b]"}, {"prompt": "[a|b]", "prompt_weighting": "compel"},
    ],
)  # fmt: skip
def test_what_is_right_passes(fields: dict[str, Any]) -> None:
    prompts.check(replace(GOOD, **fields).values(prompts.CHECKED), OFFER)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": " "}, "prompt: must not be empty"),
        ({"prompt": "()", "prompt_weighting": "compel"}, "prompt: must not be empty"),
        ({"prompt": None}, "prompt: must be text"),
        ({"prompt_2": "\0"}, "prompt_2: character 1 is U+0000"),
        ({"prompt_2": "(a:99)", "prompt_weighting": "a1111"}, "prompt_2: a weight is more than 10"),
        ({"negative_prompt_2": "[a|b]", "prompt_weighting": "a1111"}, "negative_prompt_2: prompt editing"),
        ({"negative_prompt": None, "negative_prompt_2": "a"}, "negative_prompt_2: needs a negative_prompt"),
        ({"prompt_weighting": "comfy"}, "prompt_weighting: must be true or false, or one of compel, a1111"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Invalid) as caught:
        prompts.check(replace(GOOD, **fields).values(prompts.CHECKED), OFFER)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt_weighting", True), ("prompt_2", "b"), ("negative_prompt_2", "b"), ("clip_skip", 1)],
)
def test_a_model_reads_what_its_card_says(name: str, value: Any) -> None:
    asked = replace(GOOD, **{name: value})
    prompts.check(asked.values(prompts.CHECKED), replace(OFFER, prompt_fields=prompts.FIELDS))
    with pytest.raises(Invalid, match=f"{name}: is not supported by this model"):
        prompts.check(asked.values(prompts.CHECKED), replace(OFFER, prompt_fields=()))
    prompts.check(GOOD.values(prompts.CHECKED), replace(OFFER, prompt_fields=()))
