"""Edits that name their picture: as jobs and as JSON, by an uploaded file's id or as a data URL; and such files."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx2
import numpy as np
import pytest

from api.pictures.uploads import MAX_BYTES
from tests.api.pictures.test_edits import PNG, as_file, bomb, handed_on, hole, pixels
from tests.api.world import Api, Worker, check_error, ok

EDITS = "/v1/images/edits"


def file(api: Api, data: bytes = PNG, purpose: str = "vision", name: str = "cat.png") -> httpx2.Response:
    return api.client.post("/v1/files", data={"purpose": purpose}, files={"file": (name, data)})


def uploaded(api: Api, data: bytes = PNG, **more: str) -> dict[str, str]:
    answer = ok(file(api, data, **more))
    return {"file_id": str(answer.json()["id"])}


def inline(data: bytes = PNG, kind: str = "png") -> dict[str, str]:
    return {"image_url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}


def order(api: Api, **fields: Any) -> httpx2.Response:
    return api.post("/v1/jobs", **{"type": "edit", "prompt": "a hat", "steps": 10, **fields})


# -- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [uploaded, lambda api, data=PNG: inline(data)], ids=["file", "data URL"])
def test_an_edit_is_a_job(shared: Api, worker: Worker, named: Any) -> None:
    array = pixels(seed=3)
    fields = {"images": [named(shared, as_file(array))], "mask": [named(shared, as_file(hole()))]}
    id = ok(order(shared, **fields, strength=0.5, seed=7, n=2), 202).json()["id"]
    claim = worker.take(id)
    assert claim.parameters["edit"]["strength"] == 0.5 and claim.parameters["seed"] == 7
    image, mask = handed_on(worker, claim)
    assert np.array_equal(image, array) and mask is not None and set(np.unique(mask)) == {0, 255}
    assert len(str(worker.redis.hgetall(f"diptych:job:{id}"))) < 3000, "the picture itself is in no record"
    made = worker.finish(claim)
    told = shared.job(id)
    assert told["status"] == "succeeded" and shared.get(told["images"][0]["url"]).content == made[0]


def test_a_job_needs_the_file_no_longer_once_it_is_made(shared: Api, worker: Worker) -> None:
    image = uploaded(shared, as_file(pixels(seed=4)))
    id = order(shared, images=[image]).json()["id"]
    assert shared.delete(f"/v1/files/{image['file_id']}").json()["deleted"] is True
    claim = worker.take(id)
    assert np.array_equal(handed_on(worker, claim)[0], pixels(seed=4))
    assert worker.store.leases.fail(id, claim.attempt, "engine_error", "no")
    again = shared.client.post(f"/v1/jobs/{id}/requeue").json()["id"]
    assert worker.job(again).inputs == worker.job(id).inputs
    worker.work(again)
    check_error(order(shared, images=[image]), 404, "images.file_id", "file_not_found")


@pytest.mark.parametrize("named", [uploaded, lambda api, data=PNG: inline(data)], ids=["file", "data URL"])
def test_a_deadline_is_checked_for_the_pictures_own_size(shared: Api, named: Any) -> None:
    """Not for the model's native size, which takes four times as long."""
    fields = {"deadline_s": 1.2, "steps": 20, "priority": 0}
    ok(order(shared, images=[named(shared, as_file(pixels(64, 64)))], **fields), 202)
    large = order(shared, images=[named(shared, as_file(pixels(128, 128)))], **fields)
    check_error(large, 400, "deadline_s", "deadline_hopeless")


def test_a_job_of_a_chosen_id_is_made_once(shared: Api, worker: Worker) -> None:
    def put(data: bytes = PNG, **more: Any) -> httpx2.Response:
        fields = {"type": "edit", "prompt": "x", "images": [inline(data)], **more}
        return shared.client.put("/v1/jobs/edit-of-mine", json=fields)

    known = worker.ids()
    assert [put().status_code for _ in range(3)] == [202] * 3 and worker.ids() - known == {"edit-of-mine"}
    for other in (put(as_file(pixels(seed=1))), put(strength=0.3)):
        check_error(other, 422, code="idempotency_conflict")
    worker.work("edit-of-mine")


# -- refusals --------------------------------------------------------------------------------------------------------

