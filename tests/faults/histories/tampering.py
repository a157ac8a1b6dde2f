"""Writes into Redis what this version does not write: broken and repeated messages, and a newer version's fields."""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
from collections.abc import Callable
from functools import reduce
from operator import getitem
from typing import Any

from api.jobs.queue import MessageProducer
from core.jobs import keys
from core.jobs.broker import PRIORITY_STEPS, QUEUES, Envelope, list_key
from tests.faults.histories.world import World

_MESSAGES = 12
_RECORDS = 200  # at most
_NEW = {"future": "1", "future_list": '[{"a":null}]'}
# Only what exists is changed: a record may expire or be erased meanwhile.
_HASH = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], unpack(ARGV)) end"
_VALUE = "if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end"


def messages(world: World, seed: int) -> None:
    """Push broken, repeated and misdirected messages into Celery's lists. Raises redis-py's errors."""
    random_ = random.Random(seed)
    producer = MessageProducer(world.servers[0].url)
    try:
        with world.direct(world.servers[0]) as client:
            known = [entry.partition("|")[2] for entry in client.zrevrange(f"{keys.PREFIX}jobs", 0, 40)]
            ids = [*client.zrange(f"{keys.PREFIX}leases", 0, 9), *known, "no-such-job", "a" * 64]
            for _ in range(_MESSAGES):
                queue = random_.choice(QUEUES)  # also one that the job is not of
                whole = producer.message(Envelope(random_.choice(ids), queue, random_.randrange(10)))
                message = random_.choice(_CHANGES)(random_, whole)
                client.lpush(list_key(queue, random_.choice(PRIORITY_STEPS)), message)
    finally:
        producer.close()


def _part(path: str, value: object) -> Callable[[random.Random, str], str]:
    """The message with another value in one place, or with None without it."""
    *above, last = path.split(".")

    def change(_: random.Random, message: str) -> str:
        whole = json.loads(message)
        place = reduce(getitem, above, whole)
        place[last] = value
        if value is None:
            del place[last]
        return json.dumps(whole)

    return change


def _body(body: object) -> Callable[[random.Random, str], str]:
    return _part("body", base64.b64encode(json.dumps(body).encode()).decode())


class _Pickled:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def _pickled(_: random.Random, message: str) -> str:
    whole = json.loads(message)
    whole["content-type"] = "application/x-python-serialize"
    whole["content-encoding"] = "binary"
    whole["body"] = base64.b64encode(pickle.dumps(((_Pickled(),), {}, {}))).decode()
    return json.dumps(whole)


_CHANGES: tuple[Callable[[random.Random, str], str], ...] = (
    lambda _, message: message,  # replayed, or of a job that there is not
    lambda random_, message: message[: random_.randrange(len(message))],
    lambda random_, _: random_.choice(("", "null", "[]", "{}", '"x"', "1e999", "[" * 5_000, "\ud7ff\x00")),
    lambda random_, _: random_.randbytes(200).decode("latin-1"),
    _pickled,
    _part("body", "no base64"), _part("body", None), _part("headers", None), _part("headers", []),
    _part("headers.task", "os.system"), _part("headers.id", None), _part("headers.retries", "many"),
    _part("headers.eta", "never"), _part("headers.eta", "2999-01-01T00:00:00+00:00"),
    _part("headers.expires", "x"), _part("properties", None), _part("properties.delivery_info", 1),
    _part("properties.delivery_tag", None), _part("properties.priority", "first"),
    _part("content-type", "text/plain"), _part("content-encoding", "rot13"),
    _body([]), _body([[], {}, {}]), _body([[1], {}, {}]), _body([["a", "b"], {}, {}]), _body([["../x"], {"x": 1}, {}]),
    _body([[None], {}, {}]), _body([["x" * 100_000], {}, {}]), _body({"args": []}), _body([[{"a": []}], {}, None]),
)  # fmt: skip


def new_fields(world: World) -> None:
    """Give records, cards, keys and messages fields that only a newer version knows. Raises redis-py's errors."""
    with world.direct(world.servers[0]) as client:
        fields = [part for pair in _NEW.items() for part in pair]
        for kind in ("job", "file", "batch"):
            for number, key in enumerate(client.scan_iter(f"{keys.PREFIX}{kind}:*", 200)):
                if number == _RECORDS:
                    break
                client.eval(_HASH, 1, key, *fields)
                for name in ("parameters", "webhook", "result") if kind == "job" else ():
                    _extend(client, key, name, client.hget(key, name))
        for index in (keys.MODELS, keys.KEYS):
            for name, text in client.hgetall(index).items():
                _extend(client, index, name, text)
        for worker in client.zrange(keys.WORKERS, 0, -1):
            text = client.get(keys.worker(worker))
            if text:
                client.set(keys.worker(worker), _extended(text), xx=True, keepttl=True)
                client.xadd(keys.control(worker), {"future": "1"}, maxlen=1000)
        client.xadd(keys.HAPPENED, {"jobs": "no-such-job", "future": "1"}, maxlen=1000)


def _extended(text: str) -> str:
    return json.dumps({**json.loads(text), "future": {"a": [1, None]}})


def _extend(client: Any, key: str, field: str, text: str | None) -> None:
    if text:
        client.eval(_VALUE, 1, key, field, text, _extended(text))
