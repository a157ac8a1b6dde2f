"""Every door by which a key has something drawn or written: what a test shows of one, a table shows of all.

A door takes a request in the service's own field names, and translates it to the names of its dialect. Its worker draws
and writes by itself, so that each request ends.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import httpx2
import pytest

from api import cards
from api.concurrency import poller
from contract.card import ModelCard, TextOffer
from core.config import Settings
from core.jobs.keyring import Keyring
from core.jobs.rates import RateLimitCost, RateLimiter
from core.jobs.record import JobDraft, JobState
from tests.api.batches.test_text_feeder import CARDS, Scribe
from tests.api.easel import Easel
from tests.api.pictures.test_edits import PNG
from tests.api.test_access import Client, Guarded
from tests.api.world import BATCH, CARD, Api, eventually, ok

IMAGES, EDITS = "/v1/images/generations", "/v1/images/edits"
CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
)  # fmt: skip
INLINE = {"image_url": "data:image/png;base64," + base64.b64encode(PNG).decode()}
DRAFTER = replace(CARD, name="emoji-z")
OFFERED = replace(
    CARD, loras=("ink",), controls=("edges",), image_prompts=("base",), cascades={DRAFTER.name: 70.0},
    preprocessors=("canny",),
)  # fmt: skip
WRITER = replace(CARDS[1], limits=TextOffer(context=512, embedding_dimensions=1), adapters=("poet",))
CATALOGUE: tuple[ModelCard, ...] = (OFFERED, DRAFTER, WRITER)

Request = dict[str, Any]
"""A request in our field names; `images` and `mask` make it an edit."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a request, or of the line of a batch, in whichever dialect. `code` is None for a success."""

    status: int
    code: str | None
    body: Any = field(default=None, repr=False)

    @property
    def accepted(self) -> bool:
        return self.status < 300

    def refused(self, status: int, code: str) -> bool:
        """Return whether it is this error. Dialects answer an invalid field with 422, and HTTP's 404 as one too."""
        return self.code == code and self.status in ({status, 422} if status in (400, 404) else {status})


def outcome_of(answer: httpx2.Response) -> Outcome:
    """The outcome that a response tells, as OpenAI, Replicate, Hugging Face and AUTOMATIC1111 write errors."""
    if answer.status_code < 300:
        return Outcome(answer.status_code, None, answer.content)
    content = answer.json()
    error, detail = content.get("error"), content.get("detail")
    if isinstance(error, dict):
        return Outcome(answer.status_code, error["code"], content)
    if isinstance(detail, list):
        return Outcome(answer.status_code, detail[0]["type"], content)
    return Outcome(answer.status_code, content.get("code", error), content)


Call = Callable[[], Outcome]
"""Sends a prepared request, and waits for its end where the door does."""


@dataclass(frozen=True)
class Door:
    """A way to have a request served. `fields` are those that it can express, beside a prompt.

    `prepare` makes what the request needs beforehand, such as the file of a batch, for a client of a house. `route` is
    the one of the app that serves it. A door with `lines` lets lines wait where others refuse a request that is over a
    limit of its model, or of jobs at once.
    """

    name: str
    route: str
    prepare: Callable[[House, Client, Request], Call] = field(repr=False)
    fields: frozenset[str] = frozenset()
    modality: str = "image"
    lines: bool = False

    def __str__(self) -> str:
        return self.name

    def submit(self, house: House, client: Client, **request: Any) -> Outcome:
        return self.prepare(house, client, request)()

    def offers(self, request: Request) -> bool:
        """Return whether the door can express the request; some take one image alone."""
        further = {"further images"} if len(request.get("images", ())) > 1 else set()
        return request.keys() | further <= self.fields | {"prompt", "steps"}


