"""Redis's troubles by our three names; no message carries a password or a user's input."""

from __future__ import annotations

import threading

import pytest
import redis

from core.jobs.connection import (
    RedisClient,
    Script,
    StoreDenied,
    StoreDown,
    StoreError,
    StoreFull,
    translate_redis_errors,
)
from core.jobs.store import JobStore
from deployment.redis import RedisServer
from tests.core import refusals
from tests.core.jobs.drafts import draft
from tests.core.present import present


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (redis.ConnectionError("Error 111 connecting to 10.0.0.1:6379"), StoreDown),
        (redis.TimeoutError("Timeout reading from socket"), StoreDown),
        (redis.exceptions.BusyLoadingError("loading"), StoreDown),
        (redis.AuthenticationError("invalid password hunter2"), StoreDown),
        (redis.ReadOnlyError("a replica"), StoreDown),
        (redis.exceptions.OutOfMemoryError("command not allowed"), StoreFull),
        (redis.ResponseError("Error running script: -OOM command not allowed when used memory"), StoreFull),
        (redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"), StoreFull),
        (redis.ResponseError("NOREPLICAS Not enough good replicas to write."), StoreDown),
        (redis.ResponseError("Error running script: @user_script:3: -NOREPLICAS Not enough"), StoreDown),
        (redis.ResponseError("BUSY Redis is busy running a script."), StoreDown),
        (redis.ResponseError("TOMORROW what a later Redis may say"), StoreDown),
        (redis.exceptions.NoPermissionError("this user has no permissions"), StoreDenied),
        (redis.ResponseError("The user executing the script can't run this command or subcommand"), StoreDenied),
        (redis.ResponseError("Error running script: @user_script:1: -NOPERM this user may not"), StoreDenied),
        (redis.ResponseError("ACL failure in script: User few has no permissions to run 'zadd'"), StoreDenied),
        (redis.exceptions.MasterDownError("Link with MASTER is down"), StoreDown),
        (redis.ResponseError("WRONGTYPE hunter2"), StoreError),
        (redis.ResponseError("ERR hunter2"), StoreError),
        (redis.ResponseError("user_script:7: attempt to perform arithmetic on field 'HUNTER2'"), StoreError),
    ],
)
def test_translated(error: redis.RedisError, kind: type[StoreError]) -> None:
    @translate_redis_errors()
    def as_decorator() -> None:
        raise error

    def as_context() -> None:
        with translate_redis_errors():
            raise error

    for way in (as_decorator, as_context):
        for _ in range(2):  # a decorator is used many times
            with pytest.raises(StoreError) as raised:
                way()
            assert type(raised.value) is kind
            assert "hunter2" not in str(raised.value)
            assert "10.0.0.1" not in str(raised.value)


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), translate_redis_errors():
        raise KeyError


def test_real_troubles(redis_url: str, redis_server: RedisServer) -> None:
    wrong = redis_url.replace(redis_server.password, "hunter2")
    with RedisClient(wrong) as client, pytest.raises(StoreDown, match="does not accept the password"):
        client.get("x")
    with RedisClient("redis://127.0.0.1:1/0") as client, pytest.raises(StoreDown, match="cannot be reached"):
        client.get("x")
    with pytest.raises(ValueError):
        RedisClient("")


@pytest.mark.parametrize("way", refusals.WAYS)
def test_every_refusal_of_a_real_redis_passes(client: redis.Redis, store: JobStore, way: str) -> None:
    """It is no result: who tries again later succeeds."""
    hinder, reason = refusals.WAYS[way]
    job = store.create(draft())
    claim = present(store.leases.claim(job.id, "ada"))
    with hinder(client):
        for call in (
            lambda: store.create(draft()),
            lambda: store.leases.succeed(job.id, claim.attempt, {}),
            lambda: store.leases.renew("ada", {job.id: claim.attempt}),
            lambda: store.upkeep.sweep(),
        ):
            with pytest.raises(StoreDown, match=reason):
                call()
    assert store.leases.succeed(job.id, claim.attempt, {})


def test_full_redis_in_a_script_and_outside(redis_url: str) -> None:
    with RedisClient(redis_url) as client:
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreFull):
                client.eval("return redis.call('SET', 'a', 1)", 0)
            with pytest.raises(StoreFull):
                client.set("a", 1)
            with pytest.raises(StoreFull), client.pipeline(transaction=False) as pipe:
                pipe.set("a", 1)
                pipe.execute()
        finally:
            client.config_set("maxmemory", 0)


def test_a_redis_that_forgets_scripts_at_any_moment_runs_them(redis_url: str) -> None:
    """As one that is started again and again: what it was told of a script a moment ago, it may know no longer."""
    over = threading.Event()

    def forget() -> None:
        with redis.Redis.from_url(redis_url) as client:
            while not over.is_set():
                client.script_flush()

    thread = threading.Thread(target=forget)
    thread.start()
    client = RedisClient(redis_url)
    try:
        script = Script(client, "return redis.call('INCR', ARGV[1] .. 'count') + ARGV[2]")
        assert [script(1) for _ in range(2000)] == list(range(2, 2002))
    finally:
        over.set()
        thread.join()
        client.close()
