"""Names of models that are not their own, at every endpoint: OpenAI's clients unmodified, against a real service."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest

from api.cards import ModelNames, RegistrySnapshot
from api.jobs import submission
from contract.card import ImageCard
from core.config import Settings
from tests.api.batches.test_routes import begin, ended, lines, told
from tests.api.easel import Easel
from tests.api.pictures.test_edits import as_file, pixels
from tests.api.world import (
    CARD,
    PATIENCE_S,
    TEXT,
    Api,
    Worker,
    changed,
    check_error,
    eventually,
    opened,
    token_of,
)  # fmt: skip

TURBO = replace(CARD, name="emoji-xl-turbo")
ALIASES = "dall-e-3=emoji-xl-turbo,cats=emoji-xl,gpt-4o=emoji-lm,gone=nowhere"


@contextmanager
def serving(settings: Settings, *cards: Any) -> Iterator[tuple[Api, Easel]]:
    with opened(settings, cards[0]) as (api, worker), Worker(api.settings) as other:
        other.name = "worker-2"
        for card in cards[1:]:
            other.announce(card=card)
            eventually(lambda card=card: card.name in names(api))  # type: ignore[misc]
            other.name += "'"
        with Easel(worker) as easel:
            yield api, easel


def names(api: Api) -> list[str]:
    return [model["id"] for model in api.models()]


def said(answer: Any) -> list[str]:
    """The warnings of an answer's first picture."""
    return list(answer.data[0].model_extra["warnings"])


def test_an_unmodified_openai_client_draws_with_its_own_names(shared: Api, client: openai.OpenAI, easel: Easel) -> None:
    """As LibreChat, n8n and Open WebUI ask, in each way in which pictures are asked for."""
    served = "is served by emoji-xl"
    drawn = client.images.generate(
        model="gpt-image-2.5-flare", prompt="a cat", size="1536x1024", quality="high", background="auto", n=2
    )
    assert easel.seen[-1].model == "emoji-xl" and len(drawn.data or []) == 2
    assert drawn.model_extra is not None and drawn.model_extra["model"] == "emoji-xl" and drawn.size == "168x96"
    assert said(drawn) == [
        f"model: gpt-image-2.5-flare {served}",
        "size: 1536x1024 is not offered by emoji-xl; the nearest is 168x96",
        "quality: has no effect; steps and plan decide",
    ]
    edited = client.images.edit(
        model="gpt-image-1", image=("cat.png", as_file(pixels())), prompt="a hat", size="1024x1024",
        input_fidelity="high", quality="auto",
    )  # fmt: skip
    assert [warning.split(":")[0] for warning in said(edited)] == ["model", "size", "input_fidelity"]
    assert edited.size == "128x128"
    events = list(client.images.generate(model="dall-e-3", prompt="a cat", style="vivid", stream=True))
    assert events[-1].type == "image_generation.completed" and base64.b64decode(events[-1].b64_json)
    assert events[-1].model_extra is not None and events[-1].model_extra["warnings"][0].endswith(served)
    assert client.models.retrieve("chatgpt-image-latest").model_extra["diptych"]["alias_of"] == "emoji-xl"  # type: ignore[index]
    id = shared.order(model="gpt-image-1-mini")
    job = eventually(lambda: (one := shared.job(id))["status"] == "succeeded" and one)
    assert job["model"] == "emoji-xl" == job["request"]["model"] and served in job["images"][0]["warnings"][0]
    assert "warnings" not in job["request"]
    check_error(shared.draw(model="gpt-4o"), 404, "model", "model_not_found")
    check_error(shared.draw(model="emoji-xl", size="1024x1024"), 400, "size")  # who names the model is told


def test_a_batch_takes_the_names_too(client: openai.OpenAI, easel: Easel) -> None:
    batch = begin(
        client, lines({"prompt": "a", "model": "dall-e-3", "size": "1024x1792"}, {"prompt": "a", "model": "other"})
    )
    done = ended(client, batch.id)
    answer = told(client, done.output_file_id)[0]["response"]["body"]
    assert answer["model"] == "emoji-xl" and answer["size"] == "96x168"
    assert [warning.split(":")[0] for warning in answer["data"][0]["warnings"]] == ["model", "size"]
    assert done.request_counts.failed == 1


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models/emoji-xl/", "/v1/jobs/", "/v1/files//"])
def test_a_slash_at_the_end_changes_nothing(shared: Api, path: str) -> None:
    with_slash, without = (shared.get(each) for each in (path, path.rstrip("/")))
    assert with_slash.status_code == 200 and with_slash.json() == without.json()


