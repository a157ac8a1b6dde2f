"""Cascades at the API: what the job carries, what is refused by name, and which model is told to have drawn what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.card import ImageCard
from tests.api.test_expand import URL, served
from tests.api.world import CARD, PATIENCE_S, Api, Worker, check_error, eventually, parsed

DRAFT = replace(CARD, name="sketcher", sizes=((64, 64), (128, 128)))
FULL = replace(CARD, cascades={"sketcher": 76.5, "untuned": None})
TOLD = [("sketcher", 80.25), ("emoji-xl", 12.5)]


@pytest.fixture
def world(redis_url: str, folder: Path) -> Iterator[tuple[Api, Worker]]:
    with served(redis_url, folder, (FULL, DRAFT)) as world:
        yield world


def draw(worker: Worker) -> None:
    """Do what comes next as a worker does that keeps the first draft of two."""
    (id,) = eventually(worker.ids)
    claim = worker.take(id)
    assert claim.parameters["cascade"] == {"draft": "sketcher", "gate": 76.5}
    images = [
        {
            "key": worker.artifacts.put(name.encode(), "image/png"), "seed": claim.parameters["seed"] + k,
            "width": 128, "height": 128, "media_type": "image/png", "size_bytes": 3, "warnings": [],
            "drawn_by": name, "draft_score": score, "fingerprint": {"model": name},
        }
        for k, (name, score) in enumerate(TOLD)
    ]  # fmt: skip
    assert worker.store.leases.succeed(claim.id, claim.attempt, {"images": images, "deepcache": "off"})


def test_answers_tell_which_model_drew_each_picture(world: tuple[Api, Worker]) -> None:
    api, worker = world
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(api.post, URL, prompt="a cat", n=2, seed=1, cascade={"draft": "sketcher"}, model="emoji-xl")
        draw(worker)
        answer = asked.result(PATIENCE_S).json()
    assert [(image["drawn_by"], image["draft_score"]) for image in answer["data"]] == TOLD
    job = api.job(answer["job_id"])
    assert [(image["drawn_by"], image["draft_score"]) for image in job["images"]] == TOLD
    assert job["request"]["cascade"] == {"draft": "sketcher", "gate": 76.5}


def test_streams_tell_it_too(world: tuple[Api, Worker]) -> None:
    api, worker = world

    def read() -> list[dict[str, Any]]:
        fields = {"prompt": "a cat", "n": 2, "seed": 1, "cascade": {"draft": "sketcher"}, "stream": True}
        with api.client.stream("POST", URL, json={**fields, "model": "emoji-xl"}) as answer:
            return [event.data for event in parsed(answer.iter_lines())]

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(read)
        draw(worker)
        assert [(event["drawn_by"], event["draft_score"]) for event in asked.result(PATIENCE_S)] == TOLD


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cascade": {"draft": "nobody"}}, "cascade.draft"),
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
    for path, more in ((URL, {}), ("/v1/jobs", {"type": "image"})):
        answer = api.post(path, prompt="a cat", model="emoji-xl", **fields, **more)
        assert answer.status_code == 400, answer.text
        check_error(answer, 400, field, answer.json()["error"]["code"])
    assert not worker.ids()


def test_the_models_list_has_the_gates(world: tuple[Api, Worker]) -> None:
    api, _ = world
    assert isinstance(FULL, ImageCard)
    model = api.client.get("/v1/models/emoji-xl").json()
    assert model["diptych"]["cascades"] == json.loads(json.dumps(FULL.cascades))
