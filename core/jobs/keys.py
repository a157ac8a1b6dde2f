"""Names of the keys in Redis that Python uses as well as Lua. `lua/shared/transitions.lua` says what each holds."""

from __future__ import annotations

PREFIX = "diptych:"

WORKERS = f"{PREFIX}workers"
MODELS = f"{PREFIX}models"
PAUSED = f"{PREFIX}paused"
DEAD_LETTERS = f"{PREFIX}dead_letters"  # list of queue entries that are no messages, the newest first
KEYS = f"{PREFIX}keys"  # hash: id of an API key → what is kept of it
ACCESS = f"{PREFIX}access"  # "keys" once there was a key, "open" where that was taken back; outlives the last key
SECRET = f"{PREFIX}secret"  # that links are signed with
HAPPENED = f"{PREFIX}happened"  # stream: jobs that something was just written of


def job(id: str) -> str:
    return f"{PREFIX}job:{id}"


def preview(id: str) -> str:
    return f"{PREFIX}preview:{id}"


def events(id: str) -> str:
    return f"{PREFIX}events:{id}"


def backlog(queue: str) -> str:
    return f"{PREFIX}backlog:{queue}"


def worker(id: str) -> str:
    return f"{PREFIX}worker:{id}"


def control(worker_id: str) -> str:
    return f"{PREFIX}control:{worker_id}"
