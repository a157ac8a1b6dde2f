"""Calls the REST API from one thread and records every answer."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2

from tests.faults.histories.gallery import digest
from tests.faults.histories.record import FINAL, OK, REFUSED, UNKNOWN, Call, Seen, Told

_TIMEOUT = httpx2.Timeout(6, connect=2)
_LONGEST_FOLLOW_S = 4.0


class Book:
    """What all clients write down. Thread-safe."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._calls: list[Call] = []
        self._lock = threading.Lock()

    def now(self) -> float:
        return time.monotonic() - self.started

    def write(self, call: Call) -> Call:
        with self._lock:
            self._calls.append(call)
        return call

    @property
    def calls(self) -> list[Call]:
        with self._lock:
            return list(self._calls)


class Line:
    """One thread's way to the service: a call goes to any of the APIs, and is written down whatever comes of it."""

    def __init__(self, book: Book, urls: list[str], tokens: dict[str, str], random_: random.Random) -> None:
        self.book, self.urls, self.tokens, self.random = book, urls, tokens, random_
        self._http = httpx2.Client(timeout=_TIMEOUT, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def call(
        self, op: str, tenant: str, method: str, path: str,
        read: Callable[[httpx2.Response], dict[str, Any]] | None = lambda response: {}, keep: bool = True,
        headers: dict[str, str] | None = None, given: dict[str, Any] | None = None, **about: Any,
    ) -> tuple[Call, httpx2.Response | None]:  # fmt: skip
        """`given` goes to the HTTP client, `about` into the record; `read` extracts the content of a 2xx answer.

        Without `read` the body of a 2xx answer is not read.
        """
        headers = {**self._key(tenant), **(headers or {})}
        address, begin = self.random.choice(self.urls) + path, self.book.now()
        try:
            with self._http.stream(method, address, headers=headers, **(given or {})) as response:
                if read is not None or not response.is_success:
                    response.read()
        except httpx2.TransportError:
            call = Call(op, tenant, begin, self.book.now(), UNKNOWN, **about)
            return (self.book.write(call) if keep else call), None
        outcome, code = OK, ""
        if not response.is_success:
            # A failure of the service says nothing of what was done before it.
            outcome, code = UNKNOWN if response.status_code >= 500 else REFUSED, _code(response)
        elif read is not None:
            about |= read(response)
        call = Call(op, tenant, begin, self.book.now(), outcome, response.status_code, code, **about)
        return (self.book.write(call) if keep else call), response

    def _key(self, tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.tokens[tenant]}"} if tenant else {}

    # -- jobs ------------------------------------------------------------------------------------------------------

    def submit(
        self, tenant: str, id: str, body: dict[str, Any], wants: tuple[str, ...], key: str = "", **more: Any
    ) -> Call:
        """PUT with an id, or POST with an Idempotency-Key."""
        about = {"wants": wants, "key": key, "cost": len(wants), "about": id, **more}
        way = ("PUT", f"/v1/jobs/{id}") if id else ("POST", "/v1/jobs")
        headers = {"Idempotency-Key": key} if key else {}
        return self.call("submit", tenant, *way, _accepted, headers=headers, given={"json": body}, **about)[0]

    def look(self, tenant: str, id: str, op: str = "look") -> tuple[Call, dict[str, Any]]:
        call, response = self.call(op, tenant, "GET", f"/v1/jobs/{id}", shown, about=id)
        return call, response.json() if call.outcome == OK and response is not None else {}

    def cancel(self, tenant: str, id: str) -> Call:
        return self.call("cancel", tenant, "POST", f"/v1/jobs/{id}/cancel", shown, about=id)[0]

    def erase(self, tenant: str, id: str) -> Call:
        return self.call("erase", tenant, "DELETE", f"/v1/jobs/{id}", about=id)[0]

    def list(self, tenant: str) -> Call:
        def read(response: httpx2.Response) -> dict[str, Any]:
            return {"seen": tuple(Seen.of(one) for one in response.json()["data"])}

        return self.call("list", tenant, "GET", "/v1/jobs?limit=100", read)[0]

    def picture(self, tenant: str, id: str, k: int = 0, **about: Any) -> Call:
        return self.call("picture", tenant, "GET", f"/v1/jobs/{id}/images/{k}", bytes_of, about=id, **about)[0]

    def follow(self, tenant: str, id: str, *, slow_s: float = 0.0, whole: bool = False, created: float = 0.0) -> Call:
        """Follow a job's events for a while, or to their end. A slow one pauses between them."""
        begin, told, status, outcome = self.book.now(), [], 0, UNKNOWN
        url = f"{self.random.choice(self.urls)}/v1/jobs/{id}/events"
        try:
            with self._http.stream("GET", url, headers=self._key(tenant)) as response:
                status, outcome = response.status_code, OK if response.is_success else REFUSED
                fields: dict[str, str] = {}
                for line in response.iter_lines() if outcome == OK else ():
                    name, _, value = line.partition(": ")
                    if line and name:
                        fields[name] = value
                    elif not line and fields.get("event"):
                        data = json.loads(fields.get("data") or "{}")
                        told.append(Told.of(fields.get("id", ""), fields["event"], data))
                        fields = {}
                        if slow_s:
                            time.sleep(slow_s)
                    if not whole and self.book.now() - begin > _LONGEST_FOLLOW_S:
                        break
        except httpx2.TransportError:
            outcome = UNKNOWN
        ended = outcome == OK and bool(told) and told[-1].type in FINAL
        return self.book.write(
            Call(
                "events", tenant, begin, self.book.now(), outcome, status, about=id, created=created, told=tuple(told),
                whole=ended,
            )
        )  # fmt: skip

    def text(self, tenant: str, prompt: str, **more: Any) -> Call:
        def read(response: httpx2.Response) -> dict[str, Any]:
            return {"got": tuple(digest(one["message"]["content"].encode()) for one in response.json()["choices"])}

        body = {"messages": [{"role": "user", "content": prompt}]}
        about = {"wants": (digest(prompt.upper().encode()),), "key": prompt, **more}
        return self.call("text", tenant, "POST", "/v1/chat/completions", read, given={"json": body}, **about)[0]

    # -- files and batches -----------------------------------------------------------------------------------------

    def upload(self, tenant: str, data: bytes, purpose: str = "batch", **about: Any) -> Call:
        given = {"files": {"file": ("asked.jsonl", data)}, "data": {"purpose": purpose}}
        about = {"wants": (digest(data),), "size": len(data), **about}
        return self.call("upload", tenant, "POST", "/v1/files", _named, given=given, **about)[0]

    def content(self, tenant: str, id: str, wants: tuple[str, ...]) -> tuple[Call, bytes]:
        call, response = self.call("content", tenant, "GET", f"/v1/files/{id}/content", bytes_of, about=id, wants=wants)
        return call, response.content if response is not None else b""

    def files(self, tenant: str, limit: int = 100, **about: Any) -> Call:
        return self.call("files", tenant, "GET", f"/v1/files?limit={limit}", _listed, **about)[0]

    def batches(self, tenant: str) -> Call:
        return self.call("batches", tenant, "GET", "/v1/batches?limit=100", _listed)[0]

    def forget(self, tenant: str, id: str, **about: Any) -> Call:
        return self.call("forget", tenant, "DELETE", f"/v1/files/{id}", about=id, **about)[0]

    def batch(
        self, tenant: str, file: str, wants: tuple[str, ...], endpoint: str = "/v1/images/generations", **about: Any
    ) -> Call:
        fields = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
        return self.call(
            "batch",
            tenant,
            "POST",
            "/v1/batches",
            _named,
            given={"json": fields},
            wants=wants,
            cost=len(wants),
            **about,
        )[0]


def _code(response: httpx2.Response) -> str:
    """The error's code, where the answer has one."""
    try:
        return response.json()["error"]["code"] or ""
    except (ValueError, KeyError, TypeError):
        return ""


def _accepted(response: httpx2.Response) -> dict[str, Any]:
    seen = Seen.of(response.json())
    return {"seen": (seen,), "about": seen.id}


def shown(response: httpx2.Response) -> dict[str, Any]:
    return {"seen": (Seen.of(response.json()),)}


def bytes_of(response: httpx2.Response) -> dict[str, Any]:
    return {"got": (digest(response.content),)}


def _listed(response: httpx2.Response) -> dict[str, Any]:
    data = response.json()["data"]
    return {"ids": tuple(one["id"] for one in data), "size": sum(one.get("bytes", 0) for one in data)}


def _named(response: httpx2.Response) -> dict[str, Any]:
    return {"ids": (response.json()["id"],)}
