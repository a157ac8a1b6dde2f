"""What one key leaves in Redis takes no room of another's: limits in bytes at every door that creates something."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from api.service import Service
from contract.card import TextCard, TextOffer
from core.artifacts import lay_result
from core.config import Settings
from core.jobs.cards import WorkerCard
from core.jobs.record import JobState
from core.jobs.tenants import TenantRecords
from tests.api.batches.test_routes import URL, lines
from tests.api.easel import asked
from tests.api.test_access import JOB, Client, Guarded, guarding
from tests.api.world import BATCH, PATIENCE_S, TEXT, changed, check_error, eventually, ok

CHAT, EMBED = "/v1/chat/completions", "/v1/embeddings"
MIB = 2**20
ASK = {"messages": [{"role": "user", "content": "hello"}]}
LARGE = {**JOB, "negative_prompt": "é" * 9_000, "prompt_2": "é" * 9_000}


@pytest.fixture
def guarded(settings: Settings) -> Iterator[Guarded]:
    with guarding(changed(settings, rate="100000/second", key_queued="")) as guarded:
        yield guarded
        guarded.worker.redis.config_set("maxmemory", 0)


def limit(guarded: Guarded, memory: int) -> None:
    """Give Redis so much memory beyond what it holds, and wait until the API knows."""
    client = guarded.worker.redis
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + memory)
    most = int(client.config_get("maxmemory")["maxmemory"])
    service: Service = guarded.api.server.config.app.state.service  # type: ignore[union-attr]
    eventually(lambda: service.cards.now.memory.most == most)


def announce(guarded: Guarded, text: TextCard) -> None:
    """Announce a worker of a text model."""
    card = WorkerCard("texts", "here", 1, "ready", "", 1.5, [text])
    guarded.worker.registry.announce(card, 600)


def fill(client: Client, path: str, body: dict[str, Any], most: int = 3000) -> httpx2.Response:
    """Repeat a request until it is refused; returns the refusal."""
    for _ in range(most):
        answer = client.post(path, json=body)
        if answer.status_code >= 400:
            return answer
    raise AssertionError("it was never refused")


def test_whoever_fills_its_share_is_refused_alone(guarded: Guarded) -> None:
    """By jobs that wait and by those that have ended; what it erases or is erased of a revoked key makes room."""
    mallory, alice = guarded.key(), guarded.key()
    limit(guarded, 20 * MIB)
    check_error(fill(mallory, "/v1/jobs", LARGE), 429, code="store_share_full")
    used = int(guarded.worker.redis.info("memory")["used_memory"])
    assert used < 0.75 * int(guarded.worker.redis.config_get("maxmemory")["maxmemory"])
    for _ in range(20):
        assert alice.order().status_code == 202
    file = {"files": {"file": ("x", b"{}")}, "data": BATCH}
    while (upload := mallory.post("/v1/files", **file)).status_code == 200:
        pass
    refused = check_error(upload, 429, code="store_share_full")
    assert "DELETE" not in refused["message"] and upload.headers["x-should-retry"] == "false"
    mine = mallory.get("/v1/jobs", params={"limit": 2}).json()["data"]
    assert mallory.post(f"/v1/jobs/{mine[0]['id']}/cancel").status_code == 200
    check_error(mallory.post("/v1/jobs", json=LARGE), 429, code="store_share_full")
    for job in mine:
        assert mallory.delete(f"/v1/jobs/{job['id']}").status_code == 200
    assert mallory.post("/v1/jobs", json=LARGE).status_code == 202
    records = TenantRecords(guarded.api.settings.redis_url)
    assert guarded.keyring.revoke(mallory.key_id, end=True)
    assert records.erase(guarded.worker.store, mallory.key_id).store_bytes > 6 * MIB
    assert records.footprint(mallory.key_id) == 0 and records.footprint(alice.key_id) > 0
    records.close()


def test_a_batch_needs_room_for_its_lines(guarded: Guarded) -> None:
    client = guarded.key(quota="5000/day")
    limit(guarded, 20 * MIB)
    data = lines(*[{"prompt": "a cat"}] * 2000)
    file = client.post("/v1/files", files={"file": ("x", data)}, data=BATCH).json()["id"]
    body = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
    refused = client.post("/v1/batches", json=body)
    check_error(refused, 429, code="store_share_full")
    assert "x-ratelimit-remaining-pictures" not in refused.headers
    assert client.order(n=1).headers["x-ratelimit-remaining-pictures"] == "4999", "its images were given back"


def test_nobody_fills_the_rest_that_ends_and_the_operator_need(guarded: Guarded) -> None:
    client, worker = guarded.key(), guarded.worker
    job = client.order().json()["id"]
    worker.redis.setrange("ballast", 20 * MIB, "x")
    limit(guarded, MIB)
    check_error(client.order(), 503, code="store_full")
    upload = client.post("/v1/files", files={"file": ("x", b"{}")}, data=BATCH)
    check_error(upload, 503, code="store_full")
    worker.work(job)
    assert worker.is_(job, JobState.SUCCEEDED)
    key, _ = guarded.keyring.add("another")
    assert guarded.keyring.revoke(key.id)


def test_the_text_of_chats_that_nobody_runs_does_not_stay(guarded: Guarded) -> None:
    """They expire, are cancelled, or are refused before they have a record."""
    client, redis = guarded.key(), guarded.worker.redis
    chat = {"messages": [{"role": "user", "content": "x" * 1_000_000}], "max_tokens": 1, "deadline_s": 0.01}
    announce(guarded, TEXT)
    eventually(lambda: "emoji-lm" in client.get("/v1/models").text)
    before = int(redis.info("memory")["used_memory_dataset"])
    for _ in range(8):
        check_error(client.post(CHAT, json=chat), 504, code="expired")
    assert int(redis.info("memory")["used_memory_dataset"]) - before < 500_000
    known = guarded.worker.ids()
    id = next(iter(known))
    check_error(client.post(f"/v1/jobs/{id}/requeue"), 409, code="request_not_kept")
    bounded = replace(TEXT, limits=TextOffer(context=256, token_bytes=20, embedding_dimensions=8))
    announce(guarded, bounded)
    eventually(lambda: client.get("/v1/models/emoji-lm").json()["diptych"]["limits"]["context"] == 256)
    for path, body, param in (
        (CHAT, chat, "messages"),
        ("/v1/completions", {"prompt": "x" * 6000, "max_tokens": 1}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 256, "max_tokens": 1}, "prompt"),
        ("/v1/responses", {"input": "x" * 6000}, "input"),
        (EMBED, {"input": ["y", "x" * 6000]}, "input"),
    ):
        check_error(client.post(path, json=body), 400, param, "context_length_exceeded")
    assert guarded.worker.ids() == known


def test_embeddings_lie_outside_redis_until_they_are_delivered(guarded: Guarded) -> None:
    """And not even there, once they are."""
    client, worker = guarded.key(), guarded.worker
    announce(guarded, replace(TEXT, limits=TextOffer(embedding_dimensions=1024)))
    eventually(lambda: "emoji-lm" in client.get("/v1/models").text)
    id, answer = asked(worker, client.post, EMBED, json={"input": ["a"] * 500, "encoding_format": "base64"})
    claim = worker.take(id)
    vector = "A" * (1024 * 4 * 4 // 3)
    whole = {"embeddings": [vector] * 500, "choices": [], "prompt_tokens": [1] * 500, "cached_tokens": 0}
    keys: list[str] = []

    def put(data: bytes, kind: str) -> str:
        keys.append(worker.artifacts.put_kept(data, kind, worker.store.upkeep.keep))
        return keys[-1]

    recorded = lay_result(whole, put)
    assert len(json.dumps(recorded)) < 200
    assert worker.store.leases.succeed(id, claim.fence, recorded, keys)
    data = ok(answer.result(PATIENCE_S)).json()["data"]
    assert len(data) == 500 and data[499]["embedding"] == vector
    eventually(lambda: worker.store.get(id) is None)


def test_a_line_s_large_answer_is_read_where_it_lies(guarded: Guarded) -> None:
    client, worker = guarded.key(), guarded.worker
    announce(guarded, TEXT)
    eventually(lambda: "emoji-lm" in client.get("/v1/models").text)
    data = lines({**ASK, "max_tokens": 9}, url=CHAT)
    file = client.post("/v1/files", files={"file": ("x", data)}, data=BATCH).json()["id"]
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    batch = client.post("/v1/batches", json=body).json()["id"]
    (id,) = eventually(worker.ids)
    claim = worker.take(id)
    choice = {"text": "long " * 50_000, "finish_reason": "stop", "tokens": 9, "logprobs": []}
    whole = {"choices": [choice], "prompt_tokens": [1], "cached_tokens": 0}
    keys: list[str] = []
    recorded = lay_result(whole, lambda data, kind: keys.append(worker.artifacts.put(data, kind)) or keys[-1])
    assert keys and worker.store.leases.succeed(id, claim.fence, recorded, keys)
    eventually(lambda: client.get(f"/v1/batches/{batch}").json()["status"] == "completed")
    output = client.get(f"/v1/batches/{batch}").json()["output_file_id"]
    line = client.get(f"/v1/files/{output}/content").json()
    assert line["response"]["body"]["choices"][0]["message"]["content"] == choice["text"]
