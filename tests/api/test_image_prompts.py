"""The field `image_prompts`: what reaches the worker from a body, a form and a batch's line, and what is refused."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.api.easel import Easel
from tests.api.test_control import EDITS, GENERATIONS, body, handed_on, inline
from tests.api.test_edits import as_file, pixels
from tests.api.world import CARD, Api, Worker, check_error

OFFERED = replace(CARD, controls=("edges",), image_prompts=("base", "plus"))


def test_a_body_hands_on_pictures_of_any_shape(shared: Api, easel: Easel, worker: Worker) -> None:
    first, second = pixels(40, 200, seed=1), pixels(900, 800, seed=2)
    with io.BytesIO(as_file(second)) as stream:
        file = shared.client.post("/v1/files", data={"purpose": "vision"}, files={"file": ("a.png", stream)}).json()
    asked = [
        {"model": "base", "image": inline(first), "strength": 0.5, "start": 0.25, "end": 0.75},
        {"model": "plus", "image": {"file_id": file["id"]}},
    ]
    control = [{"model": "edges", "image": inline(pixels())}]
    answer = shared.client.post(GENERATIONS, json=body(image_prompts=asked, control=control))
    assert answer.status_code == 200, answer.text
    claim = easel.seen[-1]
    told = [{k: v for k, v in one.items() if k != "image"} for one in claim.parameters["image_prompts"]]
    assert told == [{"model": "base", "strength": 0.5, "start": 0.25, "end": 0.75}, {"model": "plus"}]
    got = handed_on(worker, claim, "image_prompts")
    assert np.array_equal(got[0], first)
    reduced = Image.fromarray(second).resize((864, 768), Image.Resampling.LANCZOS)
    assert np.array_equal(got[1], np.asarray(reduced))
    assert np.array_equal(handed_on(worker, claim, "control")[0], pixels())
    job = shared.client.get(f"/v1/jobs/{answer.json()['job_id']}").json()
    assert job["status"] == "succeeded" and "request" not in job  # its pictures are not part of a request


def test_the_size_does_not_follow_them(shared: Api, easel: Easel) -> None:
    asked = body(image_prompts=[{"model": "base", "image": inline(pixels(168, 96))}])
    del asked["size"]
    assert shared.client.post(GENERATIONS, json=asked).json()["size"] == "128x128"


def test_a_form_hands_on_its_files(shared: Api, easel: Easel, worker: Worker) -> None:
    array, line = pixels(50, 60, seed=3), pixels(seed=4)
    prompts = json.dumps([{"model": "base", "strength": 0.5}, {"model": "plus"}])
    files = [("image", as_file(pixels())), ("control_image", as_file(line)), ("image_prompt[]", as_file(array)),
             ("image_prompt[]", as_file(pixels()))]  # fmt: skip
    data = {"prompt": "a hat", "size": "128x128", "image_prompts": prompts, "control": '[{"model": "edges"}]'}
    answer = shared.client.post(EDITS, data=data, files=files)
    assert answer.status_code == 200, answer.text
    claim = easel.seen[-1]
    assert [one["model"] for one in claim.parameters["image_prompts"]] == ["base", "plus"]
    assert np.array_equal(handed_on(worker, claim, "image_prompts")[0], array)
    assert np.array_equal(handed_on(worker, claim, "control")[0], line)
    for wrong, field in (
        ({"files": files[:3]}, "image_prompts.image"),
        ({"files": [*files, files[2]]}, "image_prompt"),
        ({"data": {**data, "image_prompts": "base"}}, "image_prompts"),
        ({"data": {**data, "image_prompt": "none"}, "files": files[:2]}, "image_prompt"),
    ):
        check_error(shared.client.post(EDITS, **{"data": data, "files": files, **wrong}), 400, field)


def test_what_is_refused_names_the_field(shared: Api) -> None:
    image = inline(pixels())
    good = {"model": "base", "image": image}
    for prompts, field in (
        ([{"model": "base"}], "image_prompts.image"),
        ([{"model": "other", "image": image}], "image_prompts.model"),
        ([{"model": "../x", "image": image}], "image_prompts.model"),
        ([{**good, "strength": 11}], "image_prompts.strength"),
        ([{**good, "start": 0.6, "end": 0.5}], "image_prompts.end"),
        ([{**good, "mode": 1}], "image_prompts.mode"),
        ([{**good, "image": {}}], "image_prompts.image"),
        ([{**good, "image": {"image_url": "https://example.com/a.png"}}], "image_prompts.image.image_url"),
        ([{**good, "image": {"image_url": "data:image/png;base64,AAAA"}}], "image_prompts.image"),
        ([good] * 5, "image_prompts"),
        ("base", "image_prompts"),
    ):
        check_error(shared.client.post(GENERATIONS, json=body(image_prompts=prompts)), 400, field)


def test_a_repeated_request_is_one_job_and_another_picture_is_another_request(shared: Api, easel: Easel) -> None:
    first, again, other = (
        shared.client.post(
            GENERATIONS, json=body(image_prompts=[{"model": "base", "image": inline(pixels(seed=n))}]),
            headers={"Idempotency-Key": "prompted"},
        )
        for n in (1, 1, 2)
    )  # fmt: skip
    assert first.json()["job_id"] == again.json()["job_id"]
    check_error(other, 422)


def test_a_batchs_lines_may_have_image_prompts(shared: Api, easel: Easel, worker: Worker) -> None:
    from tests.api.world import eventually

    array = pixels(seed=5)
    asked: dict[str, Any] = body(image_prompts=[{"model": "base", "image": inline(array)}])
    line = {"custom_id": "a", "method": "POST", "url": GENERATIONS, "body": asked}
    upload = {"file": ("lines.jsonl", json.dumps(line).encode())}
    file = shared.client.post("/v1/files", data={"purpose": "batch"}, files=upload).json()
    told = {"input_file_id": file["id"], "endpoint": GENERATIONS, "completion_window": "24h"}
    batch = shared.client.post("/v1/batches", json=told).json()
    eventually(lambda: shared.client.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed")
    assert np.array_equal(handed_on(worker, easel.seen[-1], "image_prompts")[0], array)


def test_the_work_of_a_job_counts_its_image_prompts(shared: Api) -> None:
    from contract.estimates import work_s
    from contract.image import ImageJob
    from contract.image_prompt import SHARE

    record = {"prompt": "x", "n": 1, "seed": 1, "steps": 4, "guidance_scale": 5.0, "width": 128, "height": 128}
    plain = ImageJob.read(record)
    prompted = ImageJob.read({**record, "image_prompts": [{"model": "base"}, {"model": "base", "end": 0.5}]})
    card = replace(CARD, costs=replace(CARD.costs, row_step_s={"128x128": 1.0}), deepcache="off")
    assert work_s(card, prompted) - work_s(card, plain) == pytest.approx(2 * 4 * SHARE)


def test_models_list_the_adapters(shared: Api) -> None:
    (card,) = shared.client.get("/v1/models").json()["data"]
    assert card["diptych"]["image_prompts"] == ["base", "plus"]
