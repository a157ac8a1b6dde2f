"""Weights in prompts, at every door: passed on to the worker, off by default, refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import Settings
from tests.api.easel import Easel
from tests.api.pictures.test_edits import PNG
from tests.api.world import CARD, Api, Worker, check_error, eventually, ok, opened

DRAW, EDIT = "/v1/images/generations", "/v1/images/edits"


@pytest.mark.parametrize("given", [None, False])
def test_without_it_marks_are_text(shared: Api, worker: Worker, given: bool | None) -> None:
    id = shared.order(prompt="(a).blend(1) ((((((", prompt_weighting=given)
    parameters = worker.job(id).parameters
    assert "prompt_weighting" not in parameters and parameters["prompt"] == "(a).blend(1) (((((("
    worker.work(id)


@pytest.mark.parametrize("syntax", [True, "compel", "a1111"])
def test_a_syntax_and_texts_of_each_encoder_reach_the_worker_at_every_door(
    shared: Api, easel: Easel, syntax: bool | str
) -> None:
    asked = {
        "prompt": "a (red)1.3 fox", "negative_prompt": "fog", "prompt_weighting": syntax, "prompt_2": "(a:1.2)",
        "negative_prompt_2": "b", "clip_skip": 1,
    }  # fmt: skip
    ok(shared.post(DRAW, **asked))
    form = {**asked, "prompt_weighting": "true" if syntax is True else syntax, "clip_skip": "1"}
    ok(shared.client.post(EDIT, data=form, files={"image": PNG}))
    job = shared.order(**asked)
    eventually(lambda: shared.job(job)["status"] == "succeeded")
    assert len(easel.seen) == 3
    for claim in easel.seen:
        assert {name: claim.parameters[name] for name in asked} == asked


def test_a_model_that_does_not_read_a_field_says_so(settings: Settings) -> None:
    with opened(settings, replace(CARD, prompt_fields=(), embeddings=("ink",))) as (api, worker):
        for name, value in {"prompt_weighting": True, "prompt_2": "b", "clip_skip": 1}.items():
            check_error(api.draw(**{name: value}), 400, name, "invalid_value")
        assert not worker.ids()
        card = api.get("/v1/models/emoji-xl").json()["diptych"]
        assert card["prompt_fields"] == [] and card["embeddings"] == ["ink"]
