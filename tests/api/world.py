"""What the tests of the API are made of: a server on a free port, and a worker that is played by hand.

The server is the real one in a thread; the worker does through the store what a real one does, when it is told to.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx2
import openai
import pytest
import redis

from api import files
from api.app import make_server
from api.service import Service
from contract.card import ImageCard, ImageCosts, ImageLimits, ModelCard, TextCard, TextCosts, TextOffer
from core.artifacts import Artifacts, Spool
from core.config import Settings
from core.jobs.broker import PRIORITY_STEPS, list_key
from core.jobs.cards import WorkerCard
from core.jobs.files import File
from core.jobs.keyring import USUAL_SCOPES, Keyring
from core.jobs.record import Claim, Job, JobState, ProgressReport
from core.jobs.registry import Registry
from core.jobs.store import JobStore
from tests.core.jobs.books import kombu_queues
from tests.forks import API, Fork, forker

T = TypeVar("T")

BATCH = {"purpose": "batch"}  # the form of a file for a batch
PATIENCE_S = 60.0  # for what surely comes, on a machine that may stall

_COSTS = ImageCosts(
    encode_s=0.1,
    vae_s=0.2,
    solo_step_s={"128x128": 0.08, "64x64": 0.02},
    row_step_s={"128x128": 0.03, "64x64": 0.01},
)
CARD = ImageCard(
    name="emoji-xl",
    precision="fp32",
    device="cpu",
    kernels="avx2",
    kernels_reason="the processor has no AVX-512 VNNI",
    native=128,
    sizes=((64, 64), (96, 168), (128, 128), (168, 96)),
    schedulers=("euler", "dpm++2m"),
    default_scheduler="euler",
    limits=ImageLimits(),
    costs=_COSTS,
    least_costs=_COSTS,
    capacity_per_s=0.67,
)
TEXT = TextCard(
    name="emoji-lm", precision="fp32", device="cpu", limits=TextOffer(), costs=TextCosts(), capacity_per_s=0.67
)


def settings_of(url: str, folder: Path, **more: Any) -> Settings:
    return Settings(redis_url=url, data_dir=folder, **more)


def changed(settings: Settings, **fields: Any) -> Settings:
    """The settings with these fields, and else the defaults."""
    return settings_of(settings.redis_url, settings.data_dir, **fields)


def token_of(settings: Settings, name: str = "me", scopes: Sequence[str] = USUAL_SCOPES, **limits: Any) -> str:
    """The token of a new API key."""
    with closing(Keyring.of(settings)) as keyring:
        return keyring.add(name, scopes, **limits)[1]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def client_of(url: str | httpx2.URL, token: str = "none") -> openai.OpenAI:
    """OpenAI's own client."""
    return openai.OpenAI(base_url=f"{str(url).rstrip('/')}/v1", api_key=token, max_retries=0, timeout=PATIENCE_S)


def eventually(ask: Callable[[], T], what: str = "it never came") -> T:
    """The first answer that is true."""
    until = time.monotonic() + PATIENCE_S
    while not (answer := ask()):
        assert time.monotonic() < until, what
        time.sleep(0.01)
    return answer


SERVE = "import sys; from api.app import serve; from core.config import read; serve(read(), int(sys.argv[1]))"


