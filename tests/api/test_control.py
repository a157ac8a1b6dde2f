"""The field `control`: what reaches the worker from a body, a form and a batch's line, and what is refused by name."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contract.image import ImageJob
from core.jobs.record import Claim
from tests.api.easel import Easel
from tests.api.test_edits import as_file, pixels
from tests.api.world import CARD, Api, Worker, check_error

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
OFFERED = replace(CARD, controls=("edges", "pose"))


def inline(array: np.ndarray) -> dict[str, str]:
    return {"image_url": "data:image/png;base64," + base64.b64encode(as_file(array)).decode()}


def body(**options: Any) -> dict[str, Any]:
    return {"prompt": "a hat", "size": "128x128", "steps": 2, **options}


def handed_on(worker: Worker, claim: Claim, field: str = "control") -> list[np.ndarray]:
    """The pictures of a field that the worker finds in the store, [H, W, 3] each."""
    found = [Image.open(io.BytesIO(worker.artifacts.get(one["image"]))) for one in claim.parameters[field]]
    assert all((image.format, image.mode) == ("PNG", "RGB") for image in found)
    return [np.asarray(image) for image in found]


def test_a_body_hands_on_its_pictures(shared: Api, easel: Easel, worker: Worker) -> None:
    first, second = pixels(seed=1), pixels(256, 256, seed=2)
    with io.BytesIO(as_file(second)) as stream:
        file = shared.client.post("/v1/files", data={"purpose": "vision"}, files={"file": ("a.png", stream)}).json()
    asked = [
        {"model": "edges", "image": inline(first), "strength": 0.5, "start": 0.25, "end": 0.75},
        {"model": "pose", "image": {"file_id": file["id"]}, "preprocessor": "canny"},
    ]
    answer = shared.client.post(GENERATIONS, json=body(control=asked))
    assert answer.status_code == 200, answer.text
    claim = easel.seen[-1]
    told = [{name: value for name, value in one.items() if name != "image"} for one in claim.parameters["control"]]
    assert told == [
        {"model": "edges", "strength": 0.5, "start": 0.25, "end": 0.75}, {"model": "pose", "preprocessor": "canny"}
    ]  # fmt: skip
    got = handed_on(worker, claim)
    resized = Image.fromarray(second).resize((128, 128), Image.Resampling.LANCZOS)
    assert np.array_equal(got[0], first) and np.array_equal(got[1], np.asarray(resized))
    job = shared.client.get(f"/v1/jobs/{answer.json()['job_id']}").json()
    assert job["status"] == "succeeded" and "request" not in job  # its pictures are not part of a request


def test_the_size_follows_the_picture_unless_it_is_given(shared: Api, easel: Easel) -> None:
    asked = body(control=[{"model": "edges", "image": inline(pixels(168, 96))}])
    del asked["size"]
    assert shared.client.post(GENERATIONS, json=asked).json()["size"] == "168x96"


def test_a_form_hands_on_its_files(shared: Api, easel: Easel, worker: Worker) -> None:
    array = pixels(seed=3)
    control = json.dumps([{"model": "edges", "strength": 0.5}, {"model": "pose"}])
    files = [("image", as_file(pixels())), ("control_image[]", as_file(array)), ("control_image[]", as_file(pixels()))]
    data = {"prompt": "a hat", "size": "128x128", "control": control}
    answer = shared.client.post(EDITS, data=data, files=files)
    assert answer.status_code == 200, answer.text
    assert [one["model"] for one in easel.seen[-1].parameters["control"]] == ["edges", "pose"]
    assert np.array_equal(handed_on(worker, easel.seen[-1])[0], array)
    for wrong, field in (
        ({"files": files[:2]}, "control.image"),
        ({"files": [*files, files[1]]}, "control_image"),
        ({"data": {**data, "control": "edges"}}, "control"),
        ({"data": {**data, "control_image": "none"}, "files": files[:1]}, "control_image"),
    ):
        check_error(shared.client.post(EDITS, **{"data": data, "files": files, **wrong}), 400, field)


def test_what_is_refused_names_the_field(shared: Api) -> None:
    image = inline(pixels())
    good = {"model": "edges", "image": image}
    for control, field in (
        ([{"model": "edges"}], "control.image"),
        ([{"model": "depth", "image": image}], "control.model"),
        ([{"model": "../x", "image": image}], "control.model"),
        ([{**good, "strength": 11}], "control.strength"),
        ([{**good, "strength": "much"}], "control.strength"),
        ([{**good, "start": 0.6, "end": 0.5}], "control.end"),
        ([{**good, "preprocessor": "pose"}], "control.preprocessor"),
        ([{**good, "preprocessor": "depth"}], "control.preprocessor"),  # the model has none
        ([{**good, "colour": 1}], "control.colour"),
        ([{**good, "image": {}}], "control.image"),
        ([{**good, "image": {"image_url": "https://example.com/a.png"}}], "control.image.image_url"),
        ([{**good, "image": {"image_url": "data:image/png;base64,AAAA"}}], "control.image"),
        ([good] * 5, "control"),
        ("edges", "control"),
    ):
        check_error(shared.client.post(GENERATIONS, json=body(control=control)), 400, field)
    wide = [{"model": "edges", "image": inline(pixels(128, 64))}]
    refused = shared.client.post(GENERATIONS, json=body(control=wide))
    check_error(refused, 400, "control.image")
    assert refused.json()["error"]["code"] == "mismatched_size" and "128x64" in refused.json()["error"]["message"]


def test_a_repeated_request_is_one_job_and_another_picture_is_another_request(shared: Api, easel: Easel) -> None:
    key = {"Idempotency-Key": "once"}
    first, again, other = (
        shared.client.post(
            GENERATIONS, json=body(control=[{"model": "edges", "image": inline(pixels(seed=n))}]), headers=key
        )
        for n in (1, 1, 2)
    )
    assert first.json()["job_id"] == again.json()["job_id"]
    check_error(other, 422)


def test_the_work_of_a_job_counts_its_controls(shared: Api, easel: Easel) -> None:
    from contract.estimates import work_s

    record = {"prompt": "x", "n": 1, "seed": 1, "steps": 4, "guidance_scale": 5.0, "width": 128, "height": 128}
    plain = ImageJob.read(record)
    controlled = ImageJob.read({**record, "control": [{"model": "edges"}, {"model": "edges", "end": 0.5}]})
    costs = replace(CARD.costs, row_step_s={"128x128": 1.0}, control_row_step_s={"128x128": 0.25})
    card = replace(CARD, costs=costs, deepcache="off")
    assert work_s(card, controlled) - work_s(card, plain) == pytest.approx(2 * (4 + 2) * 0.25)
    halved = replace(controlled, deepcache={"interval": 2})
    assert work_s(card, halved) - work_s(card, replace(plain, deepcache=halved.deepcache)) == pytest.approx(
        2 * (2 + 1) * 0.25
    )


def test_a_batchs_lines_may_have_controls(shared: Api, easel: Easel, worker: Worker, tmp_path: Path) -> None:
    from tests.api.world import eventually

    array = pixels(seed=5)
    line = {"custom_id": "a", "method": "POST", "url": GENERATIONS,
            "body": body(control=[{"model": "edges", "image": inline(array)}])}  # fmt: skip
    upload = {"file": ("lines.jsonl", json.dumps(line).encode())}
    file = shared.client.post("/v1/files", data={"purpose": "batch"}, files=upload).json()
    asked = {"input_file_id": file["id"], "endpoint": GENERATIONS, "completion_window": "24h"}
    batch = shared.client.post("/v1/batches", json=asked).json()
    eventually(lambda: shared.client.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed")
    assert np.array_equal(handed_on(worker, easel.seen[-1])[0], array)
