"""Prompts to expand, at the API: who is refused, what the job carries, what is told of the prompt that was drawn."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from contract.card import ModelCard, TextOffer
from contract.errors import Invalid
from core.config import Settings
from core.jobs.cards import WorkerCard
from core.jobs.keyring import Keyring
from core.jobs.record import Job, JobDraft, new_id
from tests.api.easel import asked, conclude
from tests.api.world import (
    CARD,
    PATIENCE_S,
    TEXT,
    Api,
    Worker,
    bearer,
    check_error,
    client_of,
    eventually,
    parsed,
)

EMBEDS = replace(TEXT, name="embedder", limits=TextOffer(embedding_dimensions=8, generates=False))


@contextmanager
def served(settings: Settings, *workers: tuple[ModelCard, ...]) -> Iterator[tuple[Api, Worker]]:
    """An API that has read of workers with these models, and a worker that is played by hand."""
    with Worker(settings) as worker:
        for number, models in enumerate(workers):
            card = WorkerCard(f"worker-{number}", "here", 1, "ready", "", 1.5, list(models))
            worker.registry.announce(card, 600)
        with Api(settings) as api:
            yield api, worker


@pytest.fixture
def world(settings: Settings) -> Iterator[tuple[Api, Worker]]:
    with served(settings, (CARD, TEXT)) as world:
        yield world


def expand(worker: Worker, known: set[str] = frozenset()) -> Job:  # type: ignore[assignment]
    """Do what comes next as a worker does that expands prompts, each picture's its own."""
    (id,) = eventually(lambda: worker.ids() - known)
    parameters = worker.job(id).parameters
    assert parameters["expand_prompt"] is True
    prompts = [f"{parameters['prompt']}, the {k}th ☂" for k in range(parameters["n"])]
    conclude(worker, id, *({"data": prompt.encode(), "revised_prompt": prompt} for prompt in prompts))
    return worker.job(id)


PROMPTS = ["a cat, the 0th ☂", "a cat, the 1th ☂"]


def test_openais_client_is_told_the_revised_prompts(world: tuple[Api, Worker]) -> None:
    api, worker = world
    with client_of(api.url) as client:
        fields = {"prompt": "a cat", "n": 2, "extra_body": {"expand_prompt": True, "seed": 1}}
        id, answer = asked(worker, client.images.generate, **fields)
        expand(worker)
        data = answer.result(PATIENCE_S).data
    assert data is not None and [image.revised_prompt for image in data] == PROMPTS
    assert [base64.b64decode(image.b64_json or "").decode() for image in data] == PROMPTS
    assert [image["revised_prompt"] for image in api.job(id)["images"]] == PROMPTS


def test_streams_tell_it_too(world: tuple[Api, Worker]) -> None:
    api, worker = world
    _, answer = asked(worker, api.draw, n=2, seed=1, expand_prompt=True, stream=True)
    expand(worker)
    events = parsed(iter(answer.result(PATIENCE_S).text.split("\n")))
    assert [event.data["revised_prompt"] for event in events] == PROMPTS


def test_jobs_and_their_repetitions_carry_it(world: tuple[Api, Worker]) -> None:
    api, worker = world
    first = api.order(expand_prompt=True, seed=1)
    claim = worker.take(first)
    assert worker.store.leases.fail(first, claim.attempt, "engine_error", "it failed")
    again = api.client.post(f"/v1/jobs/{first}/requeue").json()["id"]
    assert worker.job(again).parameters == claim.parameters
    expand(worker, {first})
    assert "revised_prompt" not in json.dumps(api.job(first)) and api.job(again)["images"][0]["revised_prompt"]
    assert "expand_prompt" not in worker.job(api.order(expand_prompt=False)).parameters


@pytest.mark.parametrize(
    "workers",
    [((CARD,),), ((CARD, TEXT), (CARD,)), ((CARD,), (TEXT,)), ((CARD, EMBEDS, TEXT),)],
    ids=["none", "not all", "elsewhere", "the first only embeds"],
)
def test_without_a_text_model_beside_every_worker_it_is_refused_by_name(
    settings: Settings, workers: tuple[tuple[ModelCard, ...], ...]
) -> None:
    """A job may come to any of the model's workers."""
    with served(settings, *workers) as (api, worker):
        fields = {"prompt": "a cat", "expand_prompt": True}
        for answer in (api.draw(**fields), api.post("/v1/jobs", type="image", **fields)):
            check_error(answer, 400, "expand_prompt", "no_text_model")
        assert not worker.ids()


def test_a_known_pair_is_waited_for(settings: Settings) -> None:
    """No worker lives just now: what they were says who may come."""
    with served(settings, (CARD, TEXT)) as (api, worker):
        worker.registry.deregister("worker-0")
        eventually(lambda: api.get("/readyz").status_code != 200)
        assert worker.job(api.order(expand_prompt=True)).parameters["expand_prompt"]


def test_what_only_the_worker_can_tell_is_a_400(world: tuple[Api, Worker]) -> None:
    api, worker = world
    check_error(api.draw(expand_prompt="yes"), 400, "expand_prompt", "invalid_type")
    weighted = api.draw(prompt_weighting=True, expand_prompt=True)
    check_error(weighted, 400, "prompt_weighting", "invalid_value")  # what the text model writes has no weights
    id, answer = asked(worker, api.draw, expand_prompt=True)
    said = Invalid("expand_prompt", "the prompt is too long", "context_length_exceeded")
    assert worker.store.leases.fail(id, worker.take(id).attempt, **said.to_dict())
    check_error(answer.result(PATIENCE_S), 400, "expand_prompt", "context_length_exceeded")


def test_a_job_is_tried_again_by_who_may_write(settings: Settings) -> None:
    with served(settings, (CARD, TEXT)) as (api, worker), closing(Keyring.of(settings)) as keyring:
        fields = worker.job(api.order(expand_prompt=True)).parameters
        for scopes, status in ((["images"], 403), (["images", "text"], 202)):
            key, token = keyring.add("ann", scopes)
            job = worker.store.create(JobDraft(new_id(), "image", CARD.name, fields, owner=key.id))
            claim = worker.take(job.id)
            assert worker.store.leases.fail(job.id, claim.attempt, "engine_error", "it failed")
            answer = api.client.post(f"/v1/jobs/{job.id}/requeue", headers=bearer(token))
            assert answer.status_code == status, answer.text


def test_a_prompt_too_long_to_be_expanded_is_refused_before_its_record(settings: Settings) -> None:
    short = replace(TEXT, limits=TextOffer(context=64, token_bytes=10))
    with served(settings, (CARD, TEXT), (CARD, short)) as (api, worker):
        for prompt, status in (("x" * 640, 400), ("x" * 630, 202)):
            body = {"type": "image", "prompt": prompt, "expand_prompt": True}
            answer = api.client.post("/v1/jobs", json=body)
            if status == 400:
                check_error(answer, 400, "expand_prompt", "context_length_exceeded")
            assert answer.status_code == status, answer.text
        assert len(worker.ids()) == 1
