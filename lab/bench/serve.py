"""Runs a load test of the whole service through HTTP: `diptych serve` with the embedded model.

A closed loop measures capacity; then Poisson arrivals come at 70% of it, together with health checks and
requests that must be rejected; then flood.py submits far more jobs than the service can run.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.config import Settings
from deployment.children import ChildProcess
from lab.bench import flood
from lab.bench.flood import Probes, get
from lab.bench.harness import provenance, record, service
from lab.bench.harness.service import percentile
from lab.bench.tables import TABLES

if TYPE_CHECKING:
    import httpx2

    from core.jobs.keyring import Keyring
    from core.jobs.store import JobStore

LOAD = 0.7  # of the capacity
_CLIENTS = 32  # in the closed loop: as many as a worker takes jobs at once, so that its batches are full
_SETTLE_S = 900.0  # for compiled code, the longest
_LOOK_S = 2.0
_IDLE = 0.15  # of one core, below which the worker no longer compiles
_HEALTH_EVERY_S, _REFUSED_EVERY_S = 0.2, 1.0


@dataclass
class _Answer:
    """One image from a client's view. Times are in seconds, points in time on this machine's clock."""

    id: str
    sent: float
    answered: float
    latency_s: float  # from when it was due


def run(settings: Settings, *, steps: int, pictures: int, results: Path | None) -> dict[str, Any]:
    """Start the service, measure its capacity, run `pictures` Poisson arrivals, and stop it."""
    if pictures < 1:
        raise record.BenchError("--pictures: must be at least 1")
    try:
        import httpx2  # noqa: F401
    except ImportError:
        raise record.BenchError("httpx2 is not installed; it comes with the dev extra") from None
    from core.jobs.keyring import Keyring
    from core.jobs.store import JobStore

    unlimited = settings.model_copy(update={"max_queued": 1_000_000})
    with (
        record.alone(), tempfile.TemporaryDirectory(prefix="diptych-bench-") as name,
        service.running(unlimited, Path(name)) as (url, redis, serve, ready_s),
    ):  # fmt: skip
        store, keyring = JobStore.of(settings.model_copy(update={"redis_url": redis})), Keyring(redis)
        result = {"ready_s": round(ready_s, 2)} | asyncio.run(_measure(url, store, serve, steps, pictures))
        result |= _drawn_by(url)
        result |= _flooded(url, store, keyring, serve, steps)
        keyring.close()
        store.close()
    result |= {
        "load": LOAD,
        "arrivals": pictures,
        "steps": steps,
        "model": Path(settings.model_name).name,
        "compiled": settings.compile,
    }
    return record.publish(
        "serve", result, results, artifacts=(*provenance.SERVICE, *provenance.EMOJI_XL), table=TABLES["serve"]
    )


def _flooded(url: str, store: JobStore, keyring: Keyring, serve: ChildProcess, steps: int) -> dict[str, Any]:
    from rich.console import Console

    with Console(stderr=True).status(f"{flood.RATE_PER_S:g} submissions a second for {flood.SECONDS:g} s"):
        return asyncio.run(flood.flood(url, store, keyring, _part(serve, "api"), steps=steps))


def _drawn_by(url: str) -> dict[str, Any]:
    """The worker's precision and DeepCache plan, from its model card."""
    import httpx2

    cards = [model["diptych"] for model in httpx2.get(f"{url}/v1/models", trust_env=False).json()["data"]]
    (card,) = (card for card in cards if card["modality"] == "image")
    return {"precision": card["precision"], "deepcache": card["deepcache"]}


def _part(serve: ChildProcess, name: str) -> int:
    """The process id of one of the service's processes."""
    import psutil

    for process in psutil.Process(serve.pid).children(recursive=True):
        if {"cli", "diptych.cli"} & set(words := process.cmdline()) and name in words:
            return int(process.pid)
    raise record.BenchError(f"the service has no process {name}")


# -- as a client -------------------------------------------------------------------------------------------------------


