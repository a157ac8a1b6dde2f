"""The store on the other servers of this machine: the tests of what servers may do differently, again on each.

All tests of the store run on the first of them, and on each by `make test-stores` (tests/stores.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from deployment.redis import RedisServer
from deployment.redis_programs import Program
from tests.core.jobs.test_connection import (
    test_every_refusal_of_a_real_redis_passes,
    test_full_redis_in_a_script_and_outside,
)
from tests.core.jobs.test_events import (
    test_live_events_without_gaps_or_duplicates,
    test_redis_restarts_under_subscribers,
)
from tests.core.jobs.test_life import test_walks
from tests.core.jobs.test_rights import limited, test_and_they_are_no_more_than_needed, test_it_serves_with_them
from tests.core.jobs.test_scripts import test_a_script_holds_what_it_includes_once_and_compiles
from tests.core.jobs.test_store import test_kill_in_the_middle_of_writing
from tests.stores import stores

__all__ = [
    "limited",
    "test_a_script_holds_what_it_includes_once_and_compiles",
    "test_and_they_are_no_more_than_needed",
    "test_every_refusal_of_a_real_redis_passes",
    "test_full_redis_in_a_script_and_outside",
    "test_it_serves_with_them",
    "test_kill_in_the_middle_of_writing",
    "test_live_events_without_gaps_or_duplicates",
    "test_redis_restarts_under_subscribers",
    "test_walks",
]

if len(stores()) == 1:
    pytest.skip("there is no second server (apt install redis-server)", allow_module_level=True)


@pytest.fixture(scope="module", params=stores()[1:], ids=lambda program: str(program.version))
def redis_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    program: Program = request.param
    server = RedisServer(tmp_path_factory.mktemp("redis"), ("appendfsync no",), program=program)
    server.start()
    yield server
    server.kill()


def test_it_is_the_server_that_is_meant(redis_server: RedisServer, client: redis.Redis) -> None:
    assert redis_server.program is not None and redis_server.program.version is not None
    status = client.info()
    version = status.get("valkey_version", status["redis_version"])
    assert version == ".".join(map(str, redis_server.program.version.numbers))
