"""What a client of the service does: asks for pictures over HTTP, looks at jobs, fetches what was drawn.

Knows the REST API's addresses and nothing of what lies behind them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import httpx2


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


class Client:
    """Thread-safe. Raises `httpx2.TransportError` while nobody answers."""

    def __init__(self, url: str) -> None:
        self._http = httpx2.Client(base_url=url, timeout=30, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def submit(self, order: Order, **more: Any) -> str:
        """The accepted job's id. Raises `Refused`."""
        response = self._http.post("/v1/jobs", json=order.body | more)
        if response.status_code != 202:
            raise Refused(response)
        return str(response.json()["id"])

    def look(self, id: str) -> dict[str, Any]:
        response = self._http.get(f"/v1/jobs/{id}")
        if response.status_code != 200:
            raise Refused(response)
        answer: dict[str, Any] = response.json()
        return answer

    def picture(self, id: str, k: int = 0) -> bytes:
        response = self._http.get(f"/v1/jobs/{id}/images/{k}")
        if response.status_code != 200:
            raise Refused(response)
        return response.content

    def cancel(self, id: str) -> None:
        response = self._http.post(f"/v1/jobs/{id}/cancel")
        if response.status_code != 200:
            raise Refused(response)

    def get(self, path: str) -> httpx2.Response:
        return self._http.get(path)

    def ready(self) -> bool:
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx2.TransportError:
            return False
