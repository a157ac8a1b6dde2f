"""A read costs what it shows, is limited where its cost grows with what is kept, and takes its tenant's turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import redis
from fastapi.routing import APIRoute

from api.app import create_app
from api.service import Service
from contract.text import TextJob
from core.config import Settings
from core.jobs.keyring import Keyring
from core.jobs.record import JobDraft, ProgressReport, new_id
from core.jobs.store import JobStore
from deployment.redis import RedisServer
from tests.api.pictures.test_edits import PNG
from tests.api.world import BATCH, PATIENCE_S, TEXT, Api, Worker, bearer, eventually, ok, settings_of, token_of
from tests.core.present import present

LARGE = 300_000  # characters of a text's request, and of its answer
TEXTS = 20
IMAGES = 3
SLACK_BYTES = 150_000  # of what Redis sends besides: the second's snapshot of cards, keys and queues


class Door(NamedTuple):
    """A way to read. `limited`: it is charged to the rate limit, because its cost grows with what is kept."""

    path: str
    limited: bool = False


# By route. Paths name a text, {text}, or a picture's job, {image}, whose records are large, a file and a batch.
DOORS: dict[str, list[Door]] = {
    "/v1/jobs": [
        Door("/v1/jobs?limit=100", True), Door("/v1/jobs?limit=1", True), Door("/v1/jobs?status=failed", True)
    ],
    "/v1/jobs/{id}": [Door("/v1/jobs/{text}"), Door("/v1/jobs/{image}"), Door("/v1/jobs/{text}?wait_s=1")],
    "/v1/jobs/{id}/events": [
        Door("/v1/jobs/{text}/events", True), Door("/v1/jobs/{image}/events", True),
        Door("/v1/jobs/{text}/events?last_event_id=9999999999999-0", True),
    ],
    "/v1/jobs/{id}/preview": [Door("/v1/jobs/{text}/preview"), Door("/v1/jobs/{image}/preview")],
    "/v1/jobs/{id}/images/{k}": [Door("/v1/jobs/{text}/images/0"), Door("/v1/jobs/{image}/images/0")],
    "/v1/predictions": [Door("/v1/predictions", True)],
    "/v1/predictions/{id}": [Door("/v1/predictions/{text}"), Door("/v1/predictions/{image}")],
    "/v1/predictions/{id}/stream": [
        Door("/v1/predictions/{text}/stream", True), Door("/v1/predictions/{image}/stream", True)
    ],
    "/predictions/{id}": [Door("/predictions/{text}"), Door("/predictions/{image}")],
    "/v1/files": [Door("/v1/files", True)],
    "/v1/files/{id}": [Door("/v1/files/{file}")],
    "/v1/files/{id}/content": [Door("/v1/files/{file}/content")],
    "/v1/batches": [Door("/v1/batches", True)],
    "/v1/batches/{id}": [Door("/v1/batches/{batch}")],
    "/sdapi/v1/progress": [Door("/sdapi/v1/progress")],
    "/sdapi/v1/options": [Door("/sdapi/v1/options")],
}  # fmt: skip
# Routes that read nothing but the newest snapshot, which is read once a second for all.
FROM_MEMORY = {
    "/health-check", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2/models/{name:path}/ready",
    "/v1/models", "/v1/models/{name:path}", "/v1/models/{owner}/{name}", "/v1/models/{owner}/{name}/versions",
    "/v1/models/{owner}/{name}/versions/{id}", "/v1/account", "/v1/webhooks/default/secret", "/v1/queues", "/metrics",
    "/", "/docs", "/web/{name}",
}  # fmt: skip
ALL = [door for doors in DOORS.values() for door in doors]


def routes(folder: Path) -> dict[str, APIRoute]:
    """Every route that answers GET, by its path."""
    app = create_app(settings_of("redis://127.0.0.1:1", folder, sdapi=True))
    return {route.path: route for route in app.router.routes if isinstance(route, APIRoute) and "GET" in route.methods}


def of_sdapi(route: APIRoute) -> bool:
    """Return whether this is a list of AUTOMATIC1111's API: these read the key's options at most."""
    return "sdapi" in route.tags and "{" not in route.path


class House(NamedTuple):
    """An API over records of a tenant, whose jobs and files have these names."""

    api: Api
    client: redis.Redis
    names: dict[str, str]
    settings: Settings

    def get(self, door: Door, token: str) -> httpx2.Response:
        return self.api.get(door.path.format(**self.names), headers=bearer(token))

    def sent_bytes(self) -> int:
        stats: Any = self.client.info("stats")
        return int(stats["total_net_output_bytes"])


def request(text: str) -> dict[str, Any]:
    """A text's request as its record has it."""
    return TextJob(prompts=[text], max_tokens=1).to_dict()