def test_a_post_with_a_slash_at_the_end_is_taken(shared: Api, easel: Easel) -> None:
    assert shared.post("/v1/images/generations/", prompt="a cat", steps=1).status_code == 200
    check_error(shared.get("/v1/nothing/"), 404, code="not_found")


def test_aliases_name_models_of_every_kind(settings: Settings) -> None:
    with serving(changed(settings, model_aliases=ALIASES), CARD, TURBO, TEXT) as (api, easel):
        assert names(api) == ["emoji-lm", "emoji-xl", "emoji-xl-turbo", "dall-e-3", "cats", "gpt-4o"]
        entry = api.get("/v1/models/cats").json()
        assert entry["id"] == "cats" and entry["diptych"]["alias_of"] == "emoji-xl" and entry["diptych"]["live"]
        ready = {name: api.get(f"/v2/models/{name}/ready").status_code for name in ("cats", "gone")}
        assert ready == {"cats": 200, "gone": 404}
        for name, model in {"dall-e-3": "emoji-xl-turbo", "cats": "emoji-xl", "emoji-xl": "emoji-xl"}.items():
            assert api.draw(model=name, steps=1).json()["model"] == model == easel.seen[-1].model
        for name in ("cats", "dall-e-3"):
            listed = api.get("/v1/jobs", params={"model": name}).json()["data"]
            assert listed and {job["model"] for job in listed} == {"emoji-xl" if name == "cats" else "emoji-xl-turbo"}
        error = check_error(api.draw(model="gpt-4o"), 400, "model", "wrong_modality")
        assert "/v1/chat/completions" in error["message"]
        assert "nowhere, which no worker" in check_error(api.draw(model="gone"), 404, "model")["message"]
        # With two models a name of OpenAI's that is no alias stands for none.
        assert "DIPTYCH_MODEL_ALIASES" in check_error(api.draw(model="gpt-image-1"), 404, "model")["message"]
        check_error(api.delete("/v1/models/cats"), 404, "model")


def test_which_model_openais_names_stand_for() -> None:
    def served(openai: str, *cards: ImageCard, **aliases: str) -> str | None:
        other = {name.replace("_", "-"): model for name, model in aliases.items()}
        return RegistrySnapshot(models=cards, names=ModelNames(other, openai)).served_name("gpt-image-1")

    live, turbo = replace(CARD, live=True), replace(TURBO, live=True)
    assert served("auto", live) == served("auto", CARD) == served("auto", live, TURBO) == "emoji-xl"
    assert served("auto", live, turbo) == served("auto", CARD, TURBO) == served("auto") == "gpt-image-1"
    assert served("on", live, turbo) == "emoji-xl" and served("on", CARD, turbo) == "emoji-xl-turbo"
    assert served("off", live) == "gpt-image-1"
    assert served("auto", live, gpt_image_1="emoji-xl-turbo") == "emoji-xl-turbo"
    own = replace(CARD, name="gpt-image-1")
    assert served("on", live, own) == "gpt-image-1", "a model's own name goes first"


def test_a_name_of_openais_keeps_its_model_while_that_restarts(settings: Settings) -> None:
    with serving(settings, CARD) as (api, easel), Worker(api.settings) as other:
        registry = easel.worker.registry
        other.name = "worker-2"
        other.announce(card=TURBO)
        cards = api.server._service.cards

        def served() -> str | None:
            return cards._snapshot().served_name("gpt-image-1")

        assert served() == "gpt-image-1", "of two"
        registry.deregister("worker-2")
        assert served() == "emoji-xl"
        registry.deregister(easel.worker.name)
        assert served() == "emoji-xl", "of two that are known, the one that was drawn with"
        other.announce(card=TURBO)
        assert served() == "emoji-xl-turbo"


