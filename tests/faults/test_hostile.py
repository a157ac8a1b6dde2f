"""Tests some hundred hostile requests: none causes a server error, every one gets an answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deployment.redis import RedisServer
from tests.api.world import CARD, TEXT, Api, Worker, eventually, settings_of
from tests.faults.bodies import BODIES, FORM_PATHS, JSON_PATHS, HostileRequest
from tests.faults.hostile import attack, send, summary

_SMALL = 40_000  # bytes; what is larger has the same flaws


def test_hostile_requests_are_refused(tmp_path: Path) -> None:
    found = attack(300, seed=1, folder=tmp_path)
    assert found.faults == [], found.faults
    result = summary(found)
    assert result["requests"] == 300 and len(result["statuses"]) == 16
    refused = sum(n for one in found.statuses.values() for status, n in one.items() if 400 <= status < 500)
    assert refused > 250, found.statuses


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_no_body_is_valid_anywhere(kind: Callable[[random.Random], HostileRequest], served: Api) -> None:
    """Each has a flaw for every path: in a history a valid one would be a job that no client knows."""
    draw = random.Random(5)
    drawn = (request for request in (kind(draw) for _ in range(40)) if len(request.body) <= _SMALL)
    for request in {request.body: request for request in drawn}.values():
        paths = JSON_PATHS if request.path in JSON_PATHS and request.path not in FORM_PATHS else FORM_PATHS
        for path in paths:
            status = send(served.port, replace(request, path=path))
            assert 400 <= status < 500, (status, path, request.body[:200])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API with models for both kinds of jobs, whose workers take none: what it accepts is answered after long."""
    folder = tmp_path_factory.mktemp("served")
    redis = RedisServer(folder / "redis")
    redis.start()
    settings = settings_of(redis.url, folder / "data")
    with Worker(settings) as images, Worker(settings, "worker-2") as texts, Api(settings) as api:
        images.announce(card=CARD)
        texts.announce(card=TEXT)
        eventually(lambda: len(api.client.get("/v1/models").json()["data"]) == 2)
        yield api
    redis.kill()
