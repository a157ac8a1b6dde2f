"""Cascades at the API: what the job carries, what is refused by name, and which model is told to have drawn what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from core.config import Settings
from tests.api.easel import asked, conclude
from tests.api.pictures.test_expand import served
from tests.api.world import CARD, PATIENCE_S, Api, Worker, check_error, parsed

DRAFT = replace(CARD, name="sketcher", sizes=((64, 64), (128, 128)))
FULL = replace(CARD, cascades={"sketcher": 76.5, "untuned": None})
TOLD = [("sketcher", 80.25), ("emoji-xl", 12.5)]


@pytest.fixture
def world(settings: Settings) -> Iterator[tuple[Api, Worker]]:
    with served(settings, (FULL, DRAFT)) as world:
        yield world


@pytest.mark.parametrize("stream", [False, True])
def test_answers_tell_which_model_drew_each_picture(world: tuple[Api, Worker], stream: bool) -> None:
    api, worker = world
    cascade = {"draft": "sketcher", "gate": 76.5}
    id, answer = asked(worker, api.draw, n=2, cascade={"draft": "sketcher"}, model="emoji-xl", stream=stream)
    made = [{"drawn_by": name, "draft_score": score, "fingerprint": {"model": name}} for name, score in TOLD]
    claim = conclude(worker, id, *made, deepcache="off")
    assert claim.parameters["cascade"] == cascade
    drawn = answer.result(PATIENCE_S)
    images = [event.data for event in parsed(iter(drawn.text.split("\n")))] if stream else drawn.json()["data"]
    assert [(image["drawn_by"], image["draft_score"]) for image in images] == TOLD
    job = api.job(id)
    assert [(image["drawn_by"], image["draft_score"]) for image in job["images"]] == TOLD
    assert job["request"]["cascade"] == cascade


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cascade": {"draft": "untuned"}}, "cascade.gate"),
        ({"cascade": {"draft": "sketcher", "gate": 101}}, "cascade.gate"),
        ({"cascade": {"gate": 10}}, "cascade.draft"),
        ({"cascade": {"draft": "sketcher"}, "size": "96x168"}, "cascade.draft"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_there_is_a_job(
    world: tuple[Api, Worker], fields: dict[str, Any], field: str
) -> None:
    api, worker = world
    asked = {"prompt": "a cat", "model": "emoji-xl", **fields}
    for answer in (api.draw(**asked), api.post("/v1/jobs", type="image", **asked)):
        check_error(answer, 400, field)
    assert not worker.ids()


def test_the_models_list_has_the_gates(world: tuple[Api, Worker]) -> None:
    api, _ = world
    model = api.get("/v1/models/emoji-xl").json()
    assert model["diptych"]["cascades"] == json.loads(json.dumps(FULL.cascades))