def test_a_chosen_name_is_a_models_own_or_an_alias() -> None:
    """Not one that stands for whatever model there is."""
    names = ModelNames({"cats": "emoji-xl", "words": "emoji-lm", "emoji-xl-turbo": "emoji-xl"}, "on")
    snapshot = RegistrySnapshot(models=(CARD, TURBO, TEXT), names=names)
    assert snapshot.declared("cats", ImageCard) == snapshot.declared("emoji-xl", ImageCard) == CARD
    assert snapshot.declared("emoji-xl-turbo", ImageCard) == TURBO, "a model's own name goes first"
    for name in ("gpt-image-1", "dall-e-3", "tgi", "dummy", "words", "emoji-lm", ""):
        assert snapshot.declared(name, ImageCard) is None


def test_unknown_fields_are_warnings_where_that_is_set(settings: Settings) -> None:
    with serving(changed(settings, unknown_fields="warn"), CARD) as (api, _):
        fields = {"prompt": "a hat", "steps": 1, "tiling": True, "deepcache": {"interval": 2, "mode": 1}}
        told = ["deepcache.mode: is not known, and ignored", "tiling: is not known, and ignored"]
        id = api.order(**fields)
        eventually(lambda: api.job(id)["status"] == "succeeded")
        answers = [api.draw(**fields).json()["data"], api.job(id)["images"]]
        form = {name: json.dumps(value) if isinstance(value, dict | bool) else str(value)
                for name, value in fields.items()}  # fmt: skip
        edit = api.client.post("/v1/images/edits", data=form, files={"image": as_file(pixels())})
        answers.append(edit.json()["data"])
        assert [sorted(answer[0]["warnings"]) for answer in answers] == [told] * 3
        parameters = {"inputs": "a hat", "parameters": {"tiling": True, "num_inference_steps": 1}, "wait": 1}
        drawn = api.client.post("/", json=parameters, headers={"Accept": "application/json"})
        told = ["wait: is not known, and ignored", "parameters.tiling: is not known, and ignored"]
        assert drawn.json()["data"][0]["warnings"] == told
        for count, status in ((31, 200), (32, 400)):
            many = {"inputs": "a hat", "parameters": {f"f{k}": k for k in range(count)}, "wait": 1}
            assert api.client.post("/", json=many).status_code == status
        check_error(api.draw(steps="one"), 400, "steps")


def test_a_name_is_taken_in_any_case_of_its_letters_unless_two_are_alike() -> None:
    cards = (CARD, replace(CARD, name="Twin"), replace(CARD, name="twin"))
    seen = RegistrySnapshot(models=cards, names=ModelNames({"Emoji-XL": "twin"}))
    assert seen.served_name("EMOJI-xl") == CARD.name and seen.declared("emoji-XL", ImageCard) == CARD
    assert [seen.served_name(name) for name in ("Emoji-XL", "Twin", "twin", "TWIN")] == ["twin", "Twin", "twin", "TWIN"]
    assert seen.declared("TWIN", ImageCard) is None


def test_what_is_being_loaded_counts_among_the_models_that_names_stand_for(settings: Settings) -> None:
    """From the first moment on a name of OpenAI's stands for what it will stand for: of two models for none."""
    with opened(settings) as (api, worker), Easel(worker):
        worker.announce("starting", card=None, loading={"emoji-xl": "image", "emoji-xl-turbo": "image"})
        check_error(api.draw(model="gpt-image-1"), 503, code="no_model")
        worker.announce(loading={"emoji-xl-turbo": "image"})
        eventually(lambda: "emoji-xl" in names(api))
        assert "DIPTYCH_OPENAI_NAMES=on" in check_error(api.draw(model="gpt-image-1"), 404, "model")["message"]
        assert api.draw(model="emoji-xl").status_code == 200
        worker.announce()  # the other one does not load
        assert eventually(lambda: (answer := api.draw(model="gpt-image-1")).status_code == 200 and answer)


