"""LoRAs of requests, at every door: passed on to the worker, offered by name, refused by name with no job made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployment.redis import RedisServer
from tests.api.easel import Easel
from tests.api.test_edits import PNG
from tests.api.world import CARD, Api, Worker, check_error, eventually, opened, settings_of

DRAW, EDIT = "/v1/images/generations", "/v1/images/edits"
OFFER = dataclasses.replace(CARD, loras=("emoji-v1.2", "ink"))
TEXT = "ink:0.8, emoji-v1.2"


@pytest.fixture(scope="module")
def world(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, Worker, Easel]]:
    settings = settings_of(redis_server.url, tmp_path_factory.mktemp("lora"))
    with opened(settings) as (api, worker):
        worker.announce(card=OFFER)
        eventually(lambda: any(model["diptych"]["loras"] for model in api.client.get("/v1/models").json()["data"]))
        with Easel(worker) as easel:
            yield api, worker, easel


def test_models_say_which_there_are(world: tuple[Api, Worker, Easel]) -> None:
    (model,) = world[0].client.get("/v1/models").json()["data"]
    assert model["diptych"]["loras"] == ["emoji-v1.2", "ink"]


def test_who_asks_for_one_gets_it_at_every_door(world: tuple[Api, Worker, Easel]) -> None:
    api, _, easel = world
    easel.seen.clear()
    asked = {"prompt": "a fox", "lora": TEXT}
    assert api.post(DRAW, **asked).status_code == 200
    assert api.client.post(EDIT, data=asked, files={"image": PNG}).status_code == 200
    job = api.order(**asked)
    eventually(lambda: api.job(job)["status"] == "succeeded")
    assert [claim.parameters["lora"] for claim in easel.seen] == [TEXT] * 3
    for nothing in ({}, {"lora": None}, {"lora": ""}):
        assert api.post(DRAW, prompt="a fox", **nothing).status_code == 200
        assert "lora" not in easel.seen[-1].parameters


def test_a_batch_may_ask_for_it_line_by_line(world: tuple[Api, Worker, Easel]) -> None:
    api, _, easel = world
    easel.seen.clear()
    bodies: list[dict[str, Any]] = [{"lora": "ink"}, {}, {"lora": "gone"}, {"lora": "ink:2"}]
    lines = [
        {"custom_id": f"c{k}", "method": "POST", "url": DRAW, "body": {"prompt": "a fox"} | body}
        for k, body in enumerate(bodies)
    ]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    file = api.client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("b.jsonl", data)}).json()["id"]
    fields = {"input_file_id": file, "endpoint": DRAW, "completion_window": "24h"}
    id = api.post("/v1/batches", **fields).json()["id"]

    def ended() -> Any:
        batch = api.client.get(f"/v1/batches/{id}").json()
        return batch if batch["status"] == "completed" else None

    batch = eventually(ended)
    assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    refused = json.loads(api.client.get(f"/v1/files/{batch['error_file_id']}/content").text)
    assert refused["custom_id"] == "c2" and refused["response"]["body"]["error"]["param"] == "lora"
    assert sorted(claim.parameters.get("lora", "") for claim in easel.seen) == ["", "ink", "ink:2"]


@pytest.mark.parametrize(
    ("lora", "code"),
    [
        ("gone", "invalid_value"),
        ("ink,gone:0.5", "invalid_value"),
        ("ink:", "invalid_value"),
        ("ink:loud", "invalid_value"),
        ("ink:nan", "invalid_value"),
        ("ink:1e99", "invalid_value"),
        ("ink,ink", "invalid_value"),
        ("../ink", "invalid_value"),
        ("/ink", "invalid_value"),
        ("ink.safetensors", "invalid_value"),
        (" ", "invalid_value"),
        (",".join(["ink"] * 4000), "invalid_value"),
        (1, "invalid_type"),
        (["ink"], "invalid_type"),
        ({"name": "ink"}, "invalid_type"),
    ],
)
def test_what_is_wrong_is_refused_by_name(world: tuple[Api, Worker, Easel], lora: Any, code: str) -> None:
    api, worker, _ = world
    known = worker.ids()
    for path, more in ((DRAW, {}), ("/v1/jobs", {"type": "image"})):
        check_error(api.post(path, prompt="a fox", lora=lora, **more), 400, "lora", code)
    if isinstance(lora, str):
        check_error(api.client.post(EDIT, data={"prompt": "x", "lora": lora}, files={"image": PNG}), 400, "lora", code)
    assert worker.ids() == known


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_model_without_any_says_why(precision: str, redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    with opened(settings) as (api, worker):
        worker.announce(card=dataclasses.replace(CARD, name=f"bare-{precision}", precision=precision))
        eventually(lambda: len(api.client.get("/v1/models").json()["data"]) >= 1)
        answer = api.post(DRAW, prompt="a fox", lora="ink", model=f"bare-{precision}")
        check_error(answer, 400, "lora", "invalid_value")
        assert answer.json()["error"]["message"].endswith("its worker has no DIPTYCH_LORA_DIR")
        assert not worker.ids()
