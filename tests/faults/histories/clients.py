"""Implements the clients of a history: threads that call the REST API in many ways and record every answer."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from tests.faults.histories.gallery import Gallery, digest
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
        read: Callable[[httpx2.Response], dict[str, Any]] = lambda response: {}, keep: bool = True,
        headers: dict[str, str] | None = None, given: dict[str, Any] | None = None, **about: Any,
    ) -> tuple[Call, httpx2.Response | None]:  # fmt: skip
        """`given` goes to the HTTP client, `about` into the record; `read` extracts the content of a 2xx answer."""
        key = {"Authorization": f"Bearer {self.tokens[tenant]}"} if tenant else {}
        begin = self.book.now()
        response = None
        try:
            response = self._http.request(
                method, self.random.choice(self.urls) + path, headers={**key, **(headers or {})}, **(given or {})
            )
        except httpx2.TransportError:
            call = Call(op, tenant, begin, self.book.now(), UNKNOWN, **about)
        else:
            told: dict[str, Any] = {}
            outcome, code = OK if response.is_success else REFUSED, ""
            if outcome == OK:
                told = read(response)
            else:
                try:
                    code = response.json()["error"]["code"] or ""
                except (ValueError, KeyError):
                    code = ""
                # A failure of the service says nothing of what was done before it.
                outcome = UNKNOWN if response.status_code >= 500 else REFUSED
            call = Call(op, tenant, begin, self.book.now(), outcome, response.status_code, code, **{**about, **told})
        return (self.book.write(call) if keep else call), response

    # -- jobs ------------------------------------------------------------------------------------------------------

    def submit(self, tenant: str, id: str, body: dict[str, Any], wants: tuple[str, ...], key: str = "") -> Call:
        """PUT with an id, or POST with an Idempotency-Key."""
        about = {"wants": wants, "key": key, "cost": len(wants), "about": id}
        way = ("PUT", f"/v1/jobs/{id}") if id else ("POST", "/v1/jobs")
        headers = {"Idempotency-Key": key} if key else {}
        return self.call("submit", tenant, *way, _accepted, headers=headers, given={"json": body}, **about)[0]

    def look(self, tenant: str, id: str, op: str = "look") -> tuple[Call, dict[str, Any]]:
        call, response = self.call(op, tenant, "GET", f"/v1/jobs/{id}", _shown, about=id)
        return call, response.json() if call.outcome == OK and response is not None else {}

    def cancel(self, tenant: str, id: str) -> Call:
        return self.call("cancel", tenant, "POST", f"/v1/jobs/{id}/cancel", _shown, about=id)[0]

    def erase(self, tenant: str, id: str) -> Call:
        return self.call("erase", tenant, "DELETE", f"/v1/jobs/{id}", about=id)[0]

    def list(self, tenant: str) -> Call:
        def read(response: httpx2.Response) -> dict[str, Any]:
            return {"seen": tuple(Seen.of(one) for one in response.json()["data"])}

        return self.call("list", tenant, "GET", "/v1/jobs?limit=100", read)[0]

    def picture(self, tenant: str, id: str, k: int = 0, **about: Any) -> Call:
        return self.call("picture", tenant, "GET", f"/v1/jobs/{id}/images/{k}", _bytes, about=id, **about)[0]

    def follow(self, tenant: str, id: str, *, slow_s: float = 0.0, whole: bool = False, created: float = 0.0) -> Call:
        """Follow a job's events for a while, or to their end. A slow one pauses between them."""
        begin, told, status, outcome = self.book.now(), [], 0, UNKNOWN
        url = f"{self.random.choice(self.urls)}/v1/jobs/{id}/events"
        try:
            headers = {"Authorization": f"Bearer {self.tokens[tenant]}"}
            with self._http.stream("GET", url, headers=headers) as response:
                status, outcome = response.status_code, OK if response.is_success else REFUSED
                fields: dict[str, str] = {}
                for line in response.iter_lines() if outcome == OK else ():
                    name, _, value = line.partition(": ")
                    if line and name:
                        fields[name] = value
                    elif not line and fields.get("event"):
                        told.append(_event(fields))
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

    def text(self, tenant: str, prompt: str) -> Call:
        def read(response: httpx2.Response) -> dict[str, Any]:
            return {"got": tuple(digest(one["message"]["content"].encode()) for one in response.json()["choices"])}

        body = {"messages": [{"role": "user", "content": prompt}]}
        about = {"wants": (digest(prompt.upper().encode()),), "key": prompt}
        return self.call("text", tenant, "POST", "/v1/chat/completions", read, given={"json": body}, **about)[0]

    # -- files and batches -----------------------------------------------------------------------------------------

    def upload(self, tenant: str, data: bytes) -> Call:
        given = {"files": {"file": ("asked.jsonl", data)}, "data": {"purpose": "batch"}}
        return self.call("upload", tenant, "POST", "/v1/files", _named, given=given, wants=(digest(data),))[0]

    def content(self, tenant: str, id: str, wants: tuple[str, ...]) -> tuple[Call, bytes]:
        call, response = self.call("content", tenant, "GET", f"/v1/files/{id}/content", _bytes, about=id, wants=wants)
        return call, response.content if response is not None else b""

    def files(self, tenant: str) -> Call:
        def read(response: httpx2.Response) -> dict[str, Any]:
            return {"ids": tuple(one["id"] for one in response.json()["data"])}

        return self.call("files", tenant, "GET", "/v1/files?limit=100", read)[0]

    def forget(self, tenant: str, id: str) -> Call:
        return self.call("forget", tenant, "DELETE", f"/v1/files/{id}", about=id)[0]

    def batch(self, tenant: str, file: str, wants: tuple[str, ...]) -> Call:
        fields = {"input_file_id": file, "endpoint": "/v1/images/generations", "completion_window": "24h"}
        return self.call("batch", tenant, "POST", "/v1/batches", _named, given={"json": fields}, wants=wants)[0]


