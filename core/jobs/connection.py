"""How Redis is reached: pools, timeouts, and redis-py's many errors as three of ours.

Knows nothing of what is kept in Redis.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry

from core.jobs.keys import PREFIX

CONNECTIONS = 32  # of one store; further threads wait for one to come back
TIMEOUT_S = 5.0  # to connect, to wait for an answer, and to wait for a free connection
_CHECK_S = 15  # a connection idle for so long is tried with a PING before it is used

# The code of an error, first in what Redis says; what a script's command said follows words of Redis 6's own.
_CODE = re.compile(r"(?:^-?|@user_script: ?\d+: ?-?|: -)([A-Z]{3,})\b")
# What it says where a script's command is not its user's to run, in the words of 6 and 7.0, and of later ones.
_DENIED = re.compile(r"NOPERM|The user executing the script can't|ACL failure in script")
_REASONS = {
    "NOREPLICAS": "too few replicas are connected",
    "READONLY": "it is a read-only replica",
    "MASTERDOWN": "it is a replica that has lost its master",
    "BUSY": "it is busy with a script",
    "NOAUTH": "it asks for a password",
    "CLUSTERDOWN": "its cluster is down",
}
# What a mistake of ours or a damaged key brings about: it would be refused for ever.
_FAULTS = {"ERR", "WRONGTYPE", "NOSCRIPT", "EXECABORT", "NOGROUP", "BUSYGROUP", "CROSSSLOT", "MOVED", "ASK"}


class StoreError(RuntimeError):
    """Redis did not do what it was asked. The message names no user's input."""


class StoreDown(StoreError):
    """Redis cannot be reached, does not answer, or refuses for now: it loads, is a replica, lacks one. Try again."""


class StoreDenied(StoreDown):
    """Redis does not let its user do this: it lacks a right, and `rights.Rights` tells which. Try again."""


class StoreFull(StoreError):
    """Redis takes no more data: its memory limit is reached, or its disk is full."""


def connect(url: str) -> redis.Redis:
    """A client for any number of threads. Connects at its first command. Raises ValueError for a url of no use.

    A command whose connection broke is sent again twice: every script must bear that.
    """
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=CONNECTIONS,
        timeout=TIMEOUT_S,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        socket_keepalive=True,
        health_check_interval=_CHECK_S,
        decode_responses=True,
        protocol=2,
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.05), 2, supported_errors=(redis.ConnectionError,)),
    )
    return redis.Redis.from_pool(pool)


def connect_asyncio(url: str, *, connections: int, answer_s: float) -> redis.asyncio.Redis:
    """A client for one event loop that never repeats a command. `answer_s`: the longest wait for an answer."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=None,
        socket_timeout=answer_s,
        socket_connect_timeout=TIMEOUT_S,
        socket_keepalive=True,
        decode_responses=True,
        protocol=2,
        retry=AsyncRetry(NoBackoff(), 0),
    )
    return redis.asyncio.Redis.from_pool(pool)


def connection_asyncio(url: str) -> AbstractConnection:
    """One connection for one event loop, which connects when it is first written to. Raises ValueError as `connect`.

    Its `retry` is for who sends again what broke with it. How long an answer may take is for the caller to see to.
    """
    pool = redis.asyncio.ConnectionPool.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=TIMEOUT_S,
        socket_keepalive=True,
        health_check_interval=_CHECK_S,
        decode_responses=True,
        protocol=2,
        retry=AsyncRetry(ExponentialBackoff(cap=0.2, base=0.05), 2, supported_errors=(redis.ConnectionError,)),
    )
    made: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
    return made


class Script:
    """A Lua script with one client. A call raises `StoreError`s; the prefix of all keys is its first argument."""

    def __init__(self, client: redis.Redis, text: str) -> None:
        self._client, self._text = client, text
        self._sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()  # as Redis names scripts

    def __call__(self, *arguments: str | int | float) -> Any:
        with translated():
            try:
                return self._client.evalsha(self._sha, 0, PREFIX, *arguments)
            except redis.exceptions.NoScriptError:
                # The whole text, in one step: a Redis that is started again between two would not know it either.
                return self._client.eval(self._text, 0, PREFIX, *arguments)


@contextmanager
def translated() -> Iterator[None]:
    """Turns redis-py's errors into `StoreError`s. A context, and a decorator too."""
    try:
        yield
    except redis.RedisError as error:
        raise _translate(error) from error


def _translate(error: redis.RedisError) -> StoreError:
    # Redis 6 wraps what a script's command said in words of its own, so that only the text tells.
    said = str(error)
    if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM command not allowed" in said:
        return StoreFull("Redis has reached its memory limit")
    if "MISCONF" in said:
        return StoreFull("Redis cannot write its file")
    if isinstance(error, redis.exceptions.NoPermissionError) or _DENIED.search(said):
        return StoreDenied("Redis does not let its user do this")
    if isinstance(error, redis.AuthenticationError):
        return StoreDown("Redis does not accept the password")
    if isinstance(error, redis.exceptions.BusyLoadingError):
        return StoreDown("Redis is still loading its file")
    if isinstance(error, redis.TimeoutError):
        return StoreDown("Redis does not answer")
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return StoreDown("Redis shows a certificate that is not trusted, or not its own")
    code = _code(error)
    if code and code not in _FAULTS:  # also those that a later Redis may have: a refusal is no result
        return StoreDown(f"Redis refuses for now: {_REASONS.get(code, f'it says {code}')}")
    if isinstance(error, redis.ConnectionError):
        return StoreDown("Redis cannot be reached")
    return StoreError(f"Redis refused a command: {type(error).__name__}")


def _code(error: redis.RedisError) -> str:
    """The code that Redis began its error with; redis-py cuts off those that it has a class for."""
    for kind, code in (
        (redis.ReadOnlyError, "READONLY"),
        (redis.exceptions.MasterDownError, "MASTERDOWN"),
        (redis.exceptions.ClusterDownError, "CLUSTERDOWN"),
        (redis.exceptions.TryAgainError, "TRYAGAIN"),
    ):
        if isinstance(error, kind):
            return code
    found = _CODE.search(str(error)) if isinstance(error, redis.ResponseError) else None
    return found[1] if found else ""
