"""Provides an API with a worker that is played by hand, as for the tests of `api/`."""

from tests.api.conftest import easel, shared, worker
from tests.servers import redis_server, redis_url

__all__ = ["easel", "redis_server", "redis_url", "shared", "worker"]
