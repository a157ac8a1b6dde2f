"""Overload test: submits more jobs than any worker can run, at a fixed rate with a key and under limits, and cancels
them in one call.

Arrivals are open: each is sent when it is due, and its latency counts from then. Meanwhile health and metrics endpoints
are queried, and the API's memory is measured.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lab.bench.harness.record import BenchError
from lab.bench.harness.service import percentile

if TYPE_CHECKING:
    import httpx2
    import psutil

    from core.jobs.keyring import Keyring
    from core.jobs.store import JobStore

RATE_PER_S, SECONDS = 200.0, 20.0
LIMITS: dict[str, Any] = {
    "rate": "1000/second",
    "quota": "1000000/day",
    "queued": "100%",
}  # counted for every request, and never reached
_PROBE_EVERY_S = 0.1
_CONNECTIONS = 64
_PROMPT = "a small red boat on a lake"


async def flood(url: str, store: JobStore, keyring: Keyring, api_pid: int, *, steps: int) -> dict[str, Any]:
    """Submit `RATE_PER_S` for `SECONDS`, then cancel all that waits.

    The API's memory is in MiB, of its process alone: before, and as the submissions go. Raises `BenchError` where a
    submission is refused, or an accepted job is missing.
    """
    import httpx2
    import psutil

    key, token = keyring.add("flood", ("images", "admin"), **LIMITS)
    headers = {"Authorization": f"Bearer {token}"}
    arrivals = _Arrivals(url, token, psutil.Process(api_pid), steps)
    probes = Probes()
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=60.0, trust_env=False, headers=headers) as client:
            await key_known(client)
            await arrivals.connect()
            for name in ("healthz", "metrics"):
                probes.start(name, _PROBE_EVERY_S, partial(get, client, f"/{name}"))
            gc.collect()
            gc.freeze()  # else a look through all that this process holds, 0.1 s, would count as the service's
            await arrivals.submit_all()
            await probes.stop()
            queued, before = store.backlog("image").queued, time.monotonic()
            emptied = (await client.post("/v1/queues/image/cancel")).json()
            cancel_s = time.monotonic() - before
        missing = sum(store.get(id) is None for id in arrivals.ids)
        if missing:
            raise BenchError(f"{missing} of {len(arrivals.ids)} jobs that were accepted have no record")
    finally:
        gc.unfreeze()
        arrivals.close()
        keyring.revoke(key.id)
        keyring.unlock()  # as it was found
    return {
        **arrivals.figures(),
        **{f"flood_{name}_p99_s": percentile(seconds, 99) for name, seconds in probes.seconds.items()},
        "queued": queued,
        "cancelled": int(emptied["cancelled"]),
        "cancel_s": round(cancel_s, 4),
        "left": store.backlog("image").queued,
    }


class _Arrivals:
    """Submits jobs at a fixed rate over kept connections; measures each answer, and the API's process meanwhile."""

    def __init__(self, url: str, token: str, api: psutil.Process, steps: int) -> None:
        self.ids: list[str] = []
        self._api = api
        self._steps = steps
        self._connections = [Connection(url, token) for _ in range(_CONNECTIONS)]
        self._idle: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()
        self._latencies: list[float] = []
        self._memory: list[float] = []  # of the API, in MiB
        self._seconds = self._cpu_s = 0.0

    async def connect(self) -> None:
        for connection in self._connections:
            await connection.open()
            self._idle.put_nowait(connection)

    async def submit_all(self) -> None:
        """Raises `BenchError` where a submission is refused."""
        self._memory.append(_mib(self._api))
        before, started = _cpu_s(self._api), time.monotonic()
        tasks = []
        for k in range(round(RATE_PER_S * SECONDS)):  # each when it is due: all at once would hold up the first
            due = started + k / RATE_PER_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self._submit(k, due)))
        await asyncio.gather(*tasks)
        self._seconds, self._cpu_s = time.monotonic() - started, _cpu_s(self._api) - before
        self._memory.append(_mib(self._api))

    async def _submit(self, k: int, due: float) -> None:
        connection = await self._idle.get()
        body = {"type": "image", "prompt": f"{k}: {_PROMPT}", "seed": k, "steps": self._steps}
        status, answer = await connection.post("/v1/jobs", body)
        self._idle.put_nowait(connection)
        self._latencies.append(time.monotonic() - due)
        if status != 202:
            raise BenchError(f"a submission was answered {status}: {answer}")
        self.ids.append(str(answer["id"]))
        if k % max(1, round(RATE_PER_S)) == 0:
            self._memory.append(_mib(self._api))

    def figures(self) -> dict[str, Any]:
        count, memory = len(self.ids), self._memory
        return {
            "submitted": count,
            "submitted_per_s": round(count / self._seconds, 1),
            "submit_p50_s": percentile(self._latencies, 50),
            "submit_p99_s": percentile(self._latencies, 99),
            "submit_cpu_s": round(self._cpu_s / count, 5),
            "api_mib": {
                "before": memory[0], "half": memory[len(memory) // 2], "after": memory[-1], "most": max(memory),
            },
        }  # fmt: skip

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class Connection:
    """A kept connection that posts JSON: HTTP/1.1 as far as our own server speaks it.

    A full client costs as much processor time as the service itself, which would be measured with it.
    """

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._token = parts.hostname or "", parts.port or 80, token
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    async def post(self, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and content. Raises `BenchError` where the server hangs up."""
        assert self._writer is not None
        body = json.dumps(fields).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        try:
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
            length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
            return int(lines[0].split()[1]), json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise BenchError("the service hung up on a submission") from error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def key_known(client: httpx2.AsyncClient) -> None:
    """Wait until the API has heard of the key."""
    until = time.monotonic() + 10.0
    while (await client.get("/v1/models")).status_code != 200:
        if time.monotonic() > until:
            raise BenchError("the service does not take a key that was just made")
        await asyncio.sleep(0.1)


async def get(client: httpx2.AsyncClient, path: str) -> None:
    """Raises `BenchError` for any other answer than 200."""
    if (status := (await client.get(path)).status_code) != 200:
        raise BenchError(f"{path} answered {status}")


class Probes:
    """Cheap requests at fixed times beside a load, and their latencies by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, every_s: float, send: Callable[[], Awaitable[None]]) -> None:
        self.seconds[name] = []
        self._tasks.append(asyncio.create_task(self._run(self.seconds[name], every_s, send)))

    async def stop(self) -> None:
        """End all. Raises the `BenchError` that one of them raised."""
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, BenchError):
                raise ended

    @staticmethod
    async def _run(seconds: list[float], every_s: float, send: Callable[[], Awaitable[None]]) -> None:
        """Ask until cancelled. One that is late counts from when it was due."""
        due = time.monotonic()
        while True:
            due += every_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await send()
            seconds.append(time.monotonic() - due)
            due = max(due, time.monotonic() - every_s)


def _cpu_s(process: Any) -> float:
    """Processor time of all its threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _mib(process: Any) -> float:
    return round(float(process.memory_info().rss) / 2**20, 1)
