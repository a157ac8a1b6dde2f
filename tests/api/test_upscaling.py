"""The field `upscale`: checked against the model's card, counted as work, and told as the size of what came of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from api import admission
from api.presentation import size
from contract.image import ImageJob
from contract.image_request import ImageRequest
from contract.upscale import Upscale
from core.jobs.record import Job, JobState
from tests.api.test_edits import EDITS, as_file, pixels
from tests.api.world import CARD, Api, Worker, check_error, eventually, opened, settings_of

DRAW = "/v1/images/generations"
ENLARGES = dataclasses.replace(
    CARD, name="enlarges", upscalers=("x4",), costs=dataclasses.replace(CARD.costs, upscale_megapixel_s=100.0)
)


@pytest.mark.parametrize(
    ("upscale", "param", "said"),
    [
        ({"model": "x8"}, "upscale.model", "is not offered by this model: there is no x8; GET /v1/models lists"),
        ({"model": "../x4"}, "upscale.model", "must be a name"),
        ({"model": "x4", "scale": 9}, "upscale.scale", ""),
        ({"model": "x4", "scale": 0.5}, "upscale.scale", ""),
        ({"scale": 2}, "upscale.model", ""),
        ({"model": "x4", "tile": 3}, "upscale.tile", ""),
        ("x4", "upscale", ""),
    ],
)
def test_what_no_network_does_is_refused_by_name(
    upscale: Any, param: str, said: str, redis_url: str, folder: Path
) -> None:
    settings = settings_of(redis_url, folder)
    with opened(settings) as (api, worker):
        worker.announce(card=ENLARGES)
        answer = api.post(DRAW, prompt="a fox", upscale=upscale)
        check_error(answer, 400, param, None)
        assert said in answer.json()["error"]["message"] and not worker.ids()
        card = eventually(lambda: api.client.get("/v1/models/enlarges").json().get("diptych"))
        assert card["upscalers"] == ["x4"]


def test_a_model_without_networks_says_so(shared: Api, worker: Worker) -> None:
    known = worker.ids()
    answer = shared.post(DRAW, prompt="a fox", upscale={"model": "x4"})
    check_error(answer, 400, "upscale.model", "invalid_value")
    assert "it has none" in answer.json()["error"]["message"] and worker.ids() == known


def test_a_form_tells_it_as_json(shared: Api, worker: Worker) -> None:
    data = {"prompt": "a hat", "upscale": '{"model": "x4", "scale": 2}'}
    answer = shared.client.post(EDITS, data=data, files={"image": as_file(pixels())})
    check_error(answer, 400, "upscale.model", "invalid_value")  # it was read, and this model has none


def test_it_counts_as_the_work_that_was_measured() -> None:
    def draft(**fields: Any) -> Any:
        return admission.image_draft(ImageRequest(prompt="a fox", steps=10, seed=1, **fields), ENLARGES)

    plain, enlarged = draft(), draft(upscale=Upscale(model="x4", scale=2))
    assert enlarged.work_ms - plain.work_ms == round(100_000 * 128 * 128 / 1e6)
    assert ImageJob.read(enlarged.parameters).picture.upscale == Upscale(model="x4", scale=2)
    assert "upscale" not in plain.parameters


def test_the_size_of_an_answer_is_the_pictures_own() -> None:
    parameters = admission.image_draft(ImageRequest(prompt="a fox"), CARD).parameters
    ended = (None, None, None, 1, 0, "", None, None, None, False, 0)
    job = Job("1", "image", "m", JobState.SUCCEEDED, parameters, 5, 0.0, *ended)
    assert size(job) == "128x128"
    assert size(dataclasses.replace(job, result={"images": [{"width": 512, "height": 384}]})) == "512x384"