async def _measure(url: str, store: JobStore, serve: ChildProcess, steps: int, pictures: int) -> dict[str, Any]:
    import httpx2
    import numpy as np
    from rich.console import Console

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        with Console(stderr=True).status("") as status:
            status.update("warming up")
            await _closed_loop(client, steps, 2 * _CLIENTS)
            status.update("waiting for compiled code")
            await settled(serve)
            status.update(f"measuring capacity with {_CLIENTS} clients")
            await _closed_loop(client, steps, _CLIENTS)
            capacity = await _closed_loop(client, steps, max(2 * _CLIENTS, min(pictures, 4 * _CLIENTS)))
            rate = LOAD * capacity
            status.update(f"{pictures} arrivals at {rate:.2f}/s")
            trace = np.random.default_rng(0).exponential(1 / rate, pictures).cumsum().tolist()
            probes = Probes()
            probes.start("healthz", _HEALTH_EVERY_S, lambda: get(client, "/healthz"))
            probes.start("rejected", _REFUSED_EVERY_S, lambda: _refused(client, steps))
            started = time.monotonic()
            answers = await _play(client, trace, steps)
            whole_s = time.monotonic() - started
            await probes.stop()
    latencies = [answer.latency_s for answer in answers]
    return {
        "rate_per_s": round(rate, 4),
        "p50_s": percentile(latencies, 50),
        "p99_s": percentile(latencies, 99),
        "images_per_s": round(pictures / whole_s, 4),
        **_overhead(store, answers),
        **{f"{name}_p{q}_s": percentile(probes.seconds[name], q) for name in probes.seconds for q in (50, 99)},
        "mean_s": round(statistics.fmean(latencies), 4),
        "capacity_per_s": round(capacity, 4),
        "clients": _CLIENTS,
    }


async def _closed_loop(client: httpx2.AsyncClient, steps: int, pictures: int) -> float:
    """Images per second with clients that request the next image as soon as they have one.

    Counted from the first answer after all clients have a request in flight to the last before they stop.
    """
    left, moments = pictures + 2 * _CLIENTS, list[float]()

    async def ask(number: int) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await _draw(client, seed=left, steps=steps)
            moments.append(time.monotonic())

    await asyncio.gather(*(ask(number) for number in range(_CLIENTS)))
    full = moments[_CLIENTS : _CLIENTS + pictures]  # before it the batches fill, after it they empty
    return (len(full) - 1) / (full[-1] - full[0])


async def _play(client: httpx2.AsyncClient, trace: Sequence[float], steps: int) -> list[_Answer]:
    """Submit at the trace's times, however the service responds, and measure latencies from the due times."""
    started, wall = time.monotonic(), time.time()

    async def ask(seed: int, due: float) -> _Answer:
        await asyncio.sleep(max(0.0, started + due - time.monotonic()))
        sent = time.monotonic()
        id = await _draw(client, seed, steps)
        answered = time.monotonic()
        return _Answer(id, wall + sent - started, wall + answered - started, answered - started - due)

    return await asyncio.gather(*(ask(seed, due) for seed, due in enumerate(trace)))


async def _draw(client: httpx2.AsyncClient, seed: int, steps: int) -> str:
    """Request one image at the model's native size; returns its job's id."""
    body = {"prompt": f"{seed}: a small red boat on a lake", "seed": seed, "steps": steps}
    response = await client.post("/v1/images/generations", json=body)
    if response.status_code != 200:
        raise record.BenchError(f"the service answered {response.status_code}: {response.text[:200]}")
    return str(response.json()["job_id"])


async def _refused(client: httpx2.AsyncClient, steps: int) -> None:
    body = {"prompt": "a small red boat on a lake", "steps": steps, "size": "7x7"}
    if (status := (await client.post("/v1/images/generations", json=body)).status_code) != 400:
        raise record.BenchError(f"a size that is not offered was answered {status}")


async def settled(serve: ChildProcess) -> None:
    """Wait until the worker, which has no jobs, is idle and has finished compiling."""
    import psutil

    parts = psutil.Process(serve.pid).children()
    workers = [part.pid for part in parts if part.cmdline()[-1:] == ["worker"]]
    until, quiet = time.monotonic() + _SETTLE_S, 0
    while quiet < 3 and time.monotonic() < until:
        before, at = service.cpu_s(workers), time.monotonic()
        await asyncio.sleep(_LOOK_S)
        quiet = quiet + 1 if (service.cpu_s(workers) - before) / (time.monotonic() - at) < _IDLE else 0


# -- figures -----------------------------------------------------------------------------------------------------------


def _overhead(store: JobStore, answers: Sequence[_Answer]) -> dict[str, Any]:
    """Latency outside the engine, and its breakdown."""
    totals, accept, claim, end, answer = (list[float]() for _ in range(5))
    for image in answers:
        job = store.get(image.id)
        if job is None or job.result is None or job.started is None or job.ended is None:
            raise record.BenchError("a job that was answered has no record")
        engine_s = job.result["engine_s"]
        totals.append(image.answered - image.sent - engine_s)
        accept.append(job.created - image.sent)
        claim.append(job.started - job.created)
        end.append(job.ended - job.started - engine_s)
        answer.append(image.answered - job.ended)
    return {
        "overhead_s": percentile(totals, 50),
        "overhead_p99_s": percentile(totals, 99),
        "overhead_parts_s": {
            "to_record": percentile(accept, 50),
            "to_claim": percentile(claim, 50),
            "around_engine": percentile(end, 50),
            "to_client": percentile(answer, 50),
        },
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