def fill(store: JobStore, worker: Worker, owner: str) -> dict[str, str]:
    """Create texts with large requests, answers and errors, and jobs of pictures; returns the name of one of each."""
    names: dict[str, str] = {}
    for k in range(TEXTS):
        job = store.create(JobDraft(new_id(), "text", TEXT.name, request("x" * LARGE), owner=owner, followed=True))
        names["text"] = job.id
        claim = present(store.leases.claim(job.id, "ada"))
        store.leases.report([ProgressReport(job.id, claim.fence, {"tokens": 1}, pieces=[{"index": 0, "text": "y"}])])
        if k % 2:
            assert store.leases.succeed(job.id, claim.fence, {"choices": [{"text": "y" * LARGE}]})
        else:
            assert store.leases.fail(job.id, claim.fence, "refused", "no")
    for k in range(IMAGES):
        fields = {"prompt": f"a cat {k}", "n": 1, "width": 64, "height": 64, "steps": 1, "seed": 1}
        job = store.create(JobDraft(new_id(), "image", "emoji-xl", fields, owner=owner))
        claim = worker.take(job.id)
        worker.finish(claim)
        names["image"] = job.id
    return names


@pytest.fixture(scope="module")
def house(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, str, str]]:
    settings = settings_of(redis_server.url, tmp_path_factory.mktemp("data"), sdapi=True)
    scopes = ["images", "text", "files"]
    with closing(Keyring.of(settings)) as keyring:
        key, ann = keyring.add("ann", scopes, rate="100000/second")
    few = token_of(settings, "bob", scopes, rate="1/hour")
    with Worker(settings) as worker, closing(JobStore(settings.redis_url)) as store:
        worker.announce()
        with Api(settings) as api, redis.Redis.from_url(redis_server.url) as client:
            eventually(lambda: api.get("/readyz").status_code == 200)
            names = fill(store, worker, key.id)
            files = {"file": ("x.jsonl", b"no json\n" * 40_000)}
            file = ok(api.client.post("/v1/files", headers=bearer(ann), files=files, data=BATCH)).json()["id"]
            fields = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch = ok(api.client.post("/v1/batches", headers=bearer(ann), json=fields)).json()["id"]
            picture = {"file": ("x.png", PNG)}
            ok(api.client.post("/v1/files", headers=bearer(ann), files=picture, data={"purpose": "vision"}))
            yield House(api, client, {**names, "file": file, "batch": batch}, settings), ann, few


def test_every_route_that_reads_is_in_the_table(house: tuple[House, str, str], tmp_path: Path) -> None:
    every, listed = routes(tmp_path), DOORS.keys() | FROM_MEMORY
    assert listed <= every.keys()
    rest = [route for path, route in every.items() if path not in listed]
    assert all(map(of_sdapi, rest)), [route.path for route in rest if not of_sdapi(route)]
    here, token, _ = house
    before = here.sent_bytes()
    assert all(here.get(Door(route.path), token).status_code < 500 for route in rest)
    assert here.sent_bytes() - before < SLACK_BYTES


@pytest.mark.parametrize("door", ALL, ids=[door.path for door in ALL])
def test_a_read_costs_what_it_shows(house: tuple[House, str, str], door: Door) -> None:
    """Redis sends a few times as many bytes as the client gets, however large the records are that are listed."""
    here, token, _ = house
    before = here.sent_bytes()
    answer = here.get(door, token)
    assert answer.status_code < 500, answer.text
    read = here.sent_bytes() - before
    assert read <= SLACK_BYTES + 3 * len(answer.content), f"{read} bytes for {len(answer.content)}"


@pytest.mark.parametrize("door", ALL, ids=[door.path for door in ALL])
def test_what_grows_with_what_is_kept_is_charged(house: tuple[House, str, str], door: Door) -> None:
    here, _, few = house
    first, second = (here.get(door, few).status_code for _ in range(2))
    assert second == 429 if door.limited else 429 not in (first, second)


# -- turns -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """It connects to no Redis: nothing here asks for it."""
    service = Service(settings_of("redis://127.0.0.1:1", tmp_path))
    yield service
    service._close()


@pytest.mark.parametrize("pool", ["call", "stored"])
def test_a_tenant_who_occupies_all_that_it_can_delays_no_other(service: Service, pool: str) -> None:
    """Of a hundred reads of one tenant, all of which hang, few hold a thread; another's are done meanwhile."""
    end, running = threading.Event(), []
    run: Callable[..., Any] = getattr(service, pool)

    def hang() -> None:
        running.append(None)
        assert end.wait(PATIENCE_S)

    async def play() -> None:
        hanging = [asyncio.create_task(run("mallory", hang)) for _ in range(100)]
        while not running:
            await asyncio.sleep(0.01)
        assert await asyncio.gather(*(run(name, lambda: 7) for name in ("alice", "", "alice"))) == [7] * 3
        held = len(running)
        end.set()
        await asyncio.gather(*hanging)
        assert held < 10 and len(running) == 100

    asyncio.run(play())
