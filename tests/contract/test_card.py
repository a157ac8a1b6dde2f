"""Cards as JSON: this version and the one before read each other's, and what is wrong with a card is named."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from contract.bounds import MAX_SEED
from contract.card import (
    ImageCard,
    ImageCosts,
    ImageLimits,
    ImageOffer,
    ModelCard,
    TextCard,
    TextCosts,
    TextOffer,
    read_card,
    to_data,
)
from contract.errors import Invalid
from tests.contract.refused import refused

IMAGE = ImageCard(
    name="emoji-xl", precision="w8a8", device="cpu", kernels="avx2", kernels_reason="no AVX-512", native=128,
    sizes=((128, 128), (96, 168)), schedulers=("euler", "lcm"), default_scheduler="euler", limits=ImageLimits(),
    costs=ImageCosts(0.01, 0.02, {"128x128": 0.03}, {"128x128": 0.01}, {"block": {"128x128": 0.02}}),
    capacity_per_s=1.5, deepcache={"interval": 2, "depth": "resnet", "first": 0, "last": 1, "deep_steps": None},
    loras=("ink",), graphs={"recorded": 3, "wanted": 4},
)  # fmt: skip
TEXT = TextCard(
    name="emoji-lm", precision="fp32", device="cpu", kernels="torch", costs=TextCosts(0.01, 0.02), capacity_per_s=2.5,
    limits=TextOffer(
        context=256, max_prompt_characters=65_536, max_stops=4, max_logprobs=20, max_logit_bias=300, cache_tokens=4096
    ),
)  # fmt: skip

# As the version before wrote them.
FLAT: dict[str, dict[str, Any]] = {
    "image": {
        "v": 1, "name": "emoji-xl", "modality": "image", "precision": "w8a8", "device": "cpu", "native": 128,
        "sizes": [[128, 128], [96, 168]], "schedulers": ["euler", "lcm"], "default_scheduler": "euler",
        "limits": {"max_prompt_characters": 10000, "max_steps": 1000, "max_guidance": 100.0,
                   "max_seed": 9223372036854775807, "max_images": 10},
        "costs": {"encode_s": 0.01, "vae_s": 0.02, "solo_step_s": {"128x128": 0.03}, "row_step_s": {"128x128": 0.01},
                  "shallow_solo_step_s": {"block": {"128x128": 0.02}}, "shallow_row_step_s": {}},
        "capacity_per_s": 1.5,
        "deepcache": {"interval": 2, "depth": "resnet", "first": 0, "last": 1, "deep_steps": None}, "loras": ["ink"],
        "graphs": {"recorded": 3, "wanted": 4}, "kernels": "avx2", "kernels_reason": "no AVX-512", "live": False,
    },
    "text": {
        "v": 1, "name": "emoji-lm", "modality": "text", "precision": "fp32", "device": "cpu", "native": 0, "sizes": [],
        "schedulers": [], "default_scheduler": "",
        "limits": {"context": 256, "max_prompt_characters": 65536, "max_choices": 16, "max_stops": 4,
                   "max_logprobs": 20, "max_logit_bias": 300, "max_seed": 9223372036854775807, "cache_tokens": 4096},
        "costs": {"token_s": 0.01, "solo_token_s": 0.02}, "capacity_per_s": 2.5, "deepcache": "off", "loras": [],
        "graphs": {}, "kernels": "torch", "kernels_reason": "", "live": False,
    },
}  # fmt: skip
NEEDED = {"name", "modality", "precision", "device", "native", "sizes", "schedulers", "default_scheduler", "limits",
          "costs", "capacity_per_s"}  # fmt: skip


@pytest.mark.parametrize("card", [IMAGE, TEXT])
def test_the_version_before_and_this_one_read_each_other(card: ModelCard) -> None:
    flat = FLAT[card.modality]
    assert read_card(flat) == card
    told = json.loads(json.dumps(to_data(card)))
    known = {name: told[name] for name in told if name in flat}
    known["limits"] = {name: told["limits"][name] for name in flat["limits"]}  # it leaves out what it does not know
    known["costs"] = {name: told["costs"][name] for name in flat["costs"]}
    assert known.keys() >= NEEDED and known.items() <= flat.items()
    assert read_card(told) == card


def test_a_text_has_no_fields_of_pictures() -> None:
    assert not asdict(TEXT).keys() & {"native", "sizes", "schedulers", "default_scheduler", "deepcache", "loras"}


def test_what_a_card_does_not_say_has_its_default() -> None:
    for kind, expected in (("image", ImageLimits()), ("text", TextOffer())):
        card = read_card({**FLAT[kind], "limits": {}, "costs": {"tomorrows_s": [1]}, "colour": "blue"})
        assert card.limits == expected and card.costs in (ImageCosts(), TextCosts())


def test_the_offer_has_the_cards_limits() -> None:
    card = replace(IMAGE, limits=ImageLimits(max_steps=4, max_seed=2**64 - 1))
    assert card.offer == ImageOffer(
        IMAGE.sizes, IMAGE.schedulers, (128, 128), precision="w8a8", loras=("ink",), upscalers=(), refiners=(),
        controls=(), preprocessors=("canny",), image_prompts=(), cascades={}, options={}, checker="",
            upscale_filters=(),
        max_steps=4, max_seed=MAX_SEED,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "wrong", "field"),
    [
        ("image", {"modality": "smell"}, "modality"),
        ("image", {"name": 3}, "name"),
        ("image", {"sizes": ["128x128"]}, "sizes.0"),
        ("image", {"sizes": [[128, 0]]}, "sizes.0.1"),
        ("image", {"sizes": [[128, True]]}, "sizes.0.1"),
        ("image", {"limits": None}, "limits"),
        ("image", {"limits": {"max_steps": "4"}}, "limits.max_steps"),
        ("image", {"costs": {"vae_s": True}}, "costs.vae_s"),
        ("image", {"costs": {"row_step_s": 3}}, "costs.row_step_s"),
        ("text", {"costs": {"token_s": "0.1"}}, "costs.token_s"),
        ("text", {"capacity_per_s": None}, "capacity_per_s"),
        ("text", {"limits": {"context": 1.5}}, "limits.context"),
    ],
)
def test_the_field_of_another_form_is_named(kind: str, wrong: dict[str, Any], field: str) -> None:
    with refused(field, "form"):
        read_card({**FLAT[kind], **wrong})


def test_the_field_that_is_missing_is_named() -> None:
    for kind, name in (("image", "native"), ("image", "costs"), ("text", "limits"), ("text", "name")):
        with pytest.raises(Invalid) as caught:
            read_card({key: value for key, value in FLAT[kind].items() if key != name})
        assert (caught.value.field, caught.value.message) == (name, "is missing")
