"""HTTP clients of the service, as in the README: each requests an image, downloads it, and requests the next."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

_TIMEOUT_S = 120.0


class ClientError(RuntimeError):
    """The response is not an image."""


class Client:
    """One keep-alive connection to the service."""

    def __init__(self, url: str) -> None:
        at = urlsplit(url)
        self._connection = http.client.HTTPConnection(at.hostname or "127.0.0.1", at.port, timeout=_TIMEOUT_S)

    def close(self) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Returns status and body. Raises OSError and `http.client.HTTPException`."""
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            answer = self._answer(method, path, data, headers)
        except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
            self._connection.close()  # the server ends connections that are idle: the next request opens another
            answer = self._answer(method, path, data, headers)
        return answer.status, answer.read()

    def _answer(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        self._connection.request(method, path, data, headers)
        return self._connection.getresponse()

    def draw(self, **wanted: Any) -> bytes:
        """`POST /v1/images/generations` with `response_format` "url", then the PNG there. Raises `ClientError`."""
        status, body = self.ask("POST", "/v1/images/generations", {"response_format": "url", **wanted})
        if status != 200:
            raise ClientError(f"POST /v1/images/generations: {status} {body[:300]!r}")
        address = urlsplit(json.loads(body)["data"][0]["url"])
        status, png = self.ask("GET", address.path)
        if status != 200 or not png.startswith(b"\x89PNG"):
            raise ClientError(f"GET {address.path}: {status} {png[:100]!r}")
        return png

    def graphs(self, model: str) -> dict[str, int]:
        """The numbers of recorded and of wanted graphs in `GET /v1/models`."""
        status, body = self.ask("GET", "/v1/models")
        if status != 200:
            raise ClientError(f"GET /v1/models: {status}")
        cards = [card["diptych"] for card in json.loads(body)["data"] if card["id"] == model]
        found: dict[str, int] = cards[0].get("graphs", {}) if cards else {}
        return found


@dataclass
class Load:
    """The results of a closed loop of clients: latency and completion time of each image."""

    ended: list[tuple[float, float]] = field(default_factory=list)  # (moment, latency), by `time.monotonic`
    errors: list[str] = field(default_factory=list)

    def window(self, begin: float, end: float) -> dict[str, Any]:
        """The images that finished between two times."""
        latencies = [latency for moment, latency in self.ended if begin <= moment < end]
        found: dict[str, Any] = {
            "seconds": round(end - begin, 2),
            "pictures": len(latencies),
            "pictures_per_s": round(len(latencies) / (end - begin), 3),
        }
        if latencies:
            p50, p99 = np.percentile(latencies, [50, 99]).tolist()
            found |= {"p50_s": round(p50, 3), "p99_s": round(p99, 3), "longest_s": round(max(latencies), 3)}
        return found


@contextmanager
def closed_loop(url: str, clients: int, wanted: dict[str, Any]) -> Iterator[Load]:
    """Context: that many clients request one image after another, all with different seeds and prompts."""
    load, stop, numbers = Load(), threading.Event(), iter(range(10**9))

    def run() -> None:
        client = Client(url)
        try:
            while not stop.is_set():
                number = next(numbers)
                started = time.monotonic()
                client.draw(**wanted, seed=number, prompt=f"{number}: a small red boat on a lake")
                now = time.monotonic()
                load.ended.append((now, now - started))
        except (ClientError, OSError, http.client.HTTPException) as error:
            load.errors.append(f"{type(error).__name__}: {error}")
        finally:
            client.close()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join(_TIMEOUT_S)