class House(Guarded):
    """An API of three models, whose worker draws and writes what comes, and keys."""

    def __init__(self, api: Api, keyring: Keyring, clients: ExitStack, scribe: Scribe, easel: Easel,
                 rates: RateLimiter) -> None:  # fmt: skip
        super().__init__(api, keyring, clients, scribe)
        self.scribe, self.easel, self.rates = scribe, easel, rates
        self._numbers = itertools.count()

    def new_id(self) -> str:
        return f"of-a-door-{next(self._numbers)}"

    def upload(self, client: Client, data: bytes = PNG, purpose: str = "vision") -> str:
        """The id of a new file of the client's."""
        form: dict[str, Any] = {"files": {"file": ("a", data)}, "data": {"purpose": purpose}}
        return str(ok(client.post("/v1/files", **form)).json()["id"])

    def used(self, client: Client, limit: str, unit: str, model: str = "") -> int:
        """How much of a limit of the client's key was charged."""
        (state,) = self.rates.take(RateLimitCost(limit, client.key_id, unit, 0, model))
        return state.limit - state.remaining

    def use(self, client: Client, limit: str, unit: str, n: int, model: str = "") -> None:
        """Charge a limit of the client's key."""
        (state,) = self.rates.take(RateLimitCost(limit, client.key_id, unit, n, model))
        assert state.allowed

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Context: nothing is drawn or written."""
        self.easel.go.clear()
        with self.easel.drawing:
            pass  # what was begun has ended
        try:
            yield
        finally:
            self.easel.go.set()

    def hold_job(self, client: Client, *, id: str, modality: str, model: str) -> str:
        """Create a job of the client's past the API, which charges nothing; returns its id."""
        parameters = {"n": 1, "width": 64, "height": 64}
        return self.worker.store.create(JobDraft(id, modality, model, parameters, owner=client.key_id)).id

    def ended(self, client: Client, id: str) -> dict[str, Any]:
        """The client's batch, once it has ended."""

        def look() -> dict[str, Any] | None:
            batch: dict[str, Any] = ok(client.get(f"/v1/batches/{id}")).json()
            return None if batch["status"] in ("in_progress", "cancelling") else batch

        return dict(eventually(look) or {})

    def write_all(self) -> None:
        """Answer the texts that wait."""
        for id, _ in self.scribe.texts():
            if (claim := self.scribe.store.leases.claim(id, self.scribe.name)) is None:
                continue
            p = claim.parameters
            if p.get("embedding") is not None:
                result: dict[str, Any] = {"embeddings": ["AACAPw=="], "prompt_tokens": [1]}
            else:
                count = p.get("n", 1)
                choice = {"text": "words", "finish_reason": "stop", "tokens": 1, "logprobs": []}
                result = {"choices": [choice] * count, "prompt_tokens": [3] * count, "cached_tokens": 0}
            self.scribe.store.leases.succeed(claim.id, claim.attempt, result)


class Tenants(NamedTuple):
    """Two tenants of all scopes, and one who sees everybody's."""

    owner: Client
    other: Client
    admin: Client


@contextlib.contextmanager
def opened_house(settings: Settings) -> Iterator[House]:
    """A house over an empty Redis. Its API knows new keys, and looks after its batches, sooner than usual."""
    over = threading.Event()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(cards, "_AGAIN_S", 0.01)
        patch.setattr(poller, "_EVERY_S", 0.05)
        scribe = stack.enter_context(Scribe(settings))
        scribe.announce_all([*CATALOGUE])
        keyring, rates = Keyring.of(settings), RateLimiter.of(settings)
        stack.callback(keyring.close)
        stack.callback(rates.close)
        keyring.add("the first")
        api = stack.enter_context(Api(settings))
        easel = stack.enter_context(Easel(scribe))
        clients = stack.enter_context(ExitStack())
        house = House(api, keyring, clients, scribe, easel, rates)

        def write() -> None:
            while not over.wait(0.02):
                with easel.drawing:
                    if easel.go.is_set():
                        house.write_all()

        writer = threading.Thread(target=write, name="writer")
        writer.start()
        stack.callback(writer.join)
        stack.callback(over.set)
        yield house


# -- images ------------------------------------------------------------------------------------------------------------

_DRAWN = frozenset({"n", "model", "lora", "control", "image_prompts", "expand_prompt", "deadline_s", "size"})
_EDITED = _DRAWN | {"images", "mask"}
_FURTHER = frozenset({"further images"})
_SERVED = frozenset({"cascade"})
_USUAL: Request = {"prompt": "a cat", "steps": 2}


def _json(method: str, path: str, body: Callable[[Request], Any]) -> Callable[[House, Client, Request], Call]:
    """A door that takes one JSON body. `{id}` in its path becomes a new one, and `{model}` the request's."""

    def prepare(house: House, client: Client, request: Request) -> Call:
        content = body({**_USUAL, **request})
        at = path.replace("{id}", house.new_id()).replace("{model}", request.get("model", OFFERED.name))
        return lambda: outcome_of(client.request(method, at, json=content))

    return prepare


def _job(request: Request) -> Request:
    edited = not request.keys().isdisjoint(("images", "mask"))
    return {"type": "edit", "images": [INLINE], **request} if edited else {"type": "image", **request}


def _edit(request: Request) -> Request:
    return {"images": [INLINE], **request}


def _form(house: House, client: Client, request: Request) -> Call:
    data = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in {**_USUAL, **request}.items()
    }
    return lambda: outcome_of(client.post(EDITS, data=data, files={"image": PNG}))


