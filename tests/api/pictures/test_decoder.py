"""Pictures are decoded once for equal ones, measured once for a file, and charged to the tenant's turns."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import httpx2
import pytest

from api.concurrency.process_pool import CallFailed, CallTimeout
from api.service import Service
from core.config import Settings
from core.jobs.files import FileStore
from tests.api.pictures.test_edits import PNG, as_file, hole, pixels
from tests.api.pictures.test_references import inline, uploaded
from tests.api.world import CARD, Api, bearer, check_error, ok, opened, token_of
from tests.faults.payloads import CARD_OF_NINE, nine_times

EDITS = "/v1/images/edits"
OFFERED = CARD_OF_NINE


def service_of(api: Api) -> Service:
    service: Service = api.server.config.app.state.service  # type: ignore[union-attr]
    return service


def order(api: Api, **fields: Any) -> httpx2.Response:
    return api.post("/v1/jobs", **{"type": "edit", "prompt": "x", "steps": 2, **fields})


def test_a_file_is_measured_when_it_is_handed_in_and_named_nine_times_decoded_by_size(
    shared: Api, calls: Counter[str]
) -> None:
    file = uploaded(shared, as_file(pixels(200, 120)))
    assert calls == {"measure": 1}
    with closing(FileStore(shared.settings.redis_url)) as store:
        record = store.file(file["file_id"])
    assert record is not None and record.picture_size == (200, 120)
    calls.clear()
    assert order(shared, **nine_times(file["file_id"])).status_code == 202
    assert calls == {"measure": 1, "fit_picture": 2}, (
        "whether it may be transparent; at the job's size for image and controls, and at the image prompts' own"
    )


def test_a_picture_in_the_body_is_measured_once(shared: Api, calls: Counter[str]) -> None:
    ok(order(shared, images=[inline(as_file(pixels()))], mask=inline(as_file(hole()))), 202)
    assert calls == {"measure": 2, "fit_picture": 1, "fit_mask": 1}
    calls.clear()
    ok(order(shared, images=[inline(as_file(hole()))]), 202)
    assert calls == {"measure": 1, "find_hole": 1, "fit_picture": 1, "fit_mask": 1}, "it is its own mask"


@pytest.mark.parametrize("fields", [{"steps": 100_000}, {"scheduler": "none"}, {"model": "no-such"}, {"n": 99}])
def test_a_refused_request_decodes_nothing(shared: Api, calls: Counter[str], fields: dict[str, Any]) -> None:
    assert order(shared, images=[inline()], **fields).status_code in (400, 404)
    data = {"prompt": "x", **{name: str(value) for name, value in fields.items()}}
    assert shared.client.post(EDITS, data=data, files={"image": PNG}).status_code in (400, 404)
    assert not calls


@pytest.mark.parametrize("error", [CallTimeout("late"), CallFailed("no process")])
def test_an_overloaded_machine_is_a_503_with_a_cause(
    shared: Api, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def late(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(service_of(shared).pictures._processes, "call", late)
    answer = order(shared, images=[inline()])
    check_error(answer, 503, code="decoder_overloaded")
    assert answer.headers["retry-after"] == "10"


def test_the_quota_comes_before_decoding_and_counts_no_refused_picture(settings: Settings) -> None:
    """The rate limit comes before any look at a picture."""
    rate, quota = (token_of(settings, name, ["images"], **{name: "1/day"}) for name in ("rate", "quota"))
    with opened(settings, CARD) as (api, _):

        def edit(token: str, image: bytes, **more: Any) -> httpx2.Response:
            fields = {"type": "edit", "prompt": "x", "images": [inline(image)], **more}
            return api.client.post("/v1/jobs", json=fields, headers=bearer(token))

        for refused in (edit(quota, b"no picture"), edit(quota, PNG, mask=inline(as_file(hole(8, 8))))):
            check_error(refused, 400)
        damaged = as_file(pixels())[:-40]  # its structure is whole as far as it goes
        for token, code in ((rate, "rate_limit_exceeded"), (quota, "quota_exceeded")):
            assert edit(token, PNG).status_code == 202
            check_error(edit(token, damaged), 429, code=code)
        check_error(edit(rate, b"no picture"), 429, code="rate_limit_exceeded")
