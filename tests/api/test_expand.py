"""Prompts to expand, at the API: who is refused, what the job carries, what is told of the prompt that was drawn."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from contract.card import ModelCard, TextOffer
from contract.errors import Invalid
from core.jobs.cards import WorkerCard
from core.jobs.record import Job
from tests.api.world import CARD, PATIENCE_S, TEXT, Api, Worker, check_error, eventually, parsed, settings_of

URL = "/v1/images/generations"
EMBEDS = replace(TEXT, name="embedder", limits=TextOffer(embedding_dimensions=8, generates=False))


@contextmanager
def served(url: str, folder: Path, *workers: tuple[ModelCard, ...]) -> Iterator[tuple[Api, Worker]]:
    """An API that has read of workers with these models, and a worker that is played by hand."""
    settings = settings_of(url, folder)
    with Worker(settings) as worker:
        for number, models in enumerate(workers):
            card = WorkerCard(f"worker-{number}", "here", 1, "ready", "", 1.5, list(models))
            worker.registry.announce(card, 600)
        with Api(settings) as api:
            yield api, worker


@pytest.fixture
def world(redis_url: str, folder: Path) -> Iterator[tuple[Api, Worker]]:
    with served(redis_url, folder, (CARD, TEXT)) as world:
        yield world


def expand(worker: Worker, known: set[str] = frozenset()) -> Job:  # type: ignore[assignment]
    """Do what comes next as a worker does that expands prompts, each picture's its own."""
    (id,) = eventually(lambda: worker.ids() - known)
    claim = worker.take(id)
    assert claim.parameters["expand_prompt"] is True
    images = []
    for k in range(claim.parameters["n"]):
        prompt = f"{claim.parameters['prompt']}, the {k}th ☂"
        images.append({
            "key": worker.artifacts.put(prompt.encode(), "image/png"), "seed": claim.parameters["seed"] + k,
            "width": 128, "height": 128, "media_type": "image/png", "size_bytes": len(prompt), "warnings": [],
            "revised_prompt": prompt,
        })  # fmt: skip
    assert worker.store.leases.succeed(claim.id, claim.attempt, {"images": images, "engine_s": 0.5})
    return worker.job(id)


PROMPTS = ["a cat, the 0th ☂", "a cat, the 1th ☂"]


def test_openais_client_is_told_the_revised_prompts(world: tuple[Api, Worker]) -> None:
    api, worker = world
    with (
        ThreadPoolExecutor(1) as pool,
        openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        asked = pool.submit(client.images.generate, prompt="a cat", n=2, extra_body={"expand_prompt": True, "seed": 1})
        job = expand(worker)
        data = asked.result(PATIENCE_S).data
    assert data is not None and [image.revised_prompt for image in data] == PROMPTS
    assert [base64.b64decode(image.b64_json or "").decode() for image in data] == PROMPTS
    told = api.job(job.id)["images"]
    assert [image["revised_prompt"] for image in told] == PROMPTS


def test_streams_tell_it_too(world: tuple[Api, Worker]) -> None:
    api, worker = world

    def read() -> list[dict[str, Any]]:
        fields = {"prompt": "a cat", "n": 2, "seed": 1, "expand_prompt": True, "stream": True}
        with api.client.stream("POST", URL, json=fields) as answer:
            return [event.data for event in parsed(answer.iter_lines())]

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(read)
        expand(worker)
        assert [event["revised_prompt"] for event in asked.result(PATIENCE_S)] == PROMPTS


def test_jobs_and_their_repetitions_carry_it(world: tuple[Api, Worker]) -> None:
    api, worker = world
    first = api.order(expand_prompt=True, seed=1)
    claim = worker.take(first)
    assert worker.store.leases.fail(first, claim.attempt, "engine_error", "it failed")
    again = api.client.post(f"/v1/jobs/{first}/requeue").json()["id"]
    assert worker.job(again).parameters == claim.parameters
    expand(worker, {first})
    assert "revised_prompt" not in json.dumps(api.job(first)) and api.job(again)["images"][0]["revised_prompt"]


@pytest.mark.parametrize("given", [False, None])
def test_without_it_nothing_changes(world: tuple[Api, Worker], given: bool | None) -> None:
    api, worker = world
    id = api.order(expand_prompt=given)
    assert "expand_prompt" not in worker.job(id).parameters
    worker.work(id)
    assert "revised_prompt" not in api.job(id)["images"][0]


@pytest.mark.parametrize(
    "workers",
    [((CARD,),), ((CARD, TEXT), (CARD,)), ((CARD,), (TEXT,)), ((CARD, EMBEDS, TEXT),)],
    ids=["none", "not all", "elsewhere", "the first only embeds"],
)
def test_without_a_text_model_beside_every_worker_it_is_refused_by_name(
    redis_url: str, folder: Path, workers: tuple[tuple[ModelCard, ...], ...]
) -> None:
    """A job may come to any of the model's workers."""
    with served(redis_url, folder, *workers) as (api, worker):
        for path, more in ((URL, {}), ("/v1/jobs", {"type": "image"})):
            answer = api.post(path, prompt="a cat", expand_prompt=True, **more)
            check_error(answer, 400, "expand_prompt", "no_text_model")
        assert not worker.ids()


def test_a_known_pair_is_waited_for(redis_url: str, folder: Path) -> None:
    """No worker lives just now: what they were says who may come."""
    with served(redis_url, folder, (CARD, TEXT)) as (api, worker):
        worker.registry.deregister("worker-0")
        eventually(lambda: api.client.get("/readyz").status_code != 200)
        assert worker.job(api.order(expand_prompt=True)).parameters["expand_prompt"]


def test_what_only_the_worker_can_tell_is_a_400(world: tuple[Api, Worker]) -> None:
    api, worker = world
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(api.draw, expand_prompt=True)
        (id,) = eventually(worker.ids)
        said = Invalid("expand_prompt", "the prompt is too long", "context_length_exceeded")
        assert worker.store.leases.fail(id, worker.take(id).attempt, **said.to_dict())
        check_error(asked.result(PATIENCE_S), 400, "expand_prompt", "context_length_exceeded")
    check_error(api.post(URL, prompt="a cat", expand_prompt="yes"), 400, "expand_prompt", "invalid_type")


def test_what_the_text_model_writes_has_no_weights(world: tuple[Api, Worker]) -> None:
    api, worker = world
    answer = api.post(URL, prompt="a fox", prompt_weighting=True, expand_prompt=True)
    check_error(answer, 400, "prompt_weighting", "invalid_value")
    assert not worker.ids()
