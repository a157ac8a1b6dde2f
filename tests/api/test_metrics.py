"""/metrics of the API: what is shown is what is there, and no address of a client's making becomes a label."""

from __future__ import annotations

from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from core.jobs.keyring import Keyring
from tests.api.world import Api, check_error, eventually, opened, settings_of


def figures(client: httpx2.Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_queues_workers_and_requests(redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    with opened(settings) as (api, worker):
        worker.announce()
        eventually(lambda: api.client.get("/readyz").status_code == 200)
        ids = [api.order() for _ in range(3)]
        worker.take(ids[0])
        eventually(lambda: value(figures(api.client), "diptych_queue_jobs", queue="image", state="running") == 1)
        found = figures(api.client)
        assert value(found, "diptych_queue_jobs", queue="image", state="queued") == 2
        work_s = worker.job(ids[1]).work_ms / 1000
        of_model = {"queue": "image", "model": "emoji-xl"}
        assert value(found, "diptych_model_jobs", **of_model, state="queued") == 2
        assert value(found, "diptych_model_jobs", **of_model, state="running") == 1
        assert value(found, "diptych_model_work_seconds", **of_model, state="queued") == 2 * work_s
        assert value(found, "diptych_queue_wait_seconds", queue="image") == 2 * work_s
        assert value(found, "diptych_workers", state="ready") == 1 and value(found, "diptych_redis_up") == 1
        made = {"method": "POST", "route": "/v1/jobs", "status": "202"}
        assert value(found, "diptych_http_seconds_count", **made) == 3
        for id in ids:
            worker.store.cancel(id)
        worker.store.upkeep.sweep()  # which ends the model's queue
        eventually(lambda: value(figures(api.client), "diptych_model_jobs", **of_model, state="queued") == 0)
        for path in ("/v1/jobs/secret-1", "/v1/jobs/secret-2", "/nowhere/secret"):
            api.client.get(path)
        found = figures(api.client)
        look = {"method": "GET", "route": "/v1/jobs/{id}", "status": "404"}
        assert value(found, "diptych_http_seconds_count", **look) == 2
        assert "secret" not in str(found)


def test_with_keys_they_are_for_who_sees_all(redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    keyring = Keyring.of(settings)
    tokens = {scope: keyring.add(scope, [scope])[1] for scope in ("images", "admin")}
    keyring.close()
    with Api(settings) as api:
        check_error(api.client.get("/metrics"), 401, code="invalid_api_key")
        answers = {
            scope: api.client.get("/metrics", headers={"Authorization": f"Bearer {token}"})
            for scope, token in tokens.items()
        }
    check_error(answers["images"], 403, code="insufficient_scope")
    assert answers["admin"].status_code == 200
