"""The poller looks again whatever went wrong, says so once while Redis is away, and ends when it is told to."""

from __future__ import annotations

import logging
import socket
import threading

import pytest

from api.concurrency.poller import Poller
from core.jobs.webhooks import WebhookQueue
from tests.api.world import PATIENCE_S, eventually


def test_it_outlives_redis_and_mistakes(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
    away, here = WebhookQueue(gone), WebhookQueue(redis_url)
    looks: list[str] = []

    def look() -> None:
        looks.append("")
        if len(looks) in (1, 2, 5):
            away.due(1.0)
        if len(looks) == 4:
            raise ZeroDivisionError("a mistake")
        here.due(1.0)

    poller = Poller("looks", "webhooks", look)
    with caplog.at_level(logging.WARNING, "api.concurrency.poller"):
        poller.start()
        eventually(lambda: len(looks) >= 6)
        poller.stop()
    for webhooks in (away, here):
        webhooks.close()
    said = [record.message.split(":")[0] for record in caplog.records]
    assert said == ["webhooks are paused", "webhooks cannot be processed", "webhooks are paused"]


def test_stopping_waits_for_the_last_look() -> None:
    looking, go_on = threading.Event(), threading.Event()
    ends: list[bool] = []

    def look() -> None:
        looking.set()
        assert go_on.wait(PATIENCE_S)
        ends.append(poller.stopping)

    poller = Poller("looks", "it", look)
    poller.start()
    assert looking.wait(PATIENCE_S) and not poller.stopping
    stop = threading.Thread(target=poller.stop)
    stop.start()
    eventually(lambda: poller.stopping)
    assert stop.is_alive()
    go_on.set()
    stop.join(PATIENCE_S)
    assert ends == [True] and not stop.is_alive()


def test_one_that_never_began_stops_and_never_looks() -> None:
    looks: list[None] = []
    poller = Poller("never begun", "it", lambda: looks.append(None))
    poller.stop()
    poller.wake()
    assert poller.stopping and looks == []
    assert "never begun" not in {thread.name for thread in threading.enumerate()}
