"""/metrics of the API: what is shown is what is there, and no address of a client's making becomes a label."""

from __future__ import annotations

from dataclasses import replace

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.config import Settings
from tests.api.world import CARD, Api, Worker, bearer, check_error, eventually, token_of
from tests.core.jobs.drafts import make

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def figures(client: httpx2.Client) -> Figures:
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(found: Figures, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_queues_workers_and_requests(alone: tuple[Api, Worker]) -> None:
    api, worker = alone
    ids = [api.order() for _ in range(3)]
    worker.take(ids[0])
    eventually(lambda: value(figures(api.client), "diptych_queue_jobs", queue="image", state="running") == 1)
    found = figures(api.client)
    assert value(found, "diptych_queue_jobs", queue="image", state="queued") == 2
    work_s = worker.job(ids[1]).work_ms / 1000
    assert value(found, "diptych_queue_wait_seconds", queue="image") == 2 * work_s
    assert value(found, "diptych_workers", state="ready") == 1 and value(found, "diptych_redis_up") == 1
    check_model(found, CARD.name, queued=2, running=1, work_s=work_s, ready=1)
    assert value(found, "diptych_http_seconds_count", method="POST", route="/v1/jobs", status="202") == 3
    for id in ids:
        worker.store.cancel(id)
    worker.store.upkeep.sweep()  # which ends the model's queue
    eventually(lambda: value(figures(api.client), "diptych_model_jobs", model=CARD.name, state="queued") == 0)
    for path in ("/v1/jobs/secret-1", "/v1/jobs/secret-2", "/nowhere/secret"):
        api.get(path)
    found = figures(api.client)
    assert value(found, "diptych_http_seconds_count", method="GET", route="/v1/jobs/{id}", status="404") == 2
    assert "secret" not in str(found)


def check_model(found: Figures, model: str, *, queued: int, running: int, work_s: float, ready: int) -> None:
    """A model's load in jobs and seconds, and under vLLM's names."""
    for state, count, alias in (("queued", queued, "waiting"), ("running", running, "running")):
        assert value(found, "diptych_model_jobs", model=model, state=state) == count
        assert value(found, "diptych_model_work_seconds", model=model, state=state) == pytest.approx(count * work_s)
        assert value(found, f"vllm:num_requests_{alias}", model_name=model) == count
    assert value(found, "diptych_model_workers", model=model, state="ready") == ready


def test_a_model_without_workers_keeps_its_load(alone: tuple[Api, Worker]) -> None:
    """What scales from zero reads it: the last card makes the estimate, and an idle model shows 0."""
    api, worker = alone
    worker.announce(card=replace(CARD, name="idle"))
    worker.registry.deregister(worker.name)
    eventually(lambda: value(figures(api.client), "diptych_workers", state="ready") == 0)
    id = api.order(model=CARD.name)
    waiting = {"model": CARD.name, "state": "queued"}
    eventually(lambda: value(figures(api.client), "diptych_model_jobs", **waiting) == 1)
    found = figures(api.client)
    work_s = worker.job(id).work_ms / 1000
    assert work_s > 0
    check_model(found, CARD.name, queued=1, running=0, work_s=work_s, ready=0)
    check_model(found, "idle", queued=0, running=0, work_s=0, ready=0)
    make(worker.store, modality="text", model="unmeasured")  # its estimate is 0, but not its work
    unmeasured = ("diptych_model_work_seconds", frozenset({"model": "unmeasured", "state": "queued"}.items()))
    eventually(lambda: figures(api.client).get(unmeasured, 0) > 0)


def test_with_keys_they_are_for_who_sees_all(settings: Settings) -> None:
    images, admin = (bearer(token_of(settings, scope, [scope])) for scope in ("images", "admin"))
    with Api(settings) as api:
        check_error(api.get("/metrics"), 401, code="invalid_api_key")
        check_error(api.get("/metrics", headers=images), 403, code="insufficient_scope")
        assert api.get("/metrics", headers=admin).status_code == 200
