"""Names of the Redis keys that both Python and Lua use. `lua/shared/record.lua` documents their contents."""

from __future__ import annotations

PREFIX = "diptych:"

WORKERS = f"{PREFIX}workers"
MODELS = f"{PREFIX}models"
PAUSED = f"{PREFIX}paused"
DEAD_LETTERS = f"{PREFIX}dead_letters"  # list of queue entries that are not messages (dead letters), newest first
KEYS = f"{PREFIX}keys"  # hash: id of an API key → its stored fields
ACCESS = f"{PREFIX}access"  # "keys" once there was a key, "open" after `unlock`; outlives the last key
SECRET = f"{PREFIX}secret"  # signs links
HAPPENED = f"{PREFIX}happened"  # stream of notices: jobs that just got an event


def job(id: str) -> str:
    return f"{PREFIX}job:{id}"


def preview(id: str) -> str:
    return f"{PREFIX}preview:{id}"


def events(id: str) -> str:
    return f"{PREFIX}events:{id}"


def backlog(queue: str) -> str:
    return f"{PREFIX}backlog:{queue}"


def active_models(queue: str) -> str:
    return f"{PREFIX}active:{queue}"


def worker(id: str) -> str:
    return f"{PREFIX}worker:{id}"


def control(worker_id: str) -> str:
    return f"{PREFIX}control:{worker_id}"
