"""Runs `diptych serve` for a benchmark, with a Redis and a data folder of its own, until the context ends."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from core.config import Settings
from deployment.children import ChildProcess, child_environment
from deployment.redis import RedisServer, free_port
from lab.bench.harness.record import BenchError

_START_S, _STOP_S = 600.0, 60.0


@contextlib.contextmanager
def running(settings: Settings, folder: Path) -> Iterator[tuple[str, str, ChildProcess, float]]:
    """Context: the service with these settings, ready; its URL, its Redis's, its process, and the seconds
    until it was ready. Raises `BenchError`.
    """
    redis, url = RedisServer(folder / "redis", tied=True), f"http://127.0.0.1:{(port := free_port())}"
    overrides = {"redis_url": redis.url, "data_dir": folder, "host": "127.0.0.1", "port": port}
    environment = child_environment(settings.model_copy(update=overrides))
    serve = ChildProcess("serve", [sys.executable, "-P", "-m", "cli", "serve"], environment, folder / "serve.log")
    redis.start()
    try:
        started = time.monotonic()
        serve.start()
        try:
            _wait_ready(serve, f"{url}/readyz")
            yield url, redis.url, serve, time.monotonic() - started
        finally:
            serve.terminate()
            until(lambda: serve.code is not None, _STOP_S)
            serve.kill()
    finally:
        redis.kill()


def _wait_ready(serve: ChildProcess, url: str) -> None:
    import httpx2

    def ready() -> bool:
        if serve.code is not None:
            raise BenchError("the service ended: " + " | ".join(serve.lines()[-3:]))
        try:
            return httpx2.get(url, trust_env=False).status_code == 200
        except httpx2.TransportError:
            return False

    if not until(ready, _START_S, every_s=0.2):
        raise BenchError(f"the service was not ready within {_START_S:g} s")


def until(condition: Callable[[], bool], limit_s: float, every_s: float = 0.05) -> bool:
    """Wait until the condition holds; returns whether it does."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(every_s)
    return True


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds so far of these processes and of those that they started."""
    import psutil

    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # one that has just ended
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = each.cpu_times()
                    total += times.user + times.system
    return total


def percentile(values: Sequence[float], q: float) -> float:
    """Seconds to four digits; NaN of nothing."""
    import numpy as np

    return round(float(np.percentile(values, q)), 4) if values else float("nan")
