"""Runs several APIs behind one address, like a proxy, and clients that send requests to it continuously.

A request goes to an API in rotation; an API is taken out before it is stopped. Every answer that is neither a success
nor documented for restarts is recorded.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.faults.histories.record import FINAL
from tests.faults.parts import wait_for

_TIMEOUT = httpx2.Timeout(120)
_POLL_S = 0.05
_LOST_S = 120.0  # far more than any job takes: it only decides that one is lost


def id_of(key: str) -> str:
    """The job id of an Idempotency-Key in a service without API keys."""
    return "job_" + hashlib.sha256(f"\0{key}".encode()).hexdigest()[:24]


class Rotation:
    """Thread-safe."""

    def __init__(self, *urls: str) -> None:
        self._in = list(urls)
        self._open: Counter[str] = Counter()  # requests that are answered at once, by API
        self._waiting: dict[str, set[str]] = {url: set() for url in urls}  # jobs that are waited for there
        self._change = threading.Condition()
        self._turn = 0

    def _next(self) -> str:
        self._turn += 1
        return self._in[self._turn % len(self._in)]

    @contextmanager
    def short(self) -> Iterator[str]:
        """An API for a request that is answered at once."""
        with self._change:
            url = self._next()
            self._open[url] += 1
        try:
            yield url
        finally:
            with self._change:
                self._open[url] -= 1
                self._change.notify_all()

    @contextmanager
    def long(self, job: str, url: str = "") -> Iterator[str]:
        """An API for a request that waits for this job; the one that is named if it is in rotation."""
        with self._change:
            url = url if url in self._in else self._next()
            self._waiting[url].add(job)
        try:
            yield url
        finally:
            with self._change:
                self._waiting[url].discard(job)

    def take_out(self, url: str, made: Callable[[str], bool]) -> set[str]:
        """Send nothing more there. Returns when all that was sent has come in: only waits are open; and whose."""
        with self._change:
            self._in.remove(url)
            assert self._change.wait_for(lambda: not self._open[url], 60), "a request is never answered"
        wait_for("what is waited for is made", lambda: all(made(job) for job in self.waits(url)), 60)
        return self.waits(url)

    def waits(self, url: str) -> set[str]:
        with self._change:
            return set(self._waiting[url])

    def put_in(self, url: str) -> None:
        with self._change:
            self._in.append(url)


@dataclass
class Clients:
    """Threads that request one image after another until they are stopped."""

    rotation: Rotation
    steps: int
    accepted: dict[str, dict[str, Any]] = field(default_factory=dict)  # id → what was asked for
    problems: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)  # jobs whose client was told that its server stops
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, name: str, how: Callable[[str, dict[str, Any]], object], **fields: Any) -> None:
        """`how` is `order` or `draw`; `fields` go with every request."""

        def run() -> None:
            number = 0
            while not self._over.is_set():
                number += 1
                key = f"{name}-{number}"
                try:
                    how(key, {"prompt": key, "seed": number, "steps": self.steps, **fields})
                except Exception as error:
                    self.problems.append(f"{key}: {type(error).__name__}: {error}")
                    return

        thread = threading.Thread(target=run, name=name)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Returns when every client has what it asked for last."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def order(self, key: str, fields: dict[str, Any]) -> None:
        """A job by POST /v1/jobs, looked at until it has ended."""
        id, until = self.submit(key, fields), time.monotonic() + _LOST_S
        while (job := self.look(id))["status"] not in FINAL:
            assert time.monotonic() < until, "it never ends"
            time.sleep(_POLL_S)
        if job["status"] != "succeeded":
            self.problems.append(f"{key}: {job['status']}: {job['error']}")

    def submit(self, key: str, fields: dict[str, Any]) -> str:
        """The id of a job that was accepted."""
        with self.rotation.short() as url:
            answer = _post(f"{url}/v1/jobs", key, {"type": "image", **fields})
        if answer.status_code != 202:
            raise AssertionError(f"{answer.status_code}: {answer.text[:200]}")
        id = str(answer.json()["id"])
        self.accepted[id] = fields
        return id

    def look(self, id: str) -> dict[str, Any]:
        with self.rotation.short() as url:
            answer = httpx2.get(f"{url}/v1/jobs/{id}", timeout=_TIMEOUT, trust_env=False, verify=False)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def draw(self, key: str, fields: dict[str, Any], url: str = "") -> bytes:
        """A picture by POST /v1/images/generations; where the server stops meanwhile it is asked for elsewhere."""
        id = id_of(key)
        self.accepted[id] = fields
        while True:
            with self.rotation.long(id, url) as where:
                answer = _post(f"{where}/v1/images/generations", key, fields)
            if answer.status_code == 200:
                break
            error = answer.json()["error"]
            if answer.status_code != 503 or error["code"] != "stopping" or "retry-after" not in answer.headers:
                raise AssertionError(f"{answer.status_code}: {answer.text[:200]}")
            self.stopped.append(id)
            time.sleep(float(answer.headers["retry-after"]))
        if answer.json()["job_id"] != id:
            raise AssertionError("another job was made for the same key")
        return base64.b64decode(answer.json()["data"][0]["b64_json"])


def _post(url: str, key: str, fields: dict[str, Any]) -> httpx2.Response:
    """On a connection of its own. To load certificates for it would cost ten times the request."""
    return httpx2.post(
        url, json=fields, headers={"Idempotency-Key": key}, timeout=_TIMEOUT, trust_env=False, verify=False
    )