def _accepted(response: httpx2.Response) -> dict[str, Any]:
    seen = Seen.of(response.json())
    return {"seen": (seen,), "about": seen.id}


def _shown(response: httpx2.Response) -> dict[str, Any]:
    return {"seen": (Seen.of(response.json()),)}


def _bytes(response: httpx2.Response) -> dict[str, Any]:
    return {"got": (digest(response.content),)}


def _named(response: httpx2.Response) -> dict[str, Any]:
    return {"ids": (response.json()["id"],)}


def _event(fields: dict[str, str]) -> Told:
    data = json.loads(fields.get("data") or "{}")
    job = Seen.of(data) if fields["event"] in FINAL and "created_at" in data else None
    value = data.get("attempt", 0) if fields["event"] == "running" else data.get("steps_done", 0)
    return Told(fields.get("id", ""), fields["event"], value if isinstance(value, int) else 0, job)


@dataclass
class Own:
    """A job that a client has created, as far as the client can tell."""

    id: str
    wants: tuple[str, ...]
    created: float
    link: str = ""


class Client(threading.Thread):
    """One client of one tenant: random calls of all kinds from its own seed, until it is stopped."""

    def __init__(
        self, name: str, tenant: str, line: Line, others: list[tuple[str, Own]], gallery: Gallery, hook: str,
        stop: threading.Event, without: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`others`: what all clients made, with whose it is. `hook`: where webhooks go. `without`: left out."""
        super().__init__(name=name, daemon=True)
        self.tenant, self.line, self.others, self.hook, self.over = tenant, line, others, hook, stop
        self.gallery = gallery
        self.own: list[Own] = []
        self.links: list[Own] = []  # also of what was erased
        self.made: list[tuple[str, tuple[str, ...]]] = []  # files, with what their content is
        self.batches: list[Call] = []
        self.unresolved: list[Callable[[], Call]] = []
        self.error: BaseException | None = None
        self._what = {name: often for name, often in WHAT.items() if name not in without}
        self._count = 0

    def run(self) -> None:
        random_ = self.line.random
        names, weights = zip(*self._what.items(), strict=True)
        try:
            while not self.over.is_set():
                getattr(self, random_.choices(names, weights)[0])()
                self.over.wait(random_.uniform(0.0, 0.08))
        except BaseException as error:
            self.error = error

    def _body(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        fields, wants = self.gallery.order(self.line.random, f"{self.name} {self._count}")
        body: dict[str, Any] = {"type": "image", "priority": self.line.random.randrange(10), **fields}
        if self.line.random.random() < 0.15:
            body["webhook_url"] = f"{self.hook}/{self.tenant}"
        return body, wants

    def put(self) -> None:
        self._count += 1
        self._make(f"{self.name}-{self._count}")

    def _make(self, id: str, key: str = "") -> None:
        body, wants = self._body()

        def again() -> Call:
            return self.line.submit(self.tenant, id, body, wants, key)

        call = again()
        if call.outcome == UNKNOWN and key:
            self.unresolved.append(again)
        self.note(call)

    def note(self, call: Call) -> None:
        """Remember what a submission made."""
        if call.outcome == OK and all(own.id != call.about for own in self.own):
            own = Own(call.about, call.wants, call.seen[0].created)
            self.own.append(own)
            self.others.append((self.tenant, own))

    def post(self) -> None:
        self._count += 1
        self._make("", f"{self.name}-key-{self._count}")

    def resolve(self) -> None:
        if self.unresolved and (call := self.unresolved[0]()).outcome != UNKNOWN:
            self.unresolved.pop(0)
            self.note(call)

    def reuse(self) -> None:
        """Create another job under an erased id, which may have been another tenant's."""
        self._make(f"logo-{self.name.partition('c')[0]}-{self.line.random.randrange(2)}")

    def erase(self) -> None:
        if own := self._any():
            self.line.erase(self.tenant, own.id)
            self.own.remove(own)

    def erase_logo(self) -> None:
        logos = [own for own in self.own if own.id.startswith("logo-")]
        if logos and (own := self.line.random.choice(logos)):
            if not own.link:
                self.look(own)
            self.line.erase(self.tenant, own.id)
            self.own.remove(own)

    def cancel(self) -> None:
        if own := self._any():
            self.line.cancel(self.tenant, own.id)

    def look(self, own: Own | None = None) -> None:
        if own := own or self._any():
            call, told = self.line.look(self.tenant, own.id)
            if call.outcome == OK and call.seen[0].created == own.created and told.get("images") and not own.link:
                own.link = httpx2.URL(told["images"][0]["url"]).raw_path.decode()
                self.links.append(own)

    def follow(self) -> None:
        if own := self._any():
            slow_s = self.line.random.choice((0.0, 0.0, 0.1))
            self.line.follow(self.tenant, own.id, slow_s=slow_s, created=own.created)

    def fetch(self) -> None:
        if own := self._any():
            self.line.picture(self.tenant, own.id)

    def link(self) -> None:
        if self.links:
            own = self.line.random.choice(self.links)
            about = {"about": own.id, "created": own.created, "wants": own.wants}
            self.line.call("link", "", "GET", own.link, _bytes, **about)

    def list(self) -> None:
        self.line.list(self.tenant)

    def probe(self) -> None:
        """What is another's: all of it must look as if it were not there."""
        found = [own for tenant, own in self.others if tenant != self.tenant]
        if found:
            id = self.line.random.choice(found).id
            if not id.startswith("logo-"):  # those may be this tenant's own by now
                ask = self.line.random.choice(("look", "fetch", "follow", "cancel"))
                if ask == "look":
                    self.line.look(self.tenant, id)
                elif ask == "fetch":
                    self.line.picture(self.tenant, id)
                elif ask == "follow":
                    self.line.follow(self.tenant, id)
                else:
                    self.line.call("probe", self.tenant, "POST", f"/v1/jobs/{id}/cancel", _shown, about=id)

    def text(self) -> None:
        self._count += 1
        self.line.text(self.tenant, f"{self.name} writes {self._count}")

    def files(self) -> None:
        random_ = self.line.random
        self.line.files(self.tenant)
        if self.made:
            id, wants = random_.choice(self.made)
            self.line.content(self.tenant, id, wants)
            if random_.random() < 0.3:
                self.made.remove((id, wants))
                self.line.forget(self.tenant, id)

    def batch(self) -> None:
        self._count += 1
        lines, wants = [], []
        for k in range(self.line.random.randrange(1, 4)):
            body, want = self.gallery.order(self.line.random, f"{self.name} batch {self._count} {k}", line=True)
            body["response_format"] = "b64_json"
            lines.append({"custom_id": f"line-{k}", "method": "POST", "url": "/v1/images/generations", "body": body})
            wants += [f"line-{k} {one}" for one in want]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = self.line.upload(self.tenant, data)
        if file.outcome == OK:
            call = self.line.batch(self.tenant, file.ids[0], tuple(wants))
            if call.outcome == OK:
                self.batches.append(call)
            self.made.append((file.ids[0], (digest(data),)))

    def _any(self) -> Own | None:
        return self.line.random.choice(self.own[-12:]) if self.own else None


# What a client does, and how often.
WHAT = {
    "put": 9, "post": 5, "resolve": 3, "reuse": 3, "erase": 2, "erase_logo": 3, "cancel": 2, "look": 6, "follow": 4,
    "fetch": 5, "link": 4, "list": 2, "probe": 3, "text": 3, "files": 2, "batch": 0.7,
}  # fmt: skip
