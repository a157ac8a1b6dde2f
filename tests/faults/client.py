"""Implements a client of the service: requests images over HTTP, follows jobs, downloads images.

It uses only the REST API, and tolerates a slow store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import httpx2

from core.jobs.connection import StoreDown

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Order:
    """One picture that is asked for. Deterministic, so that the same order always brings the same bytes."""

    prompt: str
    seed: int = 0
    steps: int = 60
    priority: int = 5
    deterministic: bool = True
    n: int = 1

    @property
    def body(self) -> dict[str, Any]:
        return {"type": "image"} | asdict(self)


class Refused(AssertionError):
    """The service took no job. Holds the status and the error's code."""

    def __init__(self, response: httpx2.Response) -> None:
        super().__init__(f"{response.status_code}: {response.text[:300]}")
        self.status = response.status_code
        self.code = response.json()["error"]["code"] if "json" in response.headers.get("content-type", "") else None


T = TypeVar("T")


def patiently(call: Callable[[], T]) -> T:
    """Call until the store answers. Raises `Refused` for all else that a service says."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except (Refused, StoreDown) as error:
            if (isinstance(error, Refused) and error.code != "store_down") or time.monotonic() > until:
                raise
        time.sleep(0.2)


class Client:
    """Thread-safe. Raises `httpx2.TransportError` if the service is unreachable, and `Refused`.

    All but `submit` are patient while the service says that its store does not answer: on a busy disk it may not.
    """

    def __init__(self, url: str) -> None:
        self._http = httpx2.Client(base_url=url, timeout=30, trust_env=False, verify=False)

    def close(self) -> None:
        self._http.close()

    def submit(self, order: Order, **more: Any) -> str:
        """The accepted job's id. Raises `Refused`."""
        response = self._http.post("/v1/jobs", json=order.body | more)
        if response.status_code != 202:
            raise Refused(response)
        return str(response.json()["id"])

    def look(self, id: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._patiently("GET", f"/v1/jobs/{id}").json()
        return answer

    def picture(self, id: str, k: int = 0) -> bytes:
        return self._patiently("GET", f"/v1/jobs/{id}/images/{k}").content

    def cancel(self, id: str) -> None:
        self._patiently("POST", f"/v1/jobs/{id}/cancel")

    def _patiently(self, method: str, path: str) -> httpx2.Response:
        def ask() -> httpx2.Response:
            response = self._http.request(method, path)
            if response.status_code != 200:
                raise Refused(response)
            return response

        return patiently(ask)

    def get(self, path: str) -> httpx2.Response:
        return self._http.get(path)

    def ready(self) -> bool:
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx2.TransportError:
            return False
