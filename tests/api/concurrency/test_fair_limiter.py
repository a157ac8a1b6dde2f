"""The limiter runs a few at once and one of a tenant, so that who asks once waits for one of another's at most."""

from __future__ import annotations

import asyncio
import threading

import pytest

from api.concurrency.fair_limiter import FairLimiter
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
        assert not limiter._of_tenant, "nothing of who is done is remembered"

    asyncio.run(play())


def test_turns_stay_within_the_budget_and_none_is_overtaken() -> None:
    """A large one waits for room, and small ones behind it wait with it; one above the whole budget runs alone."""

    async def play() -> None:
        limiter = FairLimiter(3, budget=10)
        running: list[str] = []
        ends = {name: asyncio.Event() for name in ("a", "b", "c", "d", "e")}

        async def turn(name: str, cost: int) -> None:
            async with limiter.turn(name, cost):
                running.append(name)
                await ends[name].wait()
                running.remove(name)

        async def settled() -> list[str]:
            for _ in range(10):
                await asyncio.sleep(0)
            return sorted(running)

        tasks = {
            name: asyncio.create_task(turn(name, cost)) for name, cost in (("a", 6), ("b", 8), ("c", 1), ("d", 99))
        }
        assert await settled() == ["a"]
        tasks["b"].cancel()
        assert await settled() == ["a", "c"]
        ends["a"].set()
        assert await settled() == ["c"], "the one above the budget waits until it is alone"
        tasks["e"] = asyncio.create_task(turn("e", 1))
        ends["c"].set()
        assert await settled() == ["d"]
        ends["d"].set()
        assert await settled() == ["e"]
        ends["e"].set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert not limiter._of_tenant and not limiter._queue and (limiter._running, limiter._used) == (0, 0)

    asyncio.run(play())


@pytest.mark.parametrize("behind", ["ann", "bob"])
def test_a_turn_that_does_not_come_in_time_is_given_up(behind: str) -> None:
    """Behind one of the tenant's own, or all places; those after it get theirs."""

    async def play() -> None:
        limiter = FairLimiter(1)
        async with limiter.turn("ann"):
            with pytest.raises(TimeoutError):
                async with limiter.turn(behind, within_s=0.05):
                    raise AssertionError("two at once")
        for tenant in ("ann", "bob"):
            async with limiter.turn(tenant, within_s=PATIENCE_S):
                pass
        assert not limiter._of_tenant

    asyncio.run(play())
