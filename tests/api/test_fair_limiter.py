"""The limiter runs a few at once and one of a tenant, so that who asks once waits for one of another's at most."""

from __future__ import annotations

import asyncio
import threading

from api.fair_limiter import FairLimiter
from tests.api.world import PATIENCE_S


def test_one_of_a_tenant_and_so_many_in_all() -> None:
    go = {name: threading.Event() for name in ("ann", "bob", "cid")}
    running: list[str] = []

    def work(name: str) -> str:
        running.append(name)
        assert go[name].wait(PATIENCE_S)
        return name

    async def play() -> None:
        limiter = FairLimiter(2)
        greedy = [asyncio.create_task(limiter.run("ann", work, "ann")) for _ in range(20)]
        while running != ["ann"]:
            await asyncio.sleep(0.01)
        others = [asyncio.create_task(limiter.run(name, work, name)) for name in ("bob", "cid")]
        while running != ["ann", "bob"]:
            await asyncio.sleep(0.01)
        go["bob"].set()
        assert await others[0] == "bob"
        while running != ["ann", "bob", "cid"]:
            await asyncio.sleep(0.01)
        go["ann"].set()
        go["cid"].set()
        assert await asyncio.gather(*greedy, others[1]) == ["ann"] * 20 + ["cid"]
        assert not limiter._locks, "nothing of who is done is remembered"

    asyncio.run(play())
