"""Whose is what: every route of the API, asked by another tenant, by one without the scope, and by nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

import api
from core.jobs.record import JobState, record_id
from tests.api.doors import DOORS, IMAGES, WRITER, House, Tenants, outcome_of
from tests.api.easel import asked
from tests.api.test_access import Client
from tests.api.world import BATCH, eventually, ok

WEB = Path(api.__file__).parent / "web"
SETTINGS = {"sdapi": True, "rate": "100000/second"}

JOB = (
    "GET /v1/jobs/{id}", "GET /v1/jobs/{id}/events", "GET /v1/jobs/{id}/images/{k}", "GET /v1/jobs/{id}/preview",
    "GET /predictions/{id}", "GET /v1/predictions/{id}", "GET /v1/predictions/{id}/stream",
    "POST /v1/jobs/{id}/cancel", "POST /predictions/{id}/cancel", "POST /v1/predictions/{id}/cancel",
    "POST /v1/jobs/{id}/requeue", "DELETE /v1/jobs/{id}",
)  # fmt: skip
FILE = ("GET /v1/files/{id}", "GET /v1/files/{id}/content", "POST /v1/batches", "DELETE /v1/files/{id}")
BATCH_ROUTES = ("GET /v1/batches/{id}", "POST /v1/batches/{id}/cancel")
THINGS = {"job": JOB, "file": FILE, "batch": BATCH_ROUTES}
"""The routes that name a thing of a tenant's, by its kind; last of each what ends it."""
LISTS = {
    "GET /v1/jobs": "job", "GET /v1/predictions": "job", "GET /v1/files": "file", "GET /v1/batches": "batch",
}  # fmt: skip
ADMIN = (
    "GET /v1/queues", "POST /v1/queues/{name}/pause", "POST /v1/queues/{name}/resume", "POST /v1/queues/{name}/cancel",
    "DELETE /v1/models/{name:path}", "GET /metrics",
)  # fmt: skip
SCOPES = {
    "files": (*FILE, "POST /v1/files", "GET /v1/files"),
    "images": (
        "POST /sdapi/v1/png-info", "POST /sdapi/v1/extra-single-image", "POST /sdapi/v1/options",
        "POST /sdapi/v1/interrupt", "POST /sdapi/v1/skip",
    ),
    "admin": ADMIN,
}  # fmt: skip
"""The routes that ask for a scope, beside those of doors."""
OWN = (
    "GET /v1/account", "GET /v1/webhooks/default/secret", "GET /sdapi/v1/options", "GET /sdapi/v1/progress",
    "POST /internal/progress",
)  # fmt: skip
"""The routes whose answers are of the caller."""
OPEN = (
    "GET /openapi.json", "GET /health-check", "GET /healthz", "GET /readyz", "GET /v2/health/live",
    "GET /v2/health/ready", "GET /", "GET /docs", "GET /web/{name}",
)  # fmt: skip
"""The routes that anybody may ask."""
MODELS = (
    "GET /v1/models", "GET /v1/models/{name:path}", "GET /v1/models/{owner}/{name}",
    "GET /v1/models/{owner}/{name}/versions", "GET /v1/models/{owner}/{name}/versions/{id}",
    "GET /v2/models/{name:path}/ready", "GET /sdapi/v1/sd-models", "GET /sdapi/v1/schedulers", "GET /sdapi/v1/scripts",
    "GET /sdapi/v1/sd-vae", "GET /sdapi/v1/samplers", "GET /sdapi/v1/upscalers", "GET /sdapi/v1/loras",
    "GET /sdapi/v1/embeddings", "GET /controlnet/model_list", "GET /controlnet/module_list",
    "GET /controlnet/control_types", "GET /queue/status",
)  # fmt: skip
"""The routes that tell of the models that a key may use, and of its queue: see test_key_limits.py."""
FIXED = (
    "GET /sdapi/v1/cmd-flags", "GET /sdapi/v1/memory", "GET /internal/ping", "GET /controlnet/version",
    "GET /controlnet/settings", "GET /sdapi/v1/latent-upscale-modes", "GET /sdapi/v1/hypernetworks",
    "GET /sdapi/v1/face-restorers", "GET /sdapi/v1/realesrgan-models", "GET /sdapi/v1/prompt-styles",
    "GET /sdapi/v1/script-info", "GET /sdapi/v1/extensions", "POST /sdapi/v1/refresh-checkpoints",
    "POST /sdapi/v1/refresh-vae", "POST /sdapi/v1/refresh-loras", "POST /sdapi/v1/unload-checkpoint",
    "POST /sdapi/v1/reload-checkpoint",
)  # fmt: skip
"""The routes that answer all keys alike."""


def routes(house: House) -> set[str]:
    """All routes of the app."""
    app: Any = house.api.server.config.app
    while not hasattr(app, "router"):
        app = app.app
    methods = ((route.path, method) for route in app.router.routes for method in route.methods)
    return {f"{method} {path}" for path, method in methods if method != "HEAD"}


