"""The field `refiner`: checked against the model's card, and carried to the worker."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from api import admission
from contract.errors import Invalid
from contract.image import ImageJob
from contract.image_request import EditRequest, ImageRequest
from contract.refining import Refining
from tests.api.test_edits import EDITS, as_file, pixels
from tests.api.world import CARD, Api, Worker, check_error, eventually, opened, settings_of

DRAW = "/v1/images/generations"
REFINES = dataclasses.replace(CARD, name="refines", refiners=("xl-refiner",), controls=("edges",))


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"refiner": {"model": "other"}}, "refiner.model", "is not offered by this model: there is no other; it has"),
        ({"refiner": {"model": "../xl"}}, "refiner.model", "must be a name"),
        ({"refiner": {"model": "xl-refiner", "from": 0}}, "refiner.from", ""),
        ({"refiner": {"model": "xl-refiner", "from": 1}}, "refiner.from", ""),
        ({"refiner": {"model": "xl-refiner", "start": 0.5}}, "refiner.start", ""),
        ({"refiner": {"from": 0.5}}, "refiner.model", ""),
    ],
)
def test_what_no_refiner_does_is_refused_by_name(
    fields: dict[str, Any], param: str, said: str, redis_url: str, folder: Path
) -> None:
    settings = settings_of(redis_url, folder)
    with opened(settings) as (api, worker):
        worker.announce(card=REFINES)
        answer = api.post(DRAW, prompt="a fox", **fields)
        check_error(answer, 400, param, None)
        assert said in answer.json()["error"]["message"] and not worker.ids()
        card = eventually(lambda: api.client.get("/v1/models/refines").json().get("diptych"))
        assert card["refiners"] == ["xl-refiner"]


def test_an_edit_is_refined_but_for_a_soft_mask() -> None:
    for fields, masked in (({"strength": 0.5}, False), ({}, True)):
        asked = EditRequest.model_validate({"prompt": "a fox", "refiner": {"model": "xl-refiner"}, **fields})
        job = asked.complete(REFINES.offer, (64, 64), masked=masked)
        assert job.picture.refiner == Refining(model="xl-refiner") and job.picture.edit is not None
    soft = EditRequest.model_validate({"prompt": "a fox", "refiner": {"model": "xl-refiner"}, "soft_mask": True})
    with pytest.raises(Invalid, match="refiner: is not supported together with soft_mask"):
        soft.complete(REFINES.offer, (64, 64), masked=True)


def test_a_model_without_one_refines_no_edit(shared: Api, worker: Worker) -> None:
    known = worker.ids()
    data = {"prompt": "a hat", "refiner": '{"model": "xl-refiner"}'}
    answer = shared.client.post(EDITS, data=data, files={"image": as_file(pixels())})
    check_error(answer, 400, "refiner.model", "invalid_value")
    check_error(shared.post(DRAW, prompt="a fox", refiner={"model": "xl"}), 400, "refiner.model", "invalid_value")
    assert worker.ids() == known


def test_the_record_carries_it_under_the_requests_names() -> None:
    fields = ImageRequest.model_validate({"prompt": "a fox", "refiner": {"model": "xl-refiner", "from": 0.7}})
    parameters = admission.image_draft(fields, REFINES).parameters
    assert parameters["refiner"] == {"model": "xl-refiner", "from": 0.7}
    assert ImageJob.read(parameters).picture.refiner == Refining(model="xl-refiner", **{"from": 0.7})
    assert "refiner" not in admission.image_draft(ImageRequest(prompt="a fox"), REFINES).parameters
