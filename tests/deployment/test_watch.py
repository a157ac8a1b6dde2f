"""Readiness is that of the processes that were started now, whatever others have left in Redis."""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing
from pathlib import Path

from contract.card import ModelCard
from core.config import Settings
from core.jobs.cards import WorkerCard
from core.jobs.registry import Registry
from deployment.watch import Readiness, ReadinessWatcher
from tests.contract.test_card import IMAGE


def test_a_card_of_an_earlier_process_of_the_same_number_says_nothing(redis_url: str, tmp_path: Path) -> None:
    """As in a container, where each worker may be process 7; nor does one of another host or another process."""
    settings = Settings(redis_url=redis_url, data_dir=tmp_path)
    own, now = (socket.gethostname(), os.getpid()), time.time()
    models: list[ModelCard] = [IMAGE]
    with closing(Registry(redis_url)) as registry:
        watcher = ReadinessWatcher(settings, "http://127.0.0.1:9")
        watcher.expect("worker", os.getpid())
        seen = Readiness()
        expected = {("worker", os.getpid()): (os.getpid(), now - 1)}.values()
        for (host, pid), started, ready in (
            (own, now - 100, False), (("elsewhere", own[1]), now, False), ((own[0], own[1] + 1), now, False),
            (own, now, True),
        ):  # fmt: skip
            registry.announce(WorkerCard("worker", host, pid, "ready", "", started, models), 600)
            assert watcher._look_for_workers(seen, expected).worker == ready
        watcher.close()