def test_every_route_is_in_a_table(house: House) -> None:
    """So that no route is added whose rights nothing shows."""
    named = {route for kind in (*THINGS.values(), *SCOPES.values(), LISTS, OWN, OPEN, MODELS, FIXED)
             for route in kind}  # fmt: skip
    assert named | {door.route for door in DOORS} == routes(house)


def test_the_playground_asks_by_the_routes_of_the_tables(house: House) -> None:
    """It has no door of its own: each address in its scripts is one of a route."""
    paths = {route.split()[1] for route in routes(house)}
    shapes = {re.sub(r"{[^}]*}", "{}", path) for path in paths}
    scripts = "".join(path.read_text() for path in WEB.glob("*.js"))
    addresses = {re.sub(r"\${[^}]*}", "{}", address) for address in re.findall(r"[\"'`]/?(v1/[\w/${}.]+)", scripts)}
    assert len(addresses) > 8 and {f"/{address}" for address in addresses} <= shapes


def filled(route: str, **values: str) -> tuple[str, str]:
    """The method and the path of a route, with values for its names."""
    method, path = route.split()
    usual = {"{id}": "x", "{k}": "0", "{name}": "image", "{name:path}": "emoji-xl", "{owner}": "x"}
    for name, value in {**usual, **{f"{{{name}}}": value for name, value in values.items()}}.items():
        path = path.replace(name, value)
    return method, path


def call(client: Client, route: str, id: str) -> httpx2.Response:
    """Ask a route for the thing of this id."""
    if route == "POST /v1/batches":
        fields = {"input_file_id": id, "endpoint": IMAGES, "completion_window": "24h"}
        return client.post("/v1/batches", json=fields)
    return client.request(*filled(route, id=id))


def test_without_a_key_nothing_answers(house: House) -> None:
    stranger = house.client("")
    closed = sorted(routes(house) - {*OPEN})
    codes = {route: outcome_of(stranger.request(*filled(route), json={})) for route in closed}
    assert {route for route, outcome in codes.items() if not outcome.refused(401, "invalid_api_key")} == set()
    assert all(stranger.get(filled(route)[1]).status_code != 401 for route in OPEN)
    assert codes["POST /v1/predictions"].body["title"] == "Unauthenticated", "as Replicate's clients know it"


@pytest.mark.parametrize("scope", SCOPES)
def test_a_route_asks_for_its_scope(house: House, scope: str) -> None:
    """A key with all others is refused before anything of its request is read."""
    client = house.key(*({"images", "text", "files"} - {scope}))
    for route in SCOPES[scope]:
        outcome = outcome_of(client.request(*filled(route), json={}))
        assert outcome.refused(403, "insufficient_scope"), (route, outcome)


# -- things ------------------------------------------------------------------------------------------------------------


def made(house: House, client: Client, kind: str) -> str:
    """A new thing of the client's, which has ended if it can."""
    if kind == "file":
        line = {"custom_id": "a", "method": "POST", "url": IMAGES, "body": {"prompt": "a cat", "steps": 2}}
        return house.upload(client, json.dumps(line).encode(), **BATCH)
    if kind == "batch":
        id = str(ok(call(client, "POST /v1/batches", made(house, client, "file"))).json()["id"])
        house.ended(client, id)
        return id
    id = str(ok(client.order(steps=2), 202).json()["id"])
    eventually(lambda: house.worker.is_(id, JobState.SUCCEEDED))
    return id


NOBODYS = {"job": "job_000000000000000000000000", "file": "file-" + "0" * 24, "batch": "batch_" + "0" * 24}


@pytest.mark.parametrize("kind", THINGS)
def test_what_is_anothers_does_not_exist(house: House, tenants: Tenants, kind: str) -> None:
    """Its answers are those to an id that nobody has, to the byte; nothing comes of them."""
    id = made(house, tenants.owner, kind)
    before = house.worker.ids()
    for route in THINGS[kind]:
        theirs, nobodys = (call(tenants.other, route, each) for each in (id, NOBODYS[kind]))
        assert theirs.status_code == 404, (route, theirs.text)
        assert (theirs.content, theirs.headers.get("location")) == (nobodys.content, None), route
    assert house.worker.ids() == before
    for client in (tenants.admin, tenants.owner):
        for route in THINGS[kind][:-1]:
            assert call(client, route, id).status_code in (200, 204, 409), (route, client.key_id)
    assert call(tenants.owner, THINGS[kind][-1], id).status_code == 200


@pytest.mark.parametrize("route", [route for route in JOB if "predictions" in route])
def test_a_text_is_no_prediction(house: House, tenants: Tenants, route: str) -> None:
    """Not for its owner either, who sees it as a job."""
    with house.holding():
        id = house.hold_job(tenants.owner, id=house.new_id(), modality="text", model=WRITER.name)
        assert outcome_of(call(tenants.owner, route, id)).refused(404, "job_not_found")
        assert house.worker.is_(id, JobState.QUEUED)
        assert call(tenants.owner, "POST /v1/jobs/{id}/cancel", id).status_code == 200


