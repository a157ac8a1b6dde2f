"""Attacks the service with a key of its own, beside the tenants, and cancels afterwards what this has made."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import httpx2

from tests.faults.bodies import requests
from tests.faults.histories.world import HOSTILE, World
from tests.faults.hostile import send

_REQUESTS = 8
_LINES = 10_000
_SPOILED = 200_000  # bytes
_TIMEOUT = httpx2.Timeout(10, connect=2)
_LIVE = ("queued", "running")


def bodies(world: World, seed: int, api: int) -> None:
    """Send hostile bodies to one of the APIs, in a thread; their statuses are appended to `world.statuses`."""
    port = world.listeners[api].getsockname()[1]
    token = world.tokens[HOSTILE]

    def run() -> None:
        for request in islice(requests(seed), _REQUESTS):
            request.headers.setdefault("Authorization", f"Bearer {token}")
            begin = time.monotonic()
            status = send(port, request)
            world.statuses.append((begin, time.monotonic(), request.kind, status))

    _start(world, run)


def broken_bodies(world: World, _: int, api: int) -> None:
    """Send requests with a tenant's key whose large bodies end in the middle, or are no JSON."""
    address = world.listeners[api].getsockname()

    def run() -> None:
        key = f"Host: localhost\r\nAuthorization: Bearer {world.tokens['anna']}\r\nConnection: close\r\n"
        form = (
            f"POST /v1/files HTTP/1.1\r\n{key}Content-Type: multipart/form-data; boundary=edge\r\n"
            f"Content-Length: {16 * 2**20}\r\n\r\n"
            '--edge\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        )
        spoiled = f"POST /v1/jobs HTTP/1.1\r\n{key}Content-Type: application/json\r\nContent-Length: {_SPOILED}\r\n\r\n"
        for k in range(_REQUESTS):
            data = (spoiled.encode() + b"[" * _SPOILED) if k % 2 else form.encode() + bytes(2**20)
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as connection:
                connection.sendall(data)
                if k % 2:
                    connection.recv(100)  # the answer

    _start(world, run)


def batch(world: World, seed: int, api: int) -> None:
    """Create a batch of ten thousand lines: all valid, or half of them of the worst kinds."""
    random_ = random.Random(seed)
    kinds = random_.choice(((_valid,), (_valid, _worst)))
    data = "\n".join(random_.choice(kinds)(random_, k) for k in range(_LINES)).encode()

    def run() -> None:
        with contextlib.suppress(httpx2.HTTPError, ValueError), _client(world, api) as http:
            form: dict[str, Any] = {"files": {"file": ("x.jsonl", data)}, "data": {"purpose": "batch"}}
            file = http.post("/v1/files", **form).json().get("id", "")
            fields = {"input_file_id": file, "endpoint": "/v1/images/generations", "completion_window": "24h"}
            http.post("/v1/batches", json=fields)

    _start(world, run)


def _valid(random_: random.Random, k: int) -> str:
    body = {"prompt": f"line {k} STEP=0.001", "steps": 1, "size": "32x32", "response_format": "b64_json"}
    return json.dumps({"custom_id": str(k), "method": "POST", "url": "/v1/images/generations", "body": body})


def _worst(random_: random.Random, k: int) -> str:
    """A line that is costly to read, or none at all; some are long."""
    long = 30_000 if k % 100 == 0 else 30
    body: dict[str, Any] = {"prompt": "((" * long, "steps": 10**9, "n": -1, "unknown": [[]] * long}
    line = {"custom_id": str(k % 7), "method": "POST", "url": "/v1/images/generations", "body": body}
    return random_.choice((
        json.dumps(line), json.dumps({**line, "url": "/v1/" + "x" * long}), json.dumps({**line, "body": None}),
        json.dumps({**line, "custom_id": "\ud800" * 20}), "[" * long, "{" * long, '{"custom_id": 1e999}', "\x00" * long,
        "",
        json.dumps({**line, "method": "DELETE"}), '{"custom_id": "' + "a" * long,
    ))  # fmt: skip


def calm(world: World, until: float) -> None:
    """Wait until all is sent, and cancel and delete what came of it. Raises AssertionError if that never ends."""
    for thread in world.threads:
        thread.join(max(0.0, until - time.monotonic()))
    world.threads.clear()
    if not world.attacked:
        return
    while time.monotonic() < until:
        with contextlib.suppress(httpx2.HTTPError, KeyError, ValueError), _client(world, 0) as http:
            if not _cancelled(http):
                for file in http.get("/v1/files?limit=100").json()["data"]:
                    http.delete(f"/v1/files/{file['id']}")
                world.attacked = False
                return
        world.tend()
        time.sleep(0.2)
    raise AssertionError("the attacker's jobs do not end")


def _cancelled(http: httpx2.Client) -> int:
    """Cancel what lives; returns how much that was."""
    batches = [one for one in http.get("/v1/batches?limit=100").json()["data"] if one["status"] == "in_progress"]
    jobs = [one for state in _LIVE for one in http.get(f"/v1/jobs?limit=100&status={state}").json()["data"]]
    for kind, found in (("batches", batches), ("jobs", jobs)):
        for one in found:
            http.post(f"/v1/{kind}/{one['id']}/cancel")
    return len(batches) + len(jobs)


def _client(world: World, api: int) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {world.tokens[HOSTILE]}"}
    return httpx2.Client(base_url=world.urls()[api], headers=headers, timeout=_TIMEOUT, trust_env=False)


def _start(world: World, run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run, name="attacker", daemon=True)
    world.threads.append(thread)
    world.attacked = True
    thread.start()
