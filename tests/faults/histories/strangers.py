"""Asks for things without a right to them: with another tenant's key, and with none, in every way that names them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.faults.histories.line import Line
from tests.faults.histories.record import Call

JOB, FILE, PICTURE, BATCH = "job", "file", "picture", "batch"  # kinds; a picture is a file, to be edited
EDITS = "/v1/images/edits"
# Asks that are answered 400 about what does not exist: a model without control networks refuses before it looks for the
# picture, and a list knows no place after it.
EARLY = (
    "probe picture control", "probe picture image prompt",
    *(f"probe {kind} list after" for kind in (JOB, FILE, PICTURE, BATCH)),
)  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """A job, file or batch that a tenant has made."""

    kind: str
    id: str
    owner: str


class _Ask(NamedTuple):
    """One way to ask for a thing: `body` names it where the path does not."""

    method: str
    path: str
    body: Any = None


def _draft(**fields: Any) -> dict[str, Any]:
    return {"type": "image", "prompt": "a stranger's", "steps": 1, "size": "32x32", **fields}


def _asks(kind: str, id: str) -> dict[str, _Ask]:
    """Every way to ask for this thing, by name."""
    if kind == JOB:
        path = f"/v1/jobs/{id}"
        return {
            "look": _Ask("GET", path), "events": _Ask("GET", f"{path}/events"),
            "picture": _Ask("GET", f"{path}/images/0"), "cancel": _Ask("POST", f"{path}/cancel"),
            "requeue": _Ask("POST", f"{path}/requeue"), "erase": _Ask("DELETE", path),
            "list after": _Ask("GET", f"/v1/jobs?after={id}"),
        }  # fmt: skip
    if kind == BATCH:
        return {
            "look": _Ask("GET", f"/v1/batches/{id}"), "cancel": _Ask("POST", f"/v1/batches/{id}/cancel"),
            "list after": _Ask("GET", f"/v1/batches?after={id}"),
        }  # fmt: skip
    path, named = f"/v1/files/{id}", {"file_id": id}
    asks = {
        "look": _Ask("GET", path), "content": _Ask("GET", f"{path}/content"), "forget": _Ask("DELETE", path),
        "list after": _Ask("GET", f"/v1/files?after={id}"),
    }  # fmt: skip
    if kind == FILE:
        fields = {"input_file_id": id, "endpoint": "/v1/images/generations", "completion_window": "24h"}
        return {**asks, "batch": _Ask("POST", "/v1/batches", fields)}
    edit = {"type": "edit", "images": [named]}
    return {
        **asks, "edit": _Ask("POST", "/v1/jobs", _draft(**edit)),
        "mask": _Ask("POST", "/v1/jobs", _draft(**edit, mask=named)),
        "control": _Ask("POST", "/v1/jobs", _draft(control=[{"model": "canny", "image": named}])),
        "image prompt": _Ask("POST", "/v1/jobs", _draft(image_prompts=[{"model": "any", "image": named}])),
    }  # fmt: skip


def probe(line: Line, tenant: str, things: list[Thing], random_: random.Random) -> Call | None:
    """Ask for a thing of another tenant, with this tenant's key or without one. None: there is none yet."""
    others = [thing for thing in things[-60:] if thing.owner != tenant]
    if not others:
        return None
    thing = random_.choice(others)
    name = random_.choice(list(_asks(thing.kind, thing.id)))
    return ask(line, "" if random_.random() < 0.25 else tenant, thing, name)


def ask(line: Line, tenant: str, thing: Thing, name: str) -> Call:
    """Ask for it in the way of this name. An answer's body is not read: events may have no end."""
    method, path, body = _asks(thing.kind, thing.id)[name]
    given = {} if body is None else {"json": body}
    about = {"about": thing.id, "owner": thing.owner}
    return line.call(f"probe {thing.kind} {name}", tenant, method, path, None, given=given, **about)[0]


def stolen_line(thing: Thing) -> bytes:
    """A batch's file, whose only line edits this picture."""
    body = {"prompt": "a stranger's", "steps": 1, "size": "32x32", "images": [{"file_id": thing.id}]}
    body["response_format"] = "b64_json"
    return json.dumps({"custom_id": "stolen", "method": "POST", "url": EDITS, "body": body}).encode()


def ways(kind: str) -> list[str]:
    return list(_asks(kind, ""))