@pytest.mark.parametrize("kind", ["job", "batch"])
def test_what_goes_on_is_ended_by_its_owner_alone(house: House, tenants: Tenants, kind: str) -> None:
    ends = [route for route in THINGS[kind] if route.endswith("cancel") or route.startswith("DELETE")]
    for route in ends:
        with house.holding():
            if kind == "job":
                id = str(ok(tenants.owner.order(), 202).json()["id"])
            else:
                id = str(ok(call(tenants.owner, "POST /v1/batches", made(house, tenants.owner, "file"))).json()["id"])
            look = f"/v1/{'jobs' if kind == 'job' else 'batches'}/{id}"
            state = tenants.owner.get(look).json()["status"]
            assert call(tenants.other, route, id).status_code == 404
            assert tenants.owner.get(look).json()["status"] == state
            assert call(tenants.owner, route, id).status_code == 200
            answer = tenants.owner.get(look)
            assert answer.status_code == 404 or answer.json()["status"] in ("cancelled", "cancelling"), route


@pytest.mark.parametrize("route", LISTS)
def test_a_list_is_of_the_callers_own(house: House, tenants: Tenants, route: str) -> None:
    kind = LISTS[route]
    ids = {client.key_id: made(house, client, kind) for client in tenants[:2]}

    def listed(client: Client) -> set[str]:
        content = ok(client.request(*filled(route))).json()
        return {each["id"] for each in content.get("data", content.get("results"))}

    own, other = (ids[client.key_id] for client in tenants[:2])
    assert own in listed(tenants.owner) and other not in listed(tenants.owner)
    assert other in listed(tenants.other) and own not in listed(tenants.other)
    everybodys = listed(tenants.admin) & {own, other}
    assert everybodys == (set() if kind == "file" else {own, other}), "an admin's files are its own"


@pytest.mark.parametrize("method_path", ["PUT /v1/jobs/{id}", "PUT /predictions/{id}"])
def test_an_id_that_is_anothers_is_free(house: House, tenants: Tenants, method_path: str) -> None:
    """Be the request the same or another."""
    id = house.new_id()
    body = {"type": "image", "prompt": "a cat"} if "jobs" in method_path else {"input": {"prompt": "a cat"}}
    other = {**body, "prompt": "a dog"} if "jobs" in method_path else {"input": {"prompt": "a dog"}}
    for client, asked_for in ((tenants.owner, body), (tenants.other, body), (tenants.admin, other)):
        answer = client.request(*filled(method_path, id=id), json=asked_for)
        assert answer.status_code in (200, 202) and answer.json()["id"] == id
        assert house.worker.job(record_id(client.key_id, id)).owner == client.key_id


# -- what is told of the caller ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["GET /v1/account", "GET /v1/webhooks/default/secret"])
def test_an_answer_is_of_the_caller(house: House, tenants: Tenants, route: str) -> None:
    answers = [ok(client.request(*filled(route))).content for client in (*tenants, *tenants)]
    assert len({*answers[:3]}) == 3 and answers[:3] == answers[3:]


class _Open(NamedTuple):
    """An open request of AUTOMATIC1111's API."""

    id: str
    answer: Any


@pytest.fixture
def open_request(house: House, tenants: Tenants) -> Iterator[_Open]:
    with house.holding():
        fields = {"prompt": "a cat", "steps": 2, "force_task_id": "task"}
        id, answer = asked(house.worker, tenants.owner.post, "/sdapi/v1/txt2img", json=fields)
        eventually(lambda: tenants.owner.get("/sdapi/v1/progress").json()["state"]["job"] == id)
        yield _Open(id, answer)
    answer.result(60)


def test_an_open_request_is_told_of_to_its_owner_alone(tenants: Tenants, open_request: _Open) -> None:
    for client, job, queued in (
        (tenants.other, "", False),
        (tenants.admin, "", False),
        (tenants.owner, open_request.id, True),
    ):
        assert client.get("/sdapi/v1/progress").json()["state"]["job"] == job
        assert client.post("/internal/progress", json={"id_task": "task"}).json()["queued"] is queued


@pytest.mark.parametrize("verb", ["interrupt", "skip"])
def test_an_open_request_is_ended_by_its_owner_alone(
    house: House, tenants: Tenants, open_request: _Open, verb: str
) -> None:
    for client in (tenants.other, tenants.admin):
        assert client.post(f"/sdapi/v1/{verb}").status_code == 200
        assert house.worker.is_(open_request.id, JobState.QUEUED)
    assert tenants.owner.post(f"/sdapi/v1/{verb}").status_code == 200
    assert house.worker.is_(open_request.id, JobState.CANCELLED)


def test_options_are_of_the_key_that_set_them(tenants: Tenants) -> None:
    options = "/sdapi/v1/options"
    ok(tenants.owner.post(options, json={"sd_model_checkpoint": "emoji-z", "samples_format": "webp"}))
    read = [ok(client.get(options)).json() for client in tenants]
    assert [(each["sd_model_checkpoint"], each["samples_format"]) for each in read] == [
        ("emoji-z", "webp"), ("emoji-xl", "png"), ("emoji-xl", "png"),
    ]  # fmt: skip