@pytest.mark.parametrize("asked", ["emoji-xl-turbo", "fast"])
def test_a_request_waits_for_a_model_that_is_being_loaded(settings: Settings, asked: str) -> None:
    settings = changed(settings, model_aliases="fast=emoji-xl-turbo,elsewhere=nowhere")
    loading = {"emoji-xl-turbo": "image", "emoji-lm": "text"}
    with opened(settings) as (api, worker), Easel(worker), ThreadPoolExecutor(4) as pool:
        worker.announce(loading=loading)
        eventually(lambda: api.get("/readyz").json()["loading"] == sorted(loading))
        key = {"Authorization": f"Bearer {token_of(settings, 'narrow', models='emoji-xl')}"}
        eventually(lambda: api.client.get("/v1/models").status_code == 401)  # the key is known
        own = {"Authorization": f"Bearer {token_of(settings)}"}
        body = {"prompt": "a cat", "steps": 2, "model": asked}
        waiting = [
            pool.submit(api.client.post, "/v1/images/generations", json=body, headers=own),
            pool.submit(api.client.post, "/v1/jobs", json={**body, "type": "image"}, headers=own),
        ]
        error = check_error(api.client.get(f"/v2/models/{asked}/ready", headers=own), 503, "model", "model_loading")
        assert asked in error["message"]
        page = api.client.get("/v1/models", headers=own).json()
        listed = {model["id"]: model for model in page["data"]}
        assert listed.keys() == {"emoji-xl", "emoji-xl-turbo", "emoji-lm", "fast"}
        for name, model, kind in (("emoji-xl-turbo", "", "image"), ("fast", "emoji-xl-turbo", "image"),
                                  ("emoji-lm", "", "text")):  # fmt: skip
            unknown = {
                "modality": kind,
                "live": False,
                "loaded": False,
                "loading": True,
                "workers": 0,
                "loaded_workers": 0,
            }
            assert listed[name]["diptych"] == unknown | ({"alias_of": model} if model else {})
            assert listed[name] == api.client.get(f"/v1/models/{name}", headers=own).json()
        assert not listed["emoji-xl"]["diptych"]["loading"] and listed["emoji-xl"]["diptych"]["live"]
        assert [model["name"] for model in page["results"]] == ["emoji-xl", "emoji-xl-turbo"]
        narrow = api.client.get("/v1/models", headers=key).json()
        assert [model["id"] for model in narrow["data"]] == ["emoji-xl"] and len(narrow["results"]) == 1
        check_error(api.client.get("/v1/models/emoji-lm", headers=key), 404, "model", "model_not_found")
        words = {"model": asked, "messages": [{"role": "user", "content": "a"}]}
        check_error(api.client.post("/v1/chat/completions", json=words, headers=own), 400, "model", "wrong_modality")
        drawn = {**body, "model": "emoji-lm"}
        check_error(api.client.post("/v1/images/generations", json=drawn, headers=own), 400, "model", "wrong_modality")
        check_error(api.client.post("/v1/images/generations", json=body, headers=key), 404, "model", "model_not_found")
        for name in ("nothing", "elsewhere"):
            check_error(
                api.client.post("/v1/images/generations", json={**body, "model": name}, headers=own), 404, "model"
            )
        assert not any(request.done() for request in waiting)
        with Worker(api.settings) as other:
            other.name = "worker-2"
            other.announce(card=TURBO)
            assert [request.result(PATIENCE_S).status_code for request in waiting] == [200, 202]
            registered = {job["model"] for job in api.client.get("/v1/jobs", headers=own).json()["data"]}
            assert registered == {"emoji-xl-turbo"}


def test_a_request_for_a_model_that_loads_for_long_is_told_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "_LOADING_S", 0.3)
    with opened(settings) as (api, worker):
        worker.announce(loading={"emoji-xl-turbo": "image"})
        eventually(lambda: api.get("/readyz").json()["loading"])
        answer = api.draw(model="emoji-xl-turbo")
        check_error(answer, 503, "model", "model_loading")
        assert answer.headers["retry-after"]
        for path in "", "/versions":  # as /v1/models lists it for Replicate's clients
            response = api.client.get(f"/v1/models/diptych/emoji-xl-turbo{path}")
            assert response.status_code == 503 and response.headers["retry-after"]
            assert "is being loaded" in response.text
