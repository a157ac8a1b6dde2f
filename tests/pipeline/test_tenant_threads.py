"""One call of a tenant runs at a time, in their order, and no other tenant waits for it."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.tenant_threads import TenantThreads

PATIENCE_S = 60.0


def test_a_tenant_whose_calls_hang_delays_no_other() -> None:
    pool, end = TenantThreads("checks", 3), threading.Event()
    hanging = [pool.submit("mallory", partial(end.wait, PATIENCE_S)) for _ in range(50)]
    for tenant in ("alice", "", "bob", "alice"):
        pool.submit(tenant, lambda: None).result(PATIENCE_S)
    assert not any(call.done() for call in hanging)
    end.set()
    for call in hanging:
        call.result(PATIENCE_S)
    pool.close()
    assert not pool._threads and not pool._running and not pool._waiting


@given(st.lists(st.sampled_from(["", "a", "b", "c", "d"]), max_size=60), st.integers(1, 4))
def test_all_run_once_in_the_order_of_their_tenant(tenants: list[str], threads: int) -> None:
    pool, lock = TenantThreads("checks", threads), threading.Lock()
    running: list[str] = []
    done: list[tuple[str, int]] = []

    def call(tenant: str, number: int) -> None:
        with lock:
            assert tenant not in running and len(running) < threads
            running.append(tenant)
        with lock:
            running.remove(tenant)
            done.append((tenant, number))

    for result in [pool.submit(tenant, call, tenant, number) for number, tenant in enumerate(tenants)]:
        result.result(PATIENCE_S)
    assert sorted(number for _, number in done) == [*range(len(tenants))]
    for tenant in set(tenants):
        numbers = [number for name, number in done if name == tenant]
        assert numbers == sorted(numbers)
    pool.close()


def test_an_error_is_its_callers_and_those_that_wait_are_cancelled_at_the_end() -> None:
    pool, begun, end = TenantThreads("checks", 1), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        assert end.wait(PATIENCE_S)

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        pool.submit("a", fail).result(PATIENCE_S)
    running, waiting = pool.submit("a", hang), pool.submit("b", fail)
    assert begun.wait(PATIENCE_S)
    closing = threading.Thread(target=pool.close)
    closing.start()
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE_S)
    end.set()
    closing.join(PATIENCE_S)
    assert running.done() and pool.submit("a", fail).cancelled()
