"""Weights in prompts, at every door: passed on to the worker, off by default, refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.easel import Easel
from tests.api.test_edits import PNG
from tests.api.world import CARD, Api, Worker, check_error, eventually, opened, settings_of

DRAW, EDIT = "/v1/images/generations", "/v1/images/edits"
MARKED = "a (red)1.3 fox--, ((very)) big"


def test_who_asks_for_it_gets_it_at_every_door(shared: Api, easel: Easel, worker: Worker) -> None:
    asked = {"prompt": MARKED, "negative_prompt": "fog++", "prompt_weighting": True}
    answer = shared.post(DRAW, **asked)
    assert answer.status_code == 200, answer.text
    form = {**asked, "prompt_weighting": "true"}
    assert shared.client.post(EDIT, data=form, files={"image": PNG}).status_code == 200
    job = shared.order(**asked)
    eventually(lambda: shared.job(job)["status"] == "succeeded")
    seen = [claim.parameters for claim in easel.seen]
    assert len(seen) == 3
    for parameters in seen:
        assert parameters["prompt_weighting"] is True
        assert (parameters["prompt"], parameters["negative_prompt"]) == (MARKED, "fog++")


def test_a_batch_may_ask_for_it_line_by_line(shared: Api, easel: Easel) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": MARKED, "prompt_weighting": True}, {"prompt": MARKED},
        {"prompt": "(a, b).blend(1)", "prompt_weighting": True},
    ]  # fmt: skip
    lines = [{"custom_id": f"c{k}", "method": "POST", "url": DRAW, "body": body} for k, body in enumerate(bodies)]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    file = shared.client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("b.jsonl", data)}).json()["id"]
    fields = {"input_file_id": file, "endpoint": DRAW, "completion_window": "24h"}
    id = shared.post("/v1/batches", **fields).json()["id"]

    def ended() -> Any:
        batch = shared.client.get(f"/v1/batches/{id}").json()
        return batch if batch["status"] == "completed" else None

    batch = eventually(ended)
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    refused = json.loads(shared.client.get(f"/v1/files/{batch['error_file_id']}/content").text)
    assert refused["custom_id"] == "c2" and refused["response"]["body"]["error"]["param"] == "prompt"
    assert [claim.parameters.get("prompt_weighting") for claim in easel.seen] == [True, None]


@pytest.mark.parametrize("given", [None, False])
def test_without_it_marks_are_text(shared: Api, worker: Worker, given: bool | None) -> None:
    id = shared.order(prompt="(a).blend(1) ((((((", prompt_weighting=given)
    parameters = worker.job(id).parameters
    assert "prompt_weighting" not in parameters and parameters["prompt"] == "(a).blend(1) (((((("
    worker.work(id)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": "a cat.swap(dog)"}, "prompt", "invalid_value"),
        ({"prompt": "(a)99"}, "prompt", "invalid_value"),
        ({"prompt": "(" * 40 + "a" + ")" * 40}, "prompt", "invalid_value"),
        ({"prompt": "( )1.3"}, "prompt", "invalid_value"),
        ({"negative_prompt": "(a, b).and()"}, "negative_prompt", "invalid_value"),
        ({"prompt_weighting": "yes"}, "prompt_weighting", "invalid_value"),
        ({"prompt_weighting": "a1111", "prompt": "[a:b:0.5]"}, "prompt", "invalid_value"),
        ({"prompt_weighting": "a1111", "prompt_2": "<lora:ink:1>"}, "prompt_2", "invalid_value"),
        ({"negative_prompt_2": "fog"}, "negative_prompt_2", "invalid_value"),
        ({"clip_skip": 32}, "clip_skip", "invalid_value"),
        ({"clip_skip": "1"}, "clip_skip", "invalid_type"),
        ({"prompt_weighting": 1}, "prompt_weighting", "invalid_type"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    shared: Api, worker: Worker, fields: dict[str, Any], param: str, code: str
) -> None:
    known = worker.ids()
    asked = {"prompt": "a fox", "prompt_weighting": True, **fields}
    for path, more in ((DRAW, {}), ("/v1/jobs", {"type": "image"})):
        check_error(shared.post(path, **asked, **more), 400, param, code)
    assert worker.ids() == known


@pytest.mark.parametrize("syntax", [True, "compel", "a1111"])
def test_a_syntax_and_texts_of_each_encoder_reach_the_worker_at_every_door(
    shared: Api, easel: Easel, syntax: bool | str
) -> None:
    asked = {
        "prompt": "a (red)1.3 fox", "negative_prompt": "fog", "prompt_weighting": syntax, "prompt_2": "(a:1.2)",
        "negative_prompt_2": "b", "clip_skip": 1,
    }  # fmt: skip
    answer = shared.post(DRAW, **asked)
    assert answer.status_code == 200, answer.text
    form = {**asked, "prompt_weighting": "true" if syntax is True else syntax, "clip_skip": "1"}
    answer = shared.client.post(EDIT, data=form, files={"image": PNG})
    assert answer.status_code == 200, answer.text
    job = shared.order(**asked)
    eventually(lambda: shared.job(job)["status"] == "succeeded")
    assert len(easel.seen) == 3
    for claim in easel.seen:
        assert {name: claim.parameters[name] for name in asked} == asked


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "fields", [{"prompt_weighting": True}, {"prompt_weighting": "a1111"}, {"prompt_2": "b"}, {"clip_skip": 1}]
)
def test_a_model_that_does_not_read_a_field_says_so(fields: dict[str, Any], redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    with opened(settings) as (api, worker):
        worker.announce(card=replace(CARD, name="plain-texts", prompt_fields=(), embeddings=("ink",)))
        (name,) = fields
        check_error(api.post(DRAW, prompt="a fox", model="plain-texts", **fields), 400, name, "invalid_value")
        assert not worker.ids()
        card = api.client.get("/v1/models/plain-texts").json()["diptych"]
        assert card["prompt_fields"] == [] and card["embeddings"] == ["ink"]
