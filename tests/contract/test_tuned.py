"""Plans by name: what a request with one becomes, and what of it gives way."""

from __future__ import annotations

import math
from typing import Any

import pytest

from contract import tuned
from contract.card import ImageOffer
from contract.errors import Invalid
from contract.image_request import EditRequest, ImageRequest

PLANS: dict[str, dict[str, Any]] = {
    "balanced": {
        "steps": 12, "deepcache": {"interval": 2, "depth": "resnet", "last": 1}, "guidance_interval": [0.0, 0.5],
    },
    "fast": {"steps": 8, "scheduler": "dpm++2m", "schedule_type": "karras", "deepcache": "off"},
}  # fmt: skip


def offer(**more: Any) -> ImageOffer:
    given = {"schedulers": ("euler", "dpm++2m"), "loras": ("ink", "lcm-lora"), "plans": PLANS}
    return ImageOffer(sizes=[(64, 64)], native=(64, 64), **{**given, **more})


def asked(offered: ImageOffer, **fields: Any) -> dict[str, Any]:
    return ImageRequest(prompt="x", **fields).complete(offered).to_dict()


OFF = {"steps": 20, "deepcache": "off"}
OWN = {"steps": 30, "deepcache": "off", "guidance_interval": [0, 1]}
KARRAS = {"steps": 8, "scheduler": "dpm++2m", "schedule_type": "karras", "deepcache": "off", "plan": None}


@pytest.mark.parametrize(
    ("offered", "fields", "expected"),
    [
        ({}, {"plan": "balanced"}, {**PLANS["balanced"], "guidance_interval": (0.0, 0.5)}),
        ({}, {"plan": "fast"}, KARRAS),
        ({}, {"plan": "balanced", **OWN}, {**OWN, "guidance_interval": (0, 1)}),
        # Steps and sampler of a plan go together or not at all.
        ({}, {"plan": "fast", "scheduler": "euler"}, {"steps": 20, "scheduler": "euler", "schedule_type": None}),
        ({}, {"plan": "fast", "schedule_type": "beta"}, {"steps": 20, "scheduler": None, "schedule_type": "beta"}),
        ({}, {"plan": "fast", "timesteps": [900, 500]}, {"steps": 2, "scheduler": None, "schedule_type": None}),
        ({}, {"plan": "fast", "eta": 0.0}, {"steps": 20, "scheduler": None, "schedule_type": None}),
        # Words.
        ({}, {"plan": "off"}, OFF),
        ({}, {"plan": "auto"}, {"steps": 12, "deepcache": PLANS["balanced"]["deepcache"]}),
        ({"plans": {}}, {"plan": "auto"}, {"steps": 20, "deepcache": "auto"}),
        # The model's default plan is for requests that say none and use no student's LoRA.
        ({"plan": "fast"}, {}, KARRAS),
        ({"plan": "fast"}, {"plan": "off"}, OFF),
        ({"plan": "fast"}, {"lora": "ink"}, {"steps": 8}),
        ({"plan": "balanced", "schedulers": ("euler", "lcm")}, {"lora": "lcm-lora"}, {"steps": 4, "scheduler": "lcm"}),
    ],
    ids=str,
)
def test_a_plan_fills_what_is_left_open(
    offered: dict[str, Any], fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = asked(offer(**offered), **fields)
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize("name", ["best", "", "Fast", "balanced\n"])
def test_a_plan_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match=r"^plan: must be one of off, auto, balanced, fast$"):
        asked(offer(), plan=name)


def test_a_default_plan_refuses_nobody() -> None:
    """What a newer worker has, or what leaves an edit no step, is passed over; a plan that is asked for is refused."""
    newer = {"new": {"deepcache": {"interval": 3, "future": 1}}, "junk": {"guidance_interval": 5}, "few": {"steps": 3}}
    for name in (*newer, "word"):
        found = offer(plans=newer, plan=name)
        job = EditRequest(prompt="x", strength=0.3).complete(found, (64, 64))
        assert (job.picture.steps, job.picture.made, job.deepcache) == (20, 6, None)
        if name != "few":
            assert asked(found)["steps"] == 20
            with pytest.raises(Invalid, match=r"^plan: "):
                asked(found, plan=name)
    with pytest.raises(Invalid, match=r"^strength: 0\.3 of 3 steps"):
        EditRequest(prompt="x", strength=0.3, plan="few").complete(found, (64, 64))


