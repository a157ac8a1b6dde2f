"""Waiting Redis out: said once, waited for together, given up when it is no longer worth it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from core.jobs.connection import StoreDown, StoreError, StoreFull
from tests.workers.crew import PATIENCE_S, eventually
from workers.claims.store_retry import RetryAbandoned, StoreRetry


class Store:
    def __init__(self) -> None:
        self.error: StoreError | None = StoreDown("Redis cannot be reached")
        self.calls = 0

    def call(self) -> int:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return 42


def test_many_wait_together_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store, store_retry = Store(), StoreRetry()
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(store_retry.patiently, store.call) for _ in range(8)]
        eventually(lambda: store.calls > 30)
        assert store_retry.lasts and not any(future.done() for future in waiting)
        store.error = None
        assert [future.result(PATIENCE_S) for future in waiting] == [42] * 8
    assert not store_retry.lasts
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "cannot be reached" in caplog.text and "is available again" in caplog.text


def test_what_is_not_worth_waiting_for_is_given_up() -> None:
    store, store_retry = Store(), StoreRetry()
    assert store_retry.once(store.call, 7) == 7
    with pytest.raises(RetryAbandoned):
        store_retry.patiently(store.call, unless=lambda: store.calls > 3)
    assert store.calls == 4
    store.error = None
    assert store_retry.patiently(store.call, unless=lambda: True) == 42
    assert store_retry.once(store.call, 7) == 42


def test_a_full_redis_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    store, store_retry = Store(), StoreRetry()
    store.error = StoreFull("Redis has reached its memory limit")
    for _ in range(5):
        assert store_retry.once(store.call, 7) == 7
    with pytest.raises(RetryAbandoned):
        store_retry.patiently(store.call, unless=lambda: store.calls > 7)
    assert not store_retry.lasts and len(caplog.records) == 1
    store.error = StoreError("Redis refused a command: ResponseError")  # which waiting cannot mend
    for call in (store_retry.patiently, partial(store_retry.once, otherwise=7)):
        with pytest.raises(StoreError, match="refused"):
            call(store.call)
