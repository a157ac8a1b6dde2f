"""The only Redis client: address, TLS, pools, timeouts, scripts; maps redis-py's errors to three of its own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry

from core.config import Settings
from core.jobs.keys import PREFIX
from core.jobs.scripts import load

CONNECTIONS = 32  # per client; further threads wait for a free one
TIMEOUT_S = 5.0  # to connect, to wait for a reply, and to wait for a free connection
_CHECK_S = 15  # a connection idle for this long is checked with a PING before use

_ALWAYS: dict[str, Any] = {
    "socket_connect_timeout": TIMEOUT_S, "socket_keepalive": True, "decode_responses": True, "protocol": 2,
}  # fmt: skip

# The error code is the first word of Redis's reply; errors of a command inside a script follow Redis 6's own words.
_CODE = re.compile(r"(?:^-?|@user_script: ?\d+: ?-?|: -)([A-Z]{3,})\b")
# Reply to a script command that the user may not run, as worded by Redis 6 and 7.0, and by later versions.
_DENIED = re.compile(r"NOPERM|The user executing the script can't|ACL failure in script")
_REASONS = {
    "NOREPLICAS": "too few replicas are connected",
    "READONLY": "it is a read-only replica",
    "MASTERDOWN": "it is a replica that has lost its master",
    "BUSY": "it is busy with a script",
    "NOAUTH": "it asks for a password",
    "CLUSTERDOWN": "its cluster is down",
}
# Errors caused by a bug or a damaged key: a retry would be refused again.
_FAULTS = {"ERR", "WRONGTYPE", "NOSCRIPT", "EXECABORT", "NOGROUP", "BUSYGROUP", "CROSSSLOT", "MOVED", "ASK"}


class StoreError(RuntimeError):
    """Redis refused or failed a command. The message contains no user input."""


class StoreDown(StoreError):
    """Redis is unreachable, does not reply, or refuses temporarily (loading, a replica, too few replicas).
    Retryable.
    """


class StoreDenied(StoreDown):
    """The Redis user lacks a right; `rights.RedisPermissions` names which. Retryable."""


class StoreFull(StoreError):
    """Redis accepts no more data: its memory limit is reached, or its disk is full."""


class RedisClient(redis.Redis):
    """A Redis client for any number of threads. Connects at the first command. Every command raises `StoreError`s.

    A command whose connection broke is sent up to two more times, so every script must be idempotent.
    """

    def __init__(self, url: str) -> None:
        """Prepare a client. Raises ValueError for an unusable URL."""
        self.url = url
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            health_check_interval=_CHECK_S,
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.05), 2, supported_errors=(redis.ConnectionError,)),
            **_ALWAYS,
        )
        super().__init__(connection_pool=pool)
        self.auto_close_connection_pool = True

    @classmethod
    def at(cls, redis: RedisClient | str) -> RedisClient:
        """Return the given client, or a new one for an address."""
        return redis if isinstance(redis, RedisClient) else cls(redis)

    def script(self, name: str, functions: str = "") -> Script:
        """The script of `lua/{name}.lua`; `functions` as for `load`."""
        return Script(self, load(name, functions))

    def asyncio(self, *, connections: int, answer_s: float) -> redis.asyncio.Redis:
        """A client for one event loop that never retries a command, and raises redis-py's own errors.

        `answer_s`: the longest wait for a reply.
        """
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            self.url,
            max_connections=connections,
            timeout=None,
            socket_timeout=answer_s,
            retry=AsyncRetry(NoBackoff(), 0),
            **_ALWAYS,
        )
        return redis.asyncio.Redis.from_pool(pool)

    def asyncio_connection(self) -> AbstractConnection:
        """One connection for one event loop; it connects at the first write.

        `retry` is for callers that resend what was cut off. They limit how long a reply may take.
        """
        pool = redis.asyncio.ConnectionPool.from_url(
            self.url,
            socket_timeout=None,
            health_check_interval=_CHECK_S,
            retry=AsyncRetry(ExponentialBackoff(cap=0.2, base=0.05), 2, supported_errors=(redis.ConnectionError,)),
            **_ALWAYS,
        )
        connection: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
        return connection

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with translate_redis_errors():
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> redis.client.Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _Pipeline(redis.client.Pipeline):
    def execute(self, raise_on_error: bool = True) -> list[Any]:
        with translate_redis_errors():
            return super().execute(raise_on_error)


class Script:
    """A Lua script bound to a client. Its first argument is the prefix of all keys."""

    def __init__(self, client: RedisClient, text: str) -> None:
        self._client, self.text = client, text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()  # Redis identifies scripts by SHA-1

    def __call__(self, *arguments: str | int | float) -> Any:
        try:
            return self._client.evalsha(self.sha, 0, PREFIX, *arguments)
        except StoreError as error:
            if not isinstance(error.__cause__, redis.exceptions.NoScriptError):
                raise
        # Sends the whole text in one command: after EVALSHA fails, a Redis that restarts before SCRIPT LOAD would lose
        # it again.
        return self._client.eval(self.text, 0, PREFIX, *arguments)


class RedisStore:
    """Base of the stores. Thread-safe; connects at the first command. Every method raises `StoreDown` or `StoreFull`.

    `redis`: a client, possibly shared, or the address for one of its own.
    """

    def __init__(self, redis: RedisClient | str) -> None:
        """Prepare a store. Raises ValueError for an unusable address."""
        self._client = RedisClient.at(redis)

    @classmethod
    def of(cls, settings: Settings, redis: RedisClient | None = None) -> Self:
        """Build a store with the limits from the settings; without a client, it connects to their address."""
        return cls(redis or settings.redis_url)

    def close(self) -> None:
        """Release the client's connections. A later call opens new ones."""
        self._client.close()


