"""The pool runs items in turn, a few of each tenant, ends those that fail or take too long, and stops at once."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from api.concurrency.tenant_pool import Deadline, DeadlineExceeded, TenantPool
from tests.api.world import PATIENCE_S, eventually
from tests.starved import no_threads

Work = Callable[[Deadline], None]


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Set in the end, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


class Held:
    """Work that runs until it may end."""

    def __init__(self, go: threading.Event) -> None:
        self.go = go
        self.running: list[str] = []

    def named(self, name: str) -> Work:
        def run(bound: Deadline) -> None:
            self.running.append(name)
            self.go.wait(PATIENCE_S)

        return run


def pool(threads: int = 2, *, of_tenant: int = 1, of_lane: int = 1, item_s: float = PATIENCE_S) -> TenantPool:
    return TenantPool("pool", threads, of_tenant=of_tenant, of_lane=of_lane, item_s=item_s)


def test_tenants_and_their_lanes_take_turns(go: threading.Event) -> None:
    """One that came first with very much keeps nobody waiting for more than one of its items."""
    items, ran, held = pool(1), list[str](), Held(go)
    items.submit("ann", "a", "first", held.named("first"))
    eventually(lambda: held.running)
    for k in range(4):
        items.submit("ann", "a", f"a{k}", lambda _, k=k: ran.append(f"a{k}"))  # type: ignore[misc]
    items.submit("ann", "b", "b", lambda _: ran.append("b"))
    items.submit("bob", "c", "c", lambda _: ran.append("c"))
    go.set()
    eventually(lambda: len(ran) == 6)
    assert ran == ["a0", "c", "b", "a1", "a2", "a3"]
    items.stop()


def test_so_many_at_once_of_a_tenant_and_of_a_lane(go: threading.Event) -> None:
    items, held = pool(8, of_tenant=3, of_lane=2), Held(go)
    running, work = held.running, held.named
    for lane in "abc":
        for k in range(3):
            items.submit("ann", lane, f"{lane}{k}", work(lane))
    eventually(lambda: len(running) == 3)
    items.submit("bob", "a", "bob", work("bob"))
    eventually(lambda: "bob" in running)
    assert len(running) == 4 and max(Counter(name[0] for name in running if name != "bob").values()) <= 2
    tenants, lanes = items.full()
    assert tenants == {"ann"} and lanes == {("ann", lane) for lane in "abc"}
    assert not items.submit("ann", "a", "a0", work("again")), "it waits, or runs"
    go.set()
    eventually(lambda: len(running) == 10 and items.room == 8)
    items.stop()


def test_a_lane_leaves_room_for_the_tenants_other_lanes(go: threading.Event) -> None:
    """Whatever waits in it, and however many threads and places of the tenant are free."""
    items, held = pool(8, of_tenant=3, of_lane=2), Held(go)
    running, work = held.running, held.named
    for k in range(5):
        items.submit("ann", "a", f"a{k}", work("a"))
    eventually(lambda: len(running) >= 2)
    items.submit("bob", "a", "bob", work("bob"))  # by when it runs, a third of ann's could have begun
    eventually(lambda: "bob" in running)
    items.submit("ann", "b", "b", work("b"))
    eventually(lambda: len([name for name in running if name != "bob"]) >= 3)
    assert sorted(running) == ["a", "a", "b", "bob"]
    go.set()
    eventually(lambda: len(running) == 7)
    items.stop()


def test_an_exception_ends_its_item(caplog: pytest.LogCaptureFixture) -> None:
    items, ran = pool(), list[int]()

    def wrong(bound: Deadline) -> None:
        raise KeyError("choices")

    with caplog.at_level(logging.ERROR, "api.concurrency.tenant_pool"):
        for k in range(5):
            items.submit("ann", "a", f"wrong {k}", wrong)
        items.submit("ann", "a", "right", lambda _: ran.append(1))
        eventually(lambda: ran)
    assert len(caplog.records) == 5 and items.submit("ann", "a", "wrong 0", lambda _: None)
    items.stop()


def test_what_hangs_is_cut_and_others_go_on() -> None:
    """One waits for a socket, which is closed; one cannot be reached at all, and another thread stands in for it."""
    here, there = socket.socketpair()
    never, ran = threading.Event(), list[str]()

    def waits(bound: Deadline) -> None:
        with bound.closing(lambda: here.shutdown(socket.SHUT_RDWR)):
            here.recv(1)
        with pytest.raises(DeadlineExceeded):
            bound.left_s()
        ran.append("cut")

    items = pool(2, of_tenant=2, of_lane=2, item_s=0.2)
    items.submit("ann", "a", "waits", waits)
    items.submit("ann", "a", "hangs", lambda _: never.wait(PATIENCE_S) and None)
    items.submit("bob", "b", "b", lambda _: ran.append("b"))
    eventually(lambda: sorted(ran) == ["b", "cut"])
    for k in range(3):
        items.submit("bob", "b", f"b{k}", lambda _: ran.append("more"))
    eventually(lambda: ran.count("more") == 3)
    items.stop(within_s=0.1)
    never.set()
    here.close()
    there.close()


def test_stopping_drops_what_waits_and_cuts_what_runs() -> None:
    here, there = socket.socketpair()
    begun, ended, ran = threading.Event(), threading.Event(), list[int]()

    def waits(bound: Deadline) -> None:
        with bound.closing(lambda: here.shutdown(socket.SHUT_RDWR)):
            begun.set()
            here.recv(1)
        ended.set()

    items = pool(1)
    items.submit("ann", "a", "waits", waits)
    assert begun.wait(PATIENCE_S)
    items.submit("ann", "a", "next", lambda _: ran.append(1))
    items.stop(PATIENCE_S)
    assert ended.is_set() and not ran and items.stopping
    assert not items.submit("ann", "a", "later", lambda _: None)
    here.close()
    there.close()


def test_threads_that_cannot_start_are_started_by_the_next_item() -> None:
    items, ran = pool(1), list[str]()
    with no_threads():
        items.submit("ann", "a", "first", lambda _: ran.append("first"))
    items.submit("ann", "a", "second", lambda _: ran.append("second"))
    eventually(lambda: ran == ["first", "second"])
    items.stop()
