"""Tests that whoever waits for a refresh gets what Redis holds then, also where one is under way."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from api.cards import CardCache, RegistrySnapshot


def test_a_look_that_began_before_the_call_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that was made meanwhile would be unknown to its first request."""
    unused: Any = None
    cache, began, go_on, secret = (
        CardCache(unused, unused, unused, unused),
        threading.Event(),
        threading.Event(),
        [b"a"],
    )

    def snapshot() -> RegistrySnapshot:
        found = replace(cache.now, secret=secret[0])
        began.set()
        assert go_on.wait(60)
        return found

    async def run() -> None:
        first = asyncio.create_task(cache.renew())
        await asyncio.to_thread(began.wait, 60)
        secret[0] = b"b"
        waiting = asyncio.create_task(cache.renew_soon())
        await asyncio.sleep(0.01)  # it waits for the first
        go_on.set()
        await asyncio.gather(first, waiting)

    monkeypatch.setattr(cache, "_snapshot", snapshot)
    asyncio.run(run())
    assert cache.now.secret == b"b"
