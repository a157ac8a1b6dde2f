"""Plans by name: what a request with one becomes, and what of it gives way."""

from __future__ import annotations

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
    return ImageOffer([(64, 64)], ("euler", "dpm++2m"), (64, 64), loras=("ink", "lcm-lora"), plans=PLANS, **more)


def asked(offered: ImageOffer, **fields: Any) -> dict[str, Any]:
    return ImageRequest(prompt="x", **fields).complete(offered).to_dict()


def test_a_plan_fills_what_is_left_open() -> None:
    found = asked(offer(), plan="balanced")
    assert (found["steps"], found["guidance_interval"]) == (12, (0.0, 0.5))
    assert found["deepcache"] == PLANS["balanced"]["deepcache"]
    found = asked(offer(), plan="fast")
    assert (found["steps"], found["scheduler"], found["schedule_type"]) == (8, "dpm++2m", "karras")
    assert found["deepcache"] == "off" and "plan" not in found
    found = asked(offer(), plan="balanced", steps=30, deepcache="off", guidance_interval=[0, 1])
    assert (found["steps"], found["deepcache"], found["guidance_interval"]) == (30, "off", (0, 1))


@pytest.mark.parametrize(
    "own", [{"scheduler": "euler"}, {"schedule_type": "beta"}, {"timesteps": [900, 500]}, {"eta": 0.0}]
)
def test_steps_and_sampler_of_a_plan_go_together_or_not_at_all(own: dict[str, Any]) -> None:
    found = asked(offer(), plan="fast", **own)
    assert found["steps"] == (2 if "timesteps" in own else 20) and found["scheduler"] == own.get("scheduler")
    assert found.get("schedule_type") == own.get("schedule_type")


def test_words() -> None:
    assert asked(offer(), plan="off")["deepcache"] == "off" and asked(offer(), plan="off")["steps"] == 20
    assert asked(offer(), plan="auto", seed=1) == asked(offer(), plan="balanced", seed=1)
    untuned = ImageOffer([(64, 64)], ("euler",), (64, 64))
    assert asked(untuned, plan="auto")["deepcache"] == "auto"
    for name in ("best", "", "Fast", "balanced\n"):
        with pytest.raises(Invalid, match=r"^plan: must be one of off, auto, balanced, fast$"):
            asked(offer(), plan=name)


def test_the_models_default_plan_is_for_requests_that_say_none_and_use_no_students_lora() -> None:
    usual = offer(plan="fast")
    assert asked(usual)["steps"] == 8 and asked(usual, plan="off")["steps"] == 20
    assert asked(usual, lora="ink")["steps"] == 8
    student = ImageOffer([(64, 64)], ("euler", "lcm"), (64, 64), loras=("lcm-lora",), plans=PLANS, plan="balanced")
    assert (asked(student, lora="lcm-lora")["steps"], asked(student, lora="lcm-lora")["scheduler"]) == (4, "lcm")


def test_a_default_plan_refuses_nobody() -> None:
    """What a newer worker has, or what leaves an edit no step, is passed over; a plan that is asked for is refused."""
    newer = {"new": {"deepcache": {"interval": 3, "future": 1}}, "junk": {"guidance_interval": 5}, "few": {"steps": 3}}
    for name in (*newer, "word"):
        found = ImageOffer([(64, 64)], ("euler",), (64, 64), plans=newer, plan=name)
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
    found = ImageOffer([(64, 64)], ("euler",), (64, 64), plans=listed)
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
    found = ImageOffer([(64, 64)], ("euler",), (64, 64), plans=listed)
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
    ("data", "field"),
    [
        ([], "plans"),
        ({"Fast": {}}, "plans.Fast"),
        ({"off": {}}, "plans.off"),
        ({"fast": {"steps": 0}}, "plans.fast.steps"),
        ({"fast": {"seed": 3}}, "plans.fast.seed"),
        ({"fast": {"deepcache": "much"}}, "plans.fast.deepcache"),
        ({"fast": {"guidance_interval": [1]}}, "plans.fast.guidance_interval"),
        ({"fast": {"guidance_interval": [0.9, 0.1]}}, "plans.fast.guidance_interval"),
        ({"fast": {"guidance_interval": [float("nan"), 1.0]}}, "plans.fast.guidance_interval"),
        ({"fast": {"guided_steps": []}}, "plans.fast.guided_steps"),
        ({"fast": {"guided_steps": [1, 1]}}, "plans.fast.guided_steps"),
        ({"fast": {"guided_steps": [1], "guidance_interval": [0.0, 1.0]}}, "plans.fast.guided_steps"),
        ({"fast": {"steps": 10**9}}, "plans.fast.steps"),
        ({"fast": {"schedule_type": "zz"}}, "plans.fast.schedule_type"),
        ({"fast": {"deepcache": {"deep_steps": [0], "interval": 2}}}, "plans.fast.deepcache"),
    ],
)
def test_plans_that_are_none_are_refused_by_name(data: object, field: str) -> None:
    with pytest.raises(Invalid) as caught:
        tuned.read(data)
    assert (caught.value.field or "").startswith(field)


def test_plans_are_read_as_they_are() -> None:
    assert tuned.read(PLANS) == PLANS


def test_a_plan_may_name_the_tiny_decoder() -> None:
    plans = {"swift": {"steps": 4, "vae": "tiny"}}
    with_it = ImageOffer([(64, 64)], ("euler",), (64, 64), plans=plans, plan="swift", vaes=("full", "tiny"))
    assert asked(with_it)["vae"] == "tiny" and "vae" not in asked(with_it, vae="full")
    without = ImageOffer([(64, 64)], ("euler",), (64, 64), plans=plans, plan="swift")
    assert asked(without)["steps"] == 4 and "vae" not in asked(without), "a default plan refuses nobody"
    with pytest.raises(Invalid, match=r"^vae: this model has no tiny decoder; it has full$"):
        asked(without, plan="swift")