def _of_prediction(request: Request) -> Request:
    """The input of a prediction; files by their addresses, which `_prediction` completes."""
    names = {"n": "num_outputs", "steps": "num_inference_steps", "expand_prompt": "prompt_upsampling"}
    return {names.get(name, name): value for name, value in request.items() if name not in ("model", "webhook_url")}


def _prediction(method: str, path: str) -> Callable[[House, Client, Request], Call]:
    def prepare(house: House, client: Client, request: Request) -> Call:
        def address(reference: Request) -> str:
            if "file_id" in reference:
                return f"{client.base_url}".rstrip("/") + f"/v1/files/{reference['file_id']}"
            return str(reference["image_url"])

        given = {**_USUAL, **request}
        values = _of_prediction(given)
        if "images" in values or "mask" in values:
            (image,) = values.pop("images", [INLINE])
            values["image"] = address(image)
        if "mask" in values:
            values["mask"] = address(values["mask"])
        body: Request = {"input": values}
        if "webhook_url" in given:
            body["webhook"] = given["webhook_url"]
        name = request.get("model", OFFERED.name)
        if "{model}" not in path and "model" in request:
            body["version"] = name
        at = path.replace("{id}", house.new_id()).replace("{model}", name)
        return lambda: outcome_of(client.request(method, at, json=body))

    return prepare


def _inference(path: str, *, edited: bool) -> Callable[[House, Client, Request], Call]:
    """As huggingface_hub's client asks: its picture, if there is one, is in the body."""

    def body(request: Request) -> Request:
        names = {"steps": "num_inference_steps"}
        left = {names.get(name, name): v for name, v in request.items() if name not in ("prompt", "model")}
        if edited:
            return {"inputs": base64.b64encode(PNG).decode(), "parameters": {"prompt": request["prompt"], **left}}
        return {"inputs": request["prompt"], "parameters": left}

    return _json("POST", path, body)


def _sdapi(path: str) -> Callable[[House, Client, Request], Call]:
    def body(request: Request) -> Request:
        loras = f" <lora:{request['lora']}:1>" if "lora" in request else ""
        made: Request = {"prompt": request["prompt"] + loras, "steps": request["steps"]}
        if "n" in request:
            made["batch_size"] = request["n"]
        if "model" in request:
            made["override_settings"] = {"sd_model_checkpoint": request["model"]}
        if path.endswith("img2img"):
            made["init_images"] = [base64.b64encode(PNG).decode()]
        return made

    return _json("POST", path, body)


def _line(
    endpoint: str, body: Callable[[Request], Request], usual: Request = _USUAL
) -> Callable[[House, Client, Request], Call]:
    """A line of a batch: the outcome is that of the batch if it is refused, else that of the line."""

    def prepare(house: House, client: Client, request: Request) -> Call:
        line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body({**usual, **request})}
        file = house.upload(client, json.dumps(line).encode(), **BATCH)
        fields = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}

        def call() -> Outcome:
            answer = client.post("/v1/batches", json=fields)
            if answer.status_code != 200:
                return outcome_of(answer)
            batch = house.ended(client, answer.json()["id"])
            result = ok(client.get(f"/v1/files/{batch['output_file_id'] or batch['error_file_id']}/content")).json()
            response = result["response"]
            code = None if response["status_code"] == 200 else response["body"]["error"]["code"]
            return Outcome(response["status_code"], code, response["body"])

        return call

    return prepare


def _again(endpoint: str, body: Callable[[Request], Request]) -> Callable[[House, Client, Request], Call]:
    """A job that was cancelled, made once more."""

    def prepare(house: House, client: Client, request: Request) -> Call:
        with house.holding():
            known = house.worker.ids()
            if endpoint == "/v1/jobs":
                (id,) = {str(ok(client.post(endpoint, json=body({**_USUAL, **request})), 202).json()["id"])}
                ok(client.post(f"/v1/jobs/{id}/cancel"))
            else:
                asks = threading.Thread(target=client.post, args=(endpoint,), kwargs={"json": body(request)})
                asks.start()
                (id,) = eventually(lambda: house.worker.ids() - known)
                ok(client.post(f"/v1/jobs/{id}/cancel"))
                asks.join()
            assert house.worker.is_(id, JobState.CANCELLED)
        return lambda: outcome_of(client.post(f"/v1/jobs/{id}/requeue"))

    return prepare


_WEBHOOK = frozenset({"webhook_url"})
_JOB = _EDITED | _FURTHER | _SERVED | _WEBHOOK

