"""Implements the clients of a history: threads that call the REST API in many ways."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx2

from tests.faults.histories.gallery import Gallery, digest
from tests.faults.histories.line import Line, bytes_of
from tests.faults.histories.record import OK, UNKNOWN, Call
from tests.faults.histories.strangers import EDITS, PICTURE, Thing, probe, stolen_line
from tests.faults.histories.world import RATES

LONG = 12_000, 120_000  # characters


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
        self, name: str, tenant: str, line: Line, others: list[tuple[str, Own]], things: list[Thing],
        gallery: Gallery, hook: str, stop: threading.Event,
    ) -> None:  # fmt: skip
        """`others`: jobs of all clients, with whose they are. `things`: all that they made and did not reuse the id of.

        `hook`: where webhooks go.
        """
        super().__init__(name=name, daemon=True)
        self.tenant, self.line, self.others, self.hook, self.over = tenant, line, others, hook, stop
        self.things, self.gallery = things, gallery
        self.own: list[Own] = []
        self.links: list[Own] = []  # also of what was erased
        self.made: list[tuple[str, tuple[str, ...]]] = []  # files, with what their content is
        self.batches: list[Call] = []
        self.unresolved: list[Callable[[], Call]] = []
        self.error: BaseException | None = None
        self._count = 0

    def run(self) -> None:
        random_ = self.line.random
        names, weights = zip(*WHAT.items(), strict=True)
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
            if not own.id.startswith("logo-"):  # other tenants choose those too
                self._made("job", own.id)

    def post(self) -> None:
        self._count += 1
        self._make("", f"{self.name}-key-{self._count}")

    def resolve(self) -> None:
        if self.unresolved and (call := self.unresolved[0]()).outcome != UNKNOWN:
            self.unresolved.pop(0)
            self.note(call)

    def reuse(self) -> None:
        """Create another job under an id that was erased, or that another tenant uses too."""
        self._make(f"logo-{self.name.partition('c')[0]}-{self.line.random.randrange(2)}")

    def erase(self) -> None:
        if own := self._any():
            self._erase(own)

    def _erase(self, own: Own) -> None:
        self.line.erase(self.tenant, own.id)
        self.own.remove(own)

    def erase_logo(self) -> None:
        logos = [own for own in self.own if own.id.startswith("logo-")]
        if logos and (own := self.line.random.choice(logos)):
            if not own.link:
                self.look(own)
            if own.link or self.line.random.random() >= 0.7:  # else later, when its link outlives it
                self._erase(own)

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
            erased = [own for own in self.links if own not in self.own]
            own = self.line.random.choice(erased if erased and self.line.random.random() < 0.5 else self.links)
            about = {"about": own.id, "created": own.created, "wants": own.wants}
            self.line.call("link", "", "GET", own.link, bytes_of, **about)

    def list(self) -> None:
        self.line.list(self.tenant)

    def probe(self) -> None:
        """What is another's: all of it must look as if it were not there."""
        probe(self.line, self.tenant, self.things, self.line.random)

    def _made(self, kind: str, id: str) -> None:
        self.things.append(Thing(kind, id, self.tenant))

    def text(self) -> None:
        self._count += 1
        self.line.text(self.tenant, f"{self.name} writes {self._count}")

    def long_text(self) -> None:
        """A request and an answer that are large for a record, or larger than it may be."""
        self._count += 1
        name = f"{self.name} writes much {self._count}"
        self.line.text(self.tenant, f"{name} " + "x" * self.line.random.choice(LONG), key=name)

    def files(self) -> None:
        random_ = self.line.random
        self.line.files(self.tenant)
        self.line.batches(self.tenant)
        if self.made:
            id, wants = random_.choice(self.made)
            self.line.content(self.tenant, id, wants)
            if random_.random() < 0.3:
                self.made.remove((id, wants))
                self.line.forget(self.tenant, id)

    def batch(self) -> None:
        self._batch(self.line.random.randrange(1, 4))

    def _batch(self, count: int) -> None:
        self._count += 1
        lines, wants = [], []
        for k in range(count):
            body, want = self.gallery.order(self.line.random, f"{self.name} batch {self._count} {k}", line=True)
            body["response_format"] = "b64_json"
            lines.append({"custom_id": f"line-{k}", "method": "POST", "url": "/v1/images/generations", "body": body})
            wants += [f"line-{k} {one}" for one in want]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = self._file(data, "file")
        if file is not None:
            call = self.line.batch(self.tenant, file, tuple(wants))
            if call.outcome == OK:
                self.batches.append(call)
                self._made("batch", call.ids[0])

    def steal(self) -> None:
        """A batch of the client's own, whose line names another's picture: nothing may come of it."""
        pictures = [thing for thing in self.things[-60:] if thing.kind == PICTURE and thing.owner != self.tenant]
        if not pictures or self.tenant in RATES:  # a line that is refused is charged until its batch ends
            return
        thing = self.line.random.choice(pictures)
        file = self._file(stolen_line(thing), "file")
        if file is not None:
            call = self.line.batch(self.tenant, file, (), EDITS, about=thing.id, owner=thing.owner)
            if call.outcome == OK:
                self.batches.append(call)
                self._made("batch", call.ids[0])

    def large_batch(self) -> None:
        """A batch of more pictures than the tenant may have at once, which is refused, or of a few."""
        self._batch(int(RATES[self.tenant][1].partition("/")[0]) + 5 if self.tenant in RATES else 3)

    def edit(self) -> None:
        """Edit a picture that was uploaded before."""
        self._count += 1
        data = self.gallery.source(self.line.random)
        if data is not None and (file := self._file(data, "picture")) is not None:
            fields, wants = self.gallery.edit(self.line.random, f"{self.name} edits {self._count}", data, file)
            id = f"{self.name}-{self._count}"
            self.note(self.line.submit(self.tenant, id, {"type": "edit", **fields}, wants))

    def _file(self, data: bytes, kind: str) -> str | None:
        """The id of an upload; None: it was not taken, as far as the answer says."""
        call = self.line.upload(self.tenant, data, "vision" if kind == "picture" else "batch")
        if call.outcome != OK:
            return None
        self.made.append((call.ids[0], (digest(data),)))
        self._made(kind, call.ids[0])
        return call.ids[0]

    def _any(self) -> Own | None:
        return self.line.random.choice(self.own[-12:]) if self.own else None


# What a client does, and how often.
WHAT = {
    "put": 9, "post": 5, "resolve": 3, "reuse": 4, "erase": 2, "erase_logo": 4, "cancel": 2, "look": 6, "follow": 4,
    "fetch": 5, "link": 4, "list": 2, "probe": 6, "text": 3, "files": 2, "batch": 0.7, "edit": 0.7,
    "long_text": 0.7, "large_batch": 0.3, "steal": 0.7,
}  # fmt: skip