ZEROS = "file-" + "0" * 24


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"images": None}, 400, "images", "missing_required_parameter"),
        ({"images": []}, 400, "images", "invalid_value"),
        ({"images": [inline(), inline()]}, 400, "images", "too_many_images"),
        ({"images": [{}]}, 400, "images", "invalid_value"),
        ({"images": [{**inline(), "file_id": ZEROS}]}, 400, "images", "invalid_value"),
        ({"images": [{"file_id": ZEROS}]}, 404, "images.file_id", "file_not_found"),
        ({"images": [{"file_id": "../../etc"}]}, 404, "images.file_id", "file_not_found"),
        ({"images": [{"url": "x"}]}, 400, "images.url", "unknown_parameter"),
        ({"images": ["data:image/png;base64,AA=="]}, 400, "images", "invalid_type"),
        ({"images": inline()}, 400, "images", None),
        ({"images": [{"image_url": "http://127.0.0.1/x.png"}]}, 400, "images.image_url", "invalid_value"),
        ({"images": [inline(b"hello")]}, 400, "images", "invalid_value"),
        ({"images": [{"image_url": "data:image/png;base64,AAAAA"}]}, 400, "images.image_url", "invalid_value"),
        ({"images": [inline(bomb(20_000, 20_000))]}, 400, "images", "invalid_value"),
        ({"images": [inline(PNG[:-500])]}, 400, "images", "invalid_value"),
        ({"mask": inline(as_file(hole(64, 64)))}, 400, "mask", "invalid_value"),
        ({"mask": inline()}, 400, "mask", "invalid_value"),
        ({"mask": {}}, 400, "mask", "invalid_value"),
        ({"mask": [inline()] * 2}, 400, "mask", "invalid_type"),
        ({"strength": 1.5}, 400, "strength", "invalid_value"),
        ({"strength": "0.5"}, 400, "strength", "invalid_type"),
        ({"stream": True}, 400, "stream", "invalid_value"),
        ({"type": "image"}, 400, "images", "unknown_parameter"),
        ({"type": "text"}, 400, "type", "invalid_value"),
    ],
    ids=range(24),
)
def test_what_is_wrong_is_refused_by_name(
    shared: Api, worker: Worker, fields: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    known = worker.ids()
    check_error(order(shared, **{"images": [inline()], **fields}), status, param, code)
    assert worker.ids() == known


def test_what_is_larger_than_a_body_is_handed_in_as_a_file(shared: Api, worker: Worker) -> None:
    large = as_file(pixels(800, 600))
    assert len(large) > 1_100_000
    refused = order(shared, images=[inline(large)])
    check_error(refused, 413, code="body_too_large")
    assert "POST /v1/files" in refused.json()["error"]["message"]
    id = order(shared, images=[uploaded(shared, large)]).json()["id"]
    worker.work(id)


@pytest.mark.parametrize(
    ("data", "status"),
    [(b"", 400), (bomb(4097, 4096), 400), (as_file(pixels(), "GIF"), 400), (PNG + bytes(MAX_BYTES), 413)],
    ids=range(4),
)
def test_a_file_that_is_no_picture_is_not_kept(shared: Api, data: bytes, status: int) -> None:
    before = shared.get("/v1/files").json()
    check_error(file(shared, data), status, "file")
    assert shared.get("/v1/files").json() == before


@pytest.mark.parametrize(("form", "kind"), [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp")])
def test_a_picture_is_kept_as_it_was(shared: Api, form: str, kind: str) -> None:
    data = as_file(pixels(seed=5), form)
    kept = file(shared, data, name="a<b>.html").json()
    assert (kept["purpose"], kept["bytes"], kept["filename"]) == ("vision", len(data), "file")
    answer = shared.get(f"/v1/files/{kept['id']}/content")
    assert answer.content == data and answer.headers["content-type"] == kind
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_files_serve_their_purpose_alone(shared: Api) -> None:
    lines = uploaded(shared, b'{"custom_id": "a"}', purpose="batch")
    check_error(order(shared, images=[lines]), 400, "images.file_id", "invalid_value")
    fields = {"input_file_id": uploaded(shared)["file_id"], "endpoint": EDITS, "completion_window": "24h"}
    check_error(shared.post("/v1/batches", **fields), 400, "input_file_id", "invalid_value")
    check_error(file(shared, purpose="assistants"), 400, "purpose", "invalid_value")


def test_lines_of_another_endpoint_are_wrong(shared: Api) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/images/generations", "body": {"prompt": "x"}}
    fields = {"input_file_id": uploaded(shared, json.dumps(line).encode(), purpose="batch")["file_id"]}
    batch = shared.post("/v1/batches", **fields, endpoint=EDITS, completion_window="24h").json()
    assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "mismatched_endpoint"


def test_without_a_text_model_an_edit_with_it_is_refused(shared: Api, worker: Worker) -> None:
    known = worker.ids()
    check_error(order(shared, images=[inline()], expand_prompt=True), 400, "expand_prompt", "no_text_model")
    form = {"prompt": "a hat", "expand_prompt": "true"}
    answer = shared.client.post(EDITS, data=form, files={"image": PNG})
    check_error(answer, 400, "expand_prompt", "no_text_model")
    assert worker.ids() == known