IMAGE_DOORS = (
    Door("job", "POST /v1/jobs", _json("POST", "/v1/jobs", _job), _JOB),
    Door("job of a chosen id", "PUT /v1/jobs/{id}", _json("PUT", "/v1/jobs/{id}", _job), _JOB),
    Door("generation", f"POST {IMAGES}", _json("POST", IMAGES, dict), _DRAWN | _SERVED),
    Door("edit", f"POST {EDITS}", _json("POST", EDITS, _edit), _EDITED | _FURTHER),
    Door("form", f"POST {EDITS}", _form, _DRAWN),
    Door("line of generations", "POST /v1/batches", _line(IMAGES, dict), _DRAWN | _SERVED, lines=True),
    Door("line of edits", "POST /v1/batches", _line(EDITS, _edit), _EDITED | _FURTHER, lines=True),
    Door("txt2img", "POST /sdapi/v1/txt2img", _sdapi("/sdapi/v1/txt2img"), frozenset({"n", "model", "lora"})),
    Door("img2img", "POST /sdapi/v1/img2img", _sdapi("/sdapi/v1/img2img"), frozenset({"n", "model", "lora"})),
    Door("Cog", "POST /predictions", _prediction("POST", "/predictions"), _EDITED | _WEBHOOK),
    Door("Cog, of a chosen id", "PUT /predictions/{id}", _prediction("PUT", "/predictions/{id}"), _EDITED | _WEBHOOK),
    Door("Replicate", "POST /v1/predictions", _prediction("POST", "/v1/predictions"), _EDITED | _WEBHOOK),
    Door("Replicate, of a model", "POST /v1/models/{owner}/{name}/predictions",
         _prediction("POST", "/v1/models/x/{model}/predictions"), _EDITED | _WEBHOOK),
    Door("Hugging Face", "POST /v1/models/{name:path}", _inference("/v1/models/{model}", edited=False),
         _DRAWN - {"n", "size"}),
    Door("Hugging Face, from a picture", "POST /v1/models/{name:path}", _inference("/v1/models/{model}", edited=True),
         _DRAWN - {"n", "size"}),
    *(Door(f"Hugging Face, at {path}", f"POST {path}", _inference(path, edited=False), _DRAWN - {"n", "model", "size"})
      for path in ("/", "/v1")),
    Door("job again", "POST /v1/jobs/{id}/requeue", _again("/v1/jobs", _job), _DRAWN),
)  # fmt: skip

# -- texts -------------------------------------------------------------------------------------------------------------

_ASKED: Request = {"prompt": "hello", "max_tokens": 40}


def _texts(endpoint: str) -> Callable[[Request], Request]:
    """The body of an endpoint for a request of `_ASKED`'s fields."""

    def body(request: Request) -> Request:
        given = {**_ASKED, **request}
        prompt, most = given.pop("prompt"), given.pop("max_tokens")
        if endpoint == CHAT:
            return {"messages": [{"role": "user", "content": prompt}], "max_tokens": most, **given}
        if endpoint == COMPLETIONS:
            return {"prompt": prompt, "max_tokens": most, **given}
        if endpoint == RESPONSES:
            return {"input": prompt, "max_output_tokens": most, **given}
        return {"input": prompt, **given}

    return body


def _text(endpoint: str, path: str = "") -> Callable[[House, Client, Request], Call]:
    def prepare(house: House, client: Client, request: Request) -> Call:
        content = _texts(endpoint)(request)
        at = (path or endpoint).replace("{model}", request.get("model", WRITER.name))
        return lambda: outcome_of(client.post(at, json=content))

    return prepare


_WRITTEN = frozenset({"n", "model", "max_tokens"})

TEXT_DOORS = (
    Door("chat", f"POST {CHAT}", _text(CHAT), _WRITTEN, "text"),
    Door("chat, Hugging Face", "POST /v1/models/{name:path}" + CHAT, _text(CHAT, "/v1/models/{model}" + CHAT), _WRITTEN,
         "text"),
    Door("completion", f"POST {COMPLETIONS}", _text(COMPLETIONS), _WRITTEN, "text"),
    Door("response", f"POST {RESPONSES}", _text(RESPONSES), _WRITTEN - {"n"}, "text"),
    Door("embedding", f"POST {EMBEDDINGS}", _text(EMBEDDINGS), frozenset({"model"}), "text"),
    Door("line of chats", "POST /v1/batches", _line(CHAT, _texts(CHAT), {}), _WRITTEN, "text", lines=True),
    Door("line of completions", "POST /v1/batches", _line(COMPLETIONS, _texts(COMPLETIONS), {}), _WRITTEN, "text",
         lines=True),
    Door("line of embeddings", "POST /v1/batches", _line(EMBEDDINGS, _texts(EMBEDDINGS), {}), frozenset({"model"}),
         "text", lines=True),
    Door("text again", "POST /v1/jobs/{id}/requeue", _again(CHAT, _texts(CHAT)), _WRITTEN, "text"),
)  # fmt: skip

DOORS = IMAGE_DOORS + TEXT_DOORS
