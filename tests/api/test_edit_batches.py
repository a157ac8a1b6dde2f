"""Edits in batches, of keys of their own, and with prompts that are expanded: each test on an API of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from core.jobs.keyring import Keyring
from core.jobs.record import JobState
from tests.api.easel import Easel
from tests.api.test_edits import PNG, as_file, bomb, handed_on, hole, pixels
from tests.api.test_expand import TEXT, expand, served
from tests.api.test_references import ZEROS, inline, uploaded
from tests.api.world import CARD, PATIENCE_S, Api, Worker, check_error, eventually, opened, settings_of

EDITS = "/v1/images/edits"


@pytest.fixture
def world(redis_url: str, folder: Path) -> Iterator[tuple[Api, Worker]]:
    with served(redis_url, folder, (CARD,)) as world:
        yield world


def batch_of(api: Api, *bodies: dict[str, Any]) -> str:
    asked = [{"custom_id": f"c{k}", "method": "POST", "url": EDITS, "body": body} for k, body in enumerate(bodies)]
    data = "\n".join(map(json.dumps, asked)).encode()
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        lines = client.files.create(file=("asked.jsonl", data), purpose="batch")
        return client.batches.create(input_file_id=lines.id, endpoint="/v1/images/edits", completion_window="24h").id


def ended(api: Api, id: str) -> Any:
    def look() -> Any:
        batch = api.client.get(f"/v1/batches/{id}").json()
        return batch if batch["status"] not in ("in_progress", "cancelling") else None

    return eventually(look)


def told(api: Api, id: str) -> list[Any]:
    return [json.loads(line) for line in api.client.get(f"/v1/files/{id}/content").text.splitlines()]


def test_a_batch_edits_line_by_line(world: tuple[Api, Worker]) -> None:
    api, worker = world
    arrays = [pixels(seed=k) for k in range(3)]
    names = [uploaded(api, as_file(array)) for array in arrays]
    lines = uploaded(api, b"{}", purpose="batch")
    with Easel(worker) as easel:
        id = batch_of(
            api,
            {"prompt": "one", "images": [names[0]], "seed": 1, "steps": 4},
            {"prompt": "two", "images": [names[1]], "mask": inline(as_file(hole())), "seed": 2, "steps": 4, "n": 2},
            {"prompt": "no file", "images": [{"file_id": ZEROS}]},
            {"prompt": "no picture", "images": [lines]},
            {"prompt": "no images"},
            {"prompt": "bomb", "images": [inline(bomb(20_000, 20_000))]},
            {"prompt": "three", "images": [names[2]], "strength": 0.5, "seed": 3, "steps": 4, "stream": True},
        )
        batch = ended(api, id)
    assert batch["status"] == "completed" and batch["endpoint"] == EDITS
    assert batch["request_counts"] == {"total": 7, "completed": 3, "failed": 4}
    ill = {line["custom_id"]: line["response"] for line in told(api, batch["error_file_id"])}
    said = {name: (ill[name]["status_code"], ill[name]["body"]["error"]["param"]) for name in ill}
    assert said == {
        "c2": (404, "images.file_id"), "c3": (400, "images.file_id"), "c4": (400, "images"), "c5": (400, "images"),
    }  # fmt: skip
    well = {line["custom_id"]: line["response"]["body"] for line in told(api, batch["output_file_id"])}
    assert [len(well[name]["data"]) for name in ("c0", "c1", "c6")] == [1, 2, 1]
    assert [claim.parameters["prompt"] for claim in easel.seen] == ["one", "two", "three"]
    assert [claim.parameters["edit"]["strength"] for claim in easel.seen] == [0.8, 1.0, 0.5]
    for claim, array in zip(easel.seen, arrays, strict=True):
        assert np.array_equal(handed_on(worker, claim)[0], array)


def test_a_batch_of_edits_waits_for_room(redis_url: str, folder: Path) -> None:
    """Its lines are looked at again and again meanwhile, and each is a job once, with all that it begins with."""
    settings = settings_of(redis_url, folder, max_queued=2, batch_jobs=8)
    with opened(settings) as (api, worker):
        worker.announce()
        eventually(lambda: api.client.get("/readyz").status_code == 200)
        first = [api.order() for _ in range(2)]
        id = batch_of(api, *({"prompt": f"{k}", "images": [inline(as_file(pixels(seed=k)))]} for k in range(4)))
        eventually(lambda: worker.redis.zcard("diptych:kept") >= 1)
        assert worker.ids() == set(first)
        with Easel(worker) as easel:
            assert ended(api, id)["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        edits = [claim for claim in easel.seen if "edit" in claim.parameters]
        assert [claim.parameters["prompt"] for claim in edits] == ["0", "1", "2", "3"]
        assert all(np.array_equal(handed_on(worker, claim)[0], pixels(seed=k)) for k, claim in enumerate(edits))


def test_a_file_is_its_owners(redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    keyring = Keyring.of(settings)
    tokens = {name: keyring.add(name, scopes=scopes)[1] for name, scopes in
              (("ann", ["images", "files"]), ("bob", ["images", "files"]), ("root", ["admin"]))}  # fmt: skip
    keyring.close()
    with opened(settings) as (api, worker):
        worker.announce()
        eventually(lambda: api.client.get("/readyz").status_code == 200)

        def ask(name: str, path: str, **given: Any) -> httpx2.Response:
            return api.client.post(path, headers={"Authorization": f"Bearer {tokens[name]}"}, **given)

        answer = ask("ann", "/v1/files", data={"purpose": "vision"}, files={"file": ("a.png", PNG)})
        fields = {"type": "edit", "prompt": "x", "images": [{"file_id": answer.json()["id"]}]}
        assert ask("ann", "/v1/jobs", json=fields).status_code == 202
        assert ask("root", "/v1/jobs", json=fields).status_code == 202
        check_error(ask("bob", "/v1/jobs", json=fields), 404, "images.file_id", "file_not_found")


def test_an_edit_may_have_its_prompt_expanded_at_every_door(redis_url: str, folder: Path) -> None:
    with served(redis_url, folder, (CARD, TEXT)) as (api, worker):
        asked = {"prompt": "a cat", "images": [inline()], "expand_prompt": True, "seed": 1}
        id = api.post("/v1/jobs", type="edit", **asked).json()["id"]
        job = expand(worker)
        assert job.id == id and job.parameters["expand_prompt"] is True and job.parameters["edit"]["image"]
        assert api.job(id)["images"][0]["revised_prompt"] == "a cat, the 0th ☂"
        batch = batch_of(api, asked)
        known = {id}
        expand(worker, known)
        (line,) = told(api, ended(api, batch)["output_file_id"])
        assert line["response"]["body"]["data"][0]["revised_prompt"] == "a cat, the 0th ☂"
        assert all(worker.is_(one, JobState.SUCCEEDED) for one in worker.ids())
