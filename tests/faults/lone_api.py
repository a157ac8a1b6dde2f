"""Runs an API process with a Redis of its own, for tools that send it hostile requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from contract.card import ImageCard
from core.config import Settings
from core.jobs.keyring import Keyring
from deployment.redis import RedisServer
from tests.api.world import CARD, SERVE, Worker, eventually, process, settings_of
from tests.forks import Fork

_ANSWER_S = 120.0


@dataclass(frozen=True)
class LoneApi:
    """`client` shows a key without a rate limit, where there are keys. Jobs are taken by `worker`, played by hand."""

    url: str
    child: Fork
    client: httpx2.Client
    worker: Worker
    settings: Settings

    @property
    def port(self) -> int:
        return httpx2.URL(self.url).port or 0


@contextmanager
def lone_api(folder: Path, card: ImageCard = CARD, *, keyed: bool = False) -> Iterator[LoneApi]:
    redis = RedisServer(folder / "redis")
    redis.start()
    try:
        settings, headers = settings_of(redis.url, folder / "data", max_queued=1_000_000), {}
        if keyed:
            keyring = Keyring.of(settings)
            token = keyring.add("attacker", ["images", "text", "files"], "1000000/second")[1]
            keyring.close()
            headers = {"Authorization": f"Bearer {token}"}
        with Worker(settings) as worker, process(SERVE, settings, log=folder / "api.log") as (child, client):
            worker.announce(card=card, ttl_s=86_400)
            eventually(lambda: client.get("/readyz").status_code == 200)
            url = str(client.base_url)
            with httpx2.Client(base_url=url, timeout=_ANSWER_S, headers=headers) as attacker:
                yield LoneApi(url, child, attacker, worker, settings)
    finally:
        redis.kill()
