"""/v1/models, /healthz and /readyz, and KServe's addresses of the same: what is told of workers, and when."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from api.schemas import EditJobFields, JobFields
from contract.image_prompt import ImagePrompt
from core.config import Settings
from tests.api.world import CARD, TEXT, Api, Worker, check_error, eventually, opened


def check_kserve(api: Api, path: str, **expected: object) -> None:
    """The answer of the Open Inference Protocol, by which a probe sees the status alone."""
    answer = api.get(path)
    body = answer.json()
    assert {name: body[name] for name in expected} == expected
    assert answer.status_code == (200 if all(expected.values()) else 503)
    assert ("error" in body) == (answer.status_code == 503) and answer.headers["cache-control"] == "no-store"


def test_kserve_is_told_the_same(settings: Settings) -> None:
    """Of a model whose name has slashes, too; one that no worker serves any more is known and not ready."""
    with opened(settings, dataclasses.replace(CARD, name="someone/xl")) as (api, worker):
        worker.announce()
        eventually(lambda: api.get("/v2/models/emoji-xl/ready").status_code == 200)
        check_kserve(api, "/v2/health/live", live=True)
        check_kserve(api, "/v2/health/ready", ready=True)
        check_kserve(api, "/v2/models/emoji-xl/ready", name="emoji-xl", ready=True)
        check_kserve(api, "/v2/models/someone/xl/ready", name="someone/xl", ready=False)
        check_error(api.get("/v2/models/other/ready"), 404, code="model_not_found")
        worker.registry.deregister(worker.name)
        eventually(lambda: api.get("/readyz").status_code == 503)
        check_kserve(api, "/v2/health/live", live=True)
        check_kserve(api, "/v2/health/ready", ready=False)
        check_kserve(api, "/v2/models/emoji-xl/ready", name="emoji-xl", ready=False)


def test_before_any_worker_and_while_one_starts(settings: Settings) -> None:
    with opened(settings) as (api, worker):
        assert api.get("/healthz").json() == {"status": "ok"}
        assert api.get("/v1/models").json() == {
            "object": "list",
            "data": [],
            "previous": None,
            "next": None,
            "results": [],
        }
        not_ready = api.get("/readyz")
        assert not_ready.status_code == 503 and not_ready.json()["status"] == "not_ready"
        assert not_ready.json()["error"]["message"] == "No worker is ready." and not_ready.json()["redis"] is True
        refused = api.draw()
        check_error(refused, 503, code="no_model")
        assert refused.headers["retry-after"]
        check_error(api.draw(model="emoji-xl"), 503, code="no_model")
        check_error(api.draw(prompt=""), 503, code="no_model")
        check_error(api.draw(steps=0), 400, "steps")
        assert worker.ids() == set()

        worker.announce("starting", "loading emoji-xl", card=None)
        starting = eventually(lambda: (r := api.get("/readyz")).json()["workers"]["starting"] and r)
        assert starting.status_code == 503
        assert "loading emoji-xl" in starting.json()["error"]["message"]
        assert starting.json()["messages"] == [
            {"worker": worker.name, "state": "starting", "message": "loading emoji-xl"}
        ]
        check_error(api.draw(), 503, code="no_model")

        worker.announce()
        api.order()  # at once: what is not known is looked for
        ready = eventually(lambda: (r := api.get("/readyz")).status_code == 200 and r)
        assert ready.json() == {
            "status": "ready", "redis": True, "workers": {"ready": 1, "starting": 0, "draining": 0}, "messages": [],
            "loading": [],
        }  # fmt: skip

        worker.announce("draining")
        eventually(lambda: api.get("/readyz").status_code == 503)
        worker.registry.deregister(worker.name)
        eventually(lambda: not api.models()[0]["diptych"]["live"])
        api.order()  # the model is known: the job waits for a worker
        api.order(deadline_s=0.01)  # nobody is there to say that it is hopeless; it expires by itself


def test_models_in_openais_shape(shared: Api) -> None:
    eventually(lambda: shared.models())
    (model,) = shared.models()
    card = model.pop("diptych")
    assert model == {"id": "emoji-xl", "object": "model", "created": 1_700_000_000, "owned_by": "diptych"}
    expected = json.loads(json.dumps(dataclasses.asdict(CARD))) | {
        "live": True, "loading": False, "workers": 1, "loaded_workers": 1, "native_size": "128x128",
        "sizes": ["64x64", "96x168", "128x128", "168x96"], "limits": {**dataclasses.asdict(CARD.limits),
        "max_seed": 2**53 - 1},
    }  # fmt: skip
    del expected["name"], expected["native"]
    assert card == expected and card["modality"] == "image"
    assert shared.get("/v1/models/emoji-xl").json() == {**model, "diptych": card}


def test_a_model_that_nobody_serves_can_be_forgotten(settings: Settings) -> None:
    with Worker(settings) as old, Worker(settings, "worker-2") as new, Api(settings) as api:
        old.announce()
        new.announce(card=dataclasses.replace(CARD, name="my/next"))
        eventually(lambda: len(api.models()) == 2)
        waiting = [api.order(model="emoji-xl") for _ in range(3)]
        others = [api.order(model="my/next"), api.order(model="my/next")]
        running = old.take(waiting[0])
        for _ in range(2):  # it is served; then a job of it runs
            check_error(api.delete("/v1/models/emoji-xl"), 409, "name", "model_served")
            old.registry.deregister(old.name)
        assert api.order(model="emoji-xl"), "who comes meanwhile waits for a worker"
        old.finish(running)
        told = api.delete("/v1/models/emoji-xl")
        assert told.json() == {"id": "emoji-xl", "object": "model", "deleted": True, "cancelled": 3}
        assert [old.job(id).state for id in waiting] == ["succeeded", "cancelled", "cancelled"]
        assert [old.job(id).state for id in others] == ["queued", "queued"]
        check_error(api.post("/v1/jobs", type="image", prompt="a cat", model="emoji-xl"), 404, "model")
        check_error(api.delete("/v1/models/emoji-xl"), 404, "model", "model_not_found")
        check_error(api.client.post(f"/v1/jobs/{waiting[1]}/requeue"), 404, "model", "model_not_found")
        check_error(api.delete("/v1/models/my/next"), 409, "name", "model_served")
        assert api.job(api.order())["model"] == "my/next"
        old.announce()
        eventually(lambda: api.post("/v1/jobs", type="image", prompt="a", model="emoji-xl").status_code == 202)


def test_an_adapters_name_is_listed_once(settings: Settings) -> None:
    """Two models may have one of that name, or a model."""
    names = ("emoji-lm", "my/lm")
    with Worker(settings) as one, Worker(settings, "worker-2") as two, Api(settings) as api:
        for worker, name in zip((one, two), names, strict=True):
            worker.announce(card=dataclasses.replace(TEXT, name=name, adapters=("my/lm", "poet")))
        eventually(lambda: len(api.models()) > 2)
        assert sorted(model["id"] for model in api.models()) == [*names, "poet"]


def test_the_documentation_shows_the_bodies(shared: Api) -> None:
    document = shared.get("/openapi.json").json()
    form = document["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]
    images = (
        form["application/json"]["schema"]["properties"]["images"],
        form["multipart/form-data"]["schema"]["properties"]["image"]["oneOf"][1],
    )
    assert [entry["maxItems"] for entry in images] == 2 * [1 + ImagePrompt.MOST], "as many as one is drawn from"
    parameters = document["paths"]["/v1/jobs/{id}/events"]["get"]["parameters"]
    assert {parameter["name"] for parameter in parameters} == {"id", "Last-Event-ID", "last_event_id"}
    assert "HTTPValidationError" not in str(document)
    assert shared.get("/docs").status_code == 200


def test_the_handbook_names_every_field_and_code() -> None:
    root = Path(__file__).resolve().parents[2]
    handbook = (root / "docs" / "api.md").read_text("utf-8")
    for name in {**JobFields.model_fields, **EditJobFields.model_fields}:
        assert f"`{name}`" in handbook, name
    for part in (root / "api").glob("*.py"):
        for code in re.findall(r'code="([a-z_]+)"', part.read_text("utf-8")):
            assert f"`{code}`" in handbook or code == "client_closed_request", code  # nobody reads that one