def test_deep_steps_of_a_plan_give_way_to_fewer_steps() -> None:
    listed = {"p": {"steps": 20, "deepcache": {"deep_steps": [0, 15]}}}
    found = offer(plans=listed)
    assert asked(found, plan="p")["deepcache"] == {"deep_steps": [0, 15]}
    assert asked(found, plan="p", steps=10)["deepcache"] == "off"
    with pytest.raises(Invalid, match=r"^deepcache\.deep_steps"):
        asked(found, plan="p", steps=10, deepcache={"deep_steps": [0, 15]})


def test_an_interval_of_a_plan_that_holds_none_of_few_steps_is_dropped_and_a_requests_own_is_refused() -> None:
    assert "guidance_interval" not in asked(offer(), plan="balanced", steps=1)
    edit = EditRequest(prompt="x", plan="balanced", strength=0.1).complete(offer(), (64, 64))
    assert edit.picture.made == 1 and edit.picture.guidance_interval is None
    with pytest.raises(Invalid, match=r"^guidance_interval: contains none of 1 steps"):
        asked(offer(), plan="balanced", steps=1, guidance_interval=[0, 0.5])


def test_listed_steps_of_a_plan_give_way_to_fewer_steps_and_to_a_requests_own_guidance() -> None:
    listed = {"p": {"steps": 20, "guided_steps": [0, 15]}}
    found = offer(plans=listed)
    assert asked(found, plan="p")["guided_steps"] == (0, 15)
    assert "guided_steps" not in asked(found, plan="p", steps=10)
    other = asked(found, plan="p", guidance_interval=[0, 0.5])
    assert other["guidance_interval"] == (0, 0.5) and "guided_steps" not in other
    other = asked(offer(), plan="balanced", guided_steps=[0, 11])
    assert other["guided_steps"] == (0, 11) and "guidance_interval" not in other
    for wrong in ({"guided_steps": [0, 15]}, {"guided_steps": [0], "guidance_interval": [0, 1]}):
        with pytest.raises(Invalid, match=r"^guided_steps: "):
            asked(found, plan="p", steps=10, **wrong)


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 10**9}, "steps"),
        ({"seed": 3}, "seed"),
        ({"deepcache": "much"}, "deepcache"),
        ({"deepcache": {"deep_steps": [0], "interval": 2}}, "deepcache"),
        *(({"guidance_interval": interval}, "guidance_interval") for interval in ([1], [0.9, 0.1], [math.nan, 1.0])),
        *(({"guided_steps": steps}, "guided_steps") for steps in ([], [1, 1])),
        ({"guided_steps": [1], "guidance_interval": [0.0, 1.0]}, "guided_steps"),
        ({"schedule_type": "zz"}, "schedule_type"),
    ],
    ids=str,
)
def test_plans_that_are_none_are_refused_by_name(plan: dict[str, Any], field: str) -> None:
    assert tuned.read(PLANS) == PLANS
    with pytest.raises(Invalid, match=rf"^plans\.fast\.{field}"):
        tuned.read({"fast": plan})


@pytest.mark.parametrize(("data", "field"), [([], "plans"), ({"Fast": {}}, "plans.Fast"), ({"off": {}}, "plans.off")])
def test_names_of_plans_are_checked(data: object, field: str) -> None:
    with pytest.raises(Invalid, match=f"^{field}"):
        tuned.read(data)


def test_a_plan_may_name_the_tiny_decoder() -> None:
    plans = {"swift": {"steps": 4, "vae": "tiny"}}
    with_it = offer(plans=plans, plan="swift", vaes=("full", "tiny"))
    assert asked(with_it)["vae"] == "tiny" and "vae" not in asked(with_it, vae="full")
    without = offer(plans=plans, plan="swift")
    assert asked(without)["steps"] == 4 and "vae" not in asked(without), "a default plan refuses nobody"
    with pytest.raises(Invalid, match=r"^vae: this model has no tiny decoder; it has full$"):
        asked(without, plan="swift")
