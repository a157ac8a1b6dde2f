"""DeepCache as a request asks for it: what is passed on to the worker, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from api import admission
from api.errors import ApiError
from api.schemas import ImageFields, read
from tests.api.world import CARD
from unet_opt import schedule
from unet_opt.schedule import AUTO, DeepCache


def _passed_on(value: Any, steps: int = 20) -> Any:
    fields = read(ImageFields, {"prompt": "a cat", "steps": steps, "deepcache": value})
    return admission.image_draft(fields, CARD).parameters.get("deepcache")


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("off", None),
        ("auto", AUTO),
        ({}, DeepCache()),
        ({"interval": 3, "depth": None}, DeepCache(interval=3)),
        ({"interval": 5, "depth": "resnet", "first": 2, "last": 1}, DeepCache(5, "resnet", 2, 1)),
        ({"deep_steps": [0, 7, 19], "depth": "resnet"}, DeepCache(depth="resnet", deep_steps=(0, 7, 19))),
        ({"deep_steps": []}, DeepCache(deep_steps=())),
    ],
)
def test_a_worker_reads_what_was_asked_for(value: Any, meant: DeepCache | None) -> None:
    assert schedule.read(_passed_on(value)) == meant


def test_who_does_not_say_leaves_it_to_the_worker() -> None:
    assert _passed_on(None) is None


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("on", "deepcache"),
        ("", "deepcache"),
        (2, "deepcache"),
        (True, "deepcache"),
        ([2], "deepcache"),
        ({"interval": 0}, "deepcache.interval"),
        ({"interval": "2"}, "deepcache.interval"),
        ({"interval": 2.0}, "deepcache.interval"),
        ({"interval": 1001}, "deepcache.interval"),
        ({"first": -1}, "deepcache.first"),
        ({"last": True}, "deepcache.last"),
        ({"depth": "abyss"}, "deepcache.depth"),
        ({"every": 2}, "deepcache.every"),
        ({"deep_steps": 3}, "deepcache.deep_steps"),
        ({"deep_steps": [0, "1"]}, "deepcache.deep_steps"),
        ({"deep_steps": [20]}, "deepcache.deep_steps"),
        ({"deep_steps": [-1]}, "deepcache.deep_steps"),
        ({"deep_steps": [3, 3]}, "deepcache.deep_steps"),
        ({"deep_steps": [3], "interval": 2}, "deepcache.deep_steps"),
        ({"deep_steps": list(range(1001))}, "deepcache.deep_steps"),
    ],
)
def test_what_is_wrong_is_refused_by_name(value: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        _passed_on(value)
    assert (caught.value.status, caught.value.param) == (400, param)