@contextmanager
def process(code: str, settings: Settings, *, log: Path | None = None) -> Iterator[tuple[Fork, httpx2.Client]]:
    """An API in a process of its own, by code such as `SERVE`, and a client of it. Killed in the end.

    What it writes goes to `log`, or to a pipe, which blocks it once it is full.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as opened:
        environment = {
            **os.environ, "DIPTYCH_REDIS_URL": settings.redis_url, "DIPTYCH_DATA_DIR": str(settings.data_dir),
            "DIPTYCH_MAX_QUEUED": str(settings.max_queued), "DIPTYCH_SDAPI": str(settings.sdapi),
        }  # fmt: skip
        words = ("-c", code, str(listening.fileno()))
        output = subprocess.PIPE if log is None else opened.enter_context(log.open("ab")).fileno()
        child = forker(*API).start(words, env=environment, stderr=output, pass_fds=[listening.fileno()])
        port = listening.getsockname()[1]
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, verify=False) as client:
            eventually(lambda: answers(client) or child.poll() is not None)
            yield child, client
    finally:
        child.kill()
        child.wait()
        if child.stderr is not None:
            child.stderr.close()


def answers(client: httpx2.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx2.TransportError:
        return False


def use_s3(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Clients of S3 talk to this address."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.setenv(name, "secret")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        patch.setenv(name, "us-east-1")
    patch.setenv("AWS_ENDPOINT_URL", endpoint)


def kept(service: Service, data: bytes) -> File:
    """A file of a batch, past the API."""
    return files.keep_spool(service, "", "x.jsonl", "batch", Spool.of(io.BytesIO(data)))


class Api:
    """The real server in a thread of this process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # As `serve` takes one: by its number, which makes Python look what it is.
        self._socket = socket.socket(fileno=socket.create_server(("127.0.0.1", 0)).detach())
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make_server(settings)
        self._thread = threading.Thread(target=self.server.run, args=([self._socket],))
        self.client = httpx2.Client(base_url=self.url, timeout=PATIENCE_S, verify=False)

    def __enter__(self) -> Self:
        self._thread.start()
        eventually(lambda: self.server.started or not self._thread.is_alive())
        assert self.server.started
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._socket.close()

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return self.client.get(path, **options)

    def head(self, path: str, **options: Any) -> httpx2.Response:
        return self.client.head(path, **options)

    def delete(self, path: str) -> httpx2.Response:
        return self.client.delete(path)

    def models(self) -> list[dict[str, Any]]:
        return list(self.get("/v1/models").json()["data"])

    def post(self, path: str, **fields: Any) -> httpx2.Response:
        return self.client.post(path, json=fields)

    def draw(self, **fields: Any) -> httpx2.Response:
        """POST /v1/images/generations; waits."""
        return self.post("/v1/images/generations", **{"prompt": "a cat", **fields})

    def order(self, **fields: Any) -> str:
        """POST /v1/jobs; the job's id."""
        answer = self.post("/v1/jobs", **{"type": "image", "prompt": "a cat", **fields})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def job(self, id: str) -> dict[str, Any]:
        answer = self.client.get(f"/v1/jobs/{id}")
        assert answer.status_code == 200
        return dict(answer.json())

    @contextmanager
    def events(self, id: str, after: str | None = None) -> Iterator[Iterator[Sent]]:
        """The job's events as a client reads them, as long as the context is open."""
        headers = {} if after is None else {"Last-Event-ID": after}
        with self.client.stream("GET", f"/v1/jobs/{id}/events", headers=headers) as answer:
            assert answer.status_code in (200, 204), answer.read()
            yield parsed(answer.iter_lines())

    def all_events(self, id: str, after: str | None = None) -> list[Sent]:
        """All events until the stream ends by itself."""
        with self.events(id, after) as events:
            return list(events)


@dataclasses.dataclass(frozen=True)
class Sent:
    """A server-sent event."""

    id: str
    type: str
    data: dict[str, Any]


def parsed(lines: Iterator[str]) -> Iterator[Sent]:
    """Server-sent events, by the letter of their specification as far as it is used here. Comments are left out."""
    fields: dict[str, str] = {}
    for line in lines:
        if line == "":
            if "data" in fields:
                yield Sent(fields.get("id", ""), fields.get("event", "message"), json.loads(fields["data"]))
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")


@contextmanager
def opened(settings: Settings, card: ModelCard | None = None) -> Iterator[tuple[Api, Worker]]:
    """An API and a worker; with a card the worker has announced it, and the API knows it."""
    with Worker(settings) as worker:
        if card is not None:
            worker.announce(card=card)
        with Api(settings) as api:
            if card is not None:
                eventually(lambda: api.client.get("/readyz").status_code == 200)
            yield api, worker


