"""Ways in which a real Redis refuses for a while, each with what is said of it. Undone when the context ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis

PATIENCE_S = 60.0


@contextmanager
def no_replicas(client: redis.Redis) -> Iterator[None]:
    client.config_set("min-replicas-to-write", 1)
    try:
        yield
    finally:
        client.config_set("min-replicas-to-write", 0)


@contextmanager
def read_only(client: redis.Redis) -> Iterator[None]:
    """A replica of nobody, as after a failover that this machine has not heard of."""
    client.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        client.replicaof("NO", "ONE")


@contextmanager
def busy(client: redis.Redis) -> Iterator[None]:
    """A script of somebody's that does not end."""
    client.config_set("lua-time-limit", 1)  # also the name of Redis 6.2
    own = client.connection_pool.make_connection()
    own.connect()
    own.send_command("EVAL", "while true do end", 0)
    until = time.monotonic() + PATIENCE_S
    try:
        while not _is_busy(client):
            assert time.monotonic() < until
        yield
    finally:
        with contextlib.suppress(redis.ResponseError):  # it never began; or the answer of one that was killed
            client.script_kill()
            own.read_response()
        own.disconnect()


def _is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    except redis.ConnectionError:
        return False
    return False


WAYS: dict[str, tuple[Callable[[redis.Redis], contextlib.AbstractContextManager[None]], str]] = {
    "no replicas": (no_replicas, "too few replicas are connected"),
    "read only": (read_only, "it is a read-only replica"),
    "busy": (busy, "it is busy with a script"),
}