@contextmanager
def translate_redis_errors() -> Iterator[None]:
    """Context manager and decorator that turns redis-py's errors into `StoreError`s."""
    try:
        yield
    except redis.RedisError as error:
        raise _translate(error) from error


def _translate(error: redis.RedisError) -> StoreError:
    # Redis 6 rewords errors of commands inside a script, so that only the text identifies them.
    message = str(error)
    if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM command not allowed" in message:
        return StoreFull("Redis has reached its memory limit")
    if "MISCONF" in message:
        return StoreFull("Redis cannot write its file")
    if isinstance(error, redis.exceptions.NoPermissionError) or _DENIED.search(message):
        return StoreDenied("Redis does not let its user do this")
    if isinstance(error, redis.AuthenticationError):
        return StoreDown("Redis does not accept the password")
    if isinstance(error, redis.exceptions.BusyLoadingError):
        return StoreDown("Redis is still loading its file")
    if isinstance(error, redis.TimeoutError):
        return StoreDown("Redis does not answer")
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return StoreDown("Redis shows a certificate that is not trusted, or not its own")
    code = _code(error)
    if code and code not in _FAULTS:  # includes codes of later Redis versions: a refusal must not pass as a result
        return StoreDown(f"Redis refuses for now: {_REASONS.get(code, f'it says {code}')}")
    if isinstance(error, redis.ConnectionError):
        return StoreDown("Redis cannot be reached")
    return StoreError(f"Redis refused a command: {type(error).__name__}")


def _code(error: redis.RedisError) -> str:
    """The code at the start of Redis's error; redis-py strips the codes that it has an exception class for."""
    for kind, code in (
        (redis.ReadOnlyError, "READONLY"),
        (redis.exceptions.MasterDownError, "MASTERDOWN"),
        (redis.exceptions.ClusterDownError, "CLUSTERDOWN"),
        (redis.exceptions.TryAgainError, "TRYAGAIN"),
    ):
        if isinstance(error, kind):
            return code
    match = _CODE.search(str(error)) if isinstance(error, redis.ResponseError) else None
    return match[1] if match else ""
