"""Redis refuses for a while: the API answers 503 with the reason and when to come back, and never 500."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deployment.redis import RedisServer
from tests.api.world import Api, Worker, check_error, eventually, settings_of
from tests.core import refusals
from tests.disks import small_disk


@pytest.mark.parametrize("way", refusals.WAYS)
def test_every_refusal_is_told_and_passes(alone: tuple[Api, Worker], way: str) -> None:
    api, worker = alone
    hinder, reason = refusals.WAYS[way]
    waiting = api.order()
    with hinder(worker.redis):
        for answer in (
            api.draw(),
            api.post("/v1/jobs", type="image", prompt="a cat"),
            api.client.put("/v1/jobs/mine", json={"type": "image", "prompt": "a cat"}),
            api.client.post(f"/v1/jobs/{waiting}/cancel"),
            api.delete(f"/v1/jobs/{waiting}"),
        ):
            error = check_error(answer, 503, code="store_down")
            assert reason in error["message"]
            assert 1 <= int(answer.headers["retry-after"]) <= 120
        assert api.get(f"/v1/jobs/{waiting}").status_code == (503 if way == "busy" else 200)
    assert worker.ids() == {waiting}
    worker.work(waiting)
    worker.work(api.order())


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A data folder on a disk that is full, as `diptych serve` has it."""
    with small_disk(tmp_path / "little", "512k") as folder:
        (folder / "redis").mkdir()
        yield folder


def test_a_redis_that_ended_on_a_full_disk(redis_url: str, redis_server: RedisServer, full: Path) -> None:
    """Its clients see no more than that it is gone; the API beside it says why."""
    settings = settings_of(redis_url, full)
    (full / "redis" / "address").write_text(f"{redis_url}\n")
    with Worker(settings) as worker:
        worker.announce()
        with Api(settings) as api:
            eventually(lambda: api.get("/readyz").status_code == 200)
            redis_server.kill()
            try:
                eventually(lambda: "no space left" in api.get("/readyz").text)
                error = check_error(api.draw(), 503, code="store_down")
                assert "its disk cannot be written: no space left on device" in error["message"]
            finally:
                redis_server.start()
            eventually(lambda: api.get("/readyz").status_code == 200)
            worker.announce()
            api.order()