class Worker:
    """A worker without an engine: takes, reports and ends what it is told to."""

    def __init__(self, settings: Settings, name: str = "worker-1") -> None:
        self.settings, self.name = settings, name
        self.store = JobStore.of(settings)
        self.registry = Registry.of(settings)
        self.artifacts = Artifacts(settings.artifacts)
        self.redis: redis.Redis = redis.Redis.from_url(settings.redis_url, decode_responses=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()
        self.registry.close()
        self.redis.close()

    def announce(
        self,
        state: str = "ready",
        message: str = "",
        card: ModelCard | None = CARD,
        ttl_s: float = 600,
        loading: Mapping[str, str] = {},
    ) -> None:
        models = [] if card is None else [card]
        own = WorkerCard(self.name, "here", 1, state, message, 1_700_000_000.5, models, loading=dict(loading))
        self.registry.announce(own, ttl_s)

    def ids(self) -> set[str]:
        """Of every job there is."""
        return {key.removeprefix("diptych:job:") for key in self.redis.scan_iter("diptych:job:*", count=1000)}

    def messages(self, modality: str = "image") -> list[tuple[str, int]]:
        """What Celery's lists of a modality's queues hold: job id and level, next first."""
        found = []
        for step in PRIORITY_STEPS:
            keys = [list_key(queue, step) for queue in kombu_queues(self.redis, modality)]
            for raw in (raw for key in keys for raw in reversed(self.redis.lrange(key, 0, -1))):
                message = json.loads(raw)
                assert message["headers"]["task"] == f"diptych.{modality}"
                (args, _, _) = json.loads(base64.b64decode(message["body"]))
                found.append((str(args[0]), step))
        return found

    def messages_left(self) -> list[tuple[str, int]]:
        """Those whose job still waits."""
        return [(id, step) for id, step in self.messages() if self.is_(id, JobState.QUEUED)]

    def take(self, id: str) -> Claim:
        claim = self.store.leases.claim(id, self.name)
        assert claim is not None
        return claim

    def report(self, claim: Claim, done: int) -> None:
        n, steps = claim.parameters["n"], claim.parameters["steps"]
        data = {"steps_done": done, "steps": n * steps, "image": 0, "images_done": 0}
        assert self.store.leases.report([ProgressReport(claim.id, claim.attempt, data)]).stale == set()

    def finish(self, claim: Claim, *given: bytes) -> list[bytes]:
        """End it well, with these pictures or others; returns them."""
        pictures = [*given] or [b"\x89PNG of " + f"{claim.id} {k}".encode() for k in range(claim.parameters["n"])]
        images = [
            {
                "key": self.artifacts.put(picture, "image/png"),
                "seed": (claim.parameters.get("seed", 0) + k) % 2**63,
                "width": claim.parameters["width"],
                "height": claim.parameters["height"],
                "media_type": "image/png",
                "size_bytes": len(picture),
                "warnings": [],
            }
            for k, picture in enumerate(pictures)
        ]
        assert self.store.leases.succeed(claim.id, claim.attempt, {"images": images, "engine_s": 0.5})
        return pictures

    def work(self, id: str) -> list[bytes]:
        return self.finish(self.take(id))

    def job(self, id: str) -> Job:
        job = self.store.get(id)
        assert job is not None
        return job

    def is_(self, id: str, state: JobState) -> bool:
        return self.job(id).state is state


def ok(answer: httpx2.Response, status: int = 200) -> httpx2.Response:
    """The answer, which has this status."""
    assert answer.status_code == status, answer.text
    return answer


def check_error(
    answer: httpx2.Response, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The answer is this error in OpenAI's shape; returns its inside."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    content = answer.json()
    assert set(content) == {"error"}
    error = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    expected = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    assert error["type"] == expected
    assert isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return dict(error)
