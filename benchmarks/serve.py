"""Runs a load test of the whole service through HTTP: `diptych serve` with the embedded model.

A closed loop measures capacity; then Poisson arrivals come at 70% of it, together with health checks and
requests that must be rejected; then flood.py submits far more jobs than the service can run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import flood, provenance, record
from benchmarks.flood import percentile, probe
from core.config import Settings
from deployment.children import ChildProcess
from deployment.redis import RedisServer, free_port

if TYPE_CHECKING:
    import httpx2

    from core.jobs.keyring import Keyring
    from core.jobs.store import JobStore

LOAD = 0.7  # of the capacity
_ROOT = Path(__file__).resolve().parents[__name__.count(".")]  # that imports of our modules begin at
_CLIENTS = 32  # in the closed loop: as many as a worker takes jobs at once, so that its batches are full
_START_S = 600.0
_STOP_S = 60.0
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


@dataclass
class _Probes:
    """Latencies of cheap requests while the service generates images."""

    healthz_s: list[float] = field(default_factory=list)
    rejected_s: list[float] = field(default_factory=list)


def run(settings: Settings, *, steps: int, pictures: int, results: Path | None) -> dict[str, Any]:
    """Start the service, measure its capacity, run `pictures` Poisson arrivals, and stop it."""
    if pictures < 1:
        raise record.BenchError("--pictures: must be at least 1")
    try:
        import httpx2  # noqa: F401
    except ImportError:
        raise record.BenchError("httpx2 is not installed; it comes with the dev extra") from None
    with record.alone(), _service(settings) as (url, store, keyring, serve):
        result = asyncio.run(_measure(url, store, serve, steps, pictures))
        result |= _drawn_by(url)
        result |= _flooded(url, store, keyring, serve, steps)
    result |= {
        "load": LOAD,
        "arrivals": pictures,
        "steps": steps,
        "model": Path(settings.model_name).name,
        "compiled": settings.compile,
    }
    record.table(
        f"{pictures} Poisson arrivals at {result['rate_per_s']:.2f}/s through HTTP, "
        f"{LOAD:.0%} of {result['capacity_per_s']:.2f}/s",
        ("", "median", "p99"),
        [
            ("picture", f"{result['p50_s']:.2f} s", f"{result['p99_s']:.2f} s"),
            ("of it outside the engine", _ms(result["overhead_s"]), _ms(result["overhead_p99_s"])),
            ("/healthz", _ms(result["healthz_p50_s"]), _ms(result["healthz_p99_s"])),
            ("a refused request", _ms(result["rejected_p50_s"]), _ms(result["rejected_p99_s"])),
            (
                f"a submission, {result['submitted_per_s']:.0f}/s",
                _ms(result["submit_p50_s"]),
                _ms(result["submit_p99_s"]),
            ),
            ("/healthz meanwhile", "", _ms(result["flood_healthz_p99_s"])),
            ("/metrics meanwhile", "", _ms(result["flood_metrics_p99_s"])),
        ],
    )
    rooms = (*provenance.SERVICE, "models/emoji-xl")
    return record.publish("serve", result, results, rooms=rooms, children=True)


@contextlib.contextmanager
def _service(settings: Settings) -> Iterator[tuple[str, JobStore, Keyring, ChildProcess]]:
    """Context: `diptych serve` with its own Redis and data folder; its URL, job store, keys and process."""
    from core.jobs.keyring import Keyring
    from core.jobs.store import JobStore

    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as name:
        folder, port = Path(name), free_port()
        redis = RedisServer(folder / "redis", tied=True)
        own = {"redis_url": redis.url, "data_dir": str(folder), "host": "127.0.0.1", "port": str(port)}
        own["max_queued"] = "1000000"
        given = {field: getattr(settings, field) for field in settings.model_fields_set} | own
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
        environment |= {f"DIPTYCH_{field.upper()}": str(v) for field, v in given.items() if v is not None}
        log = folder / "serve.log"
        serve = ChildProcess(
            "serve", [sys.executable, "-P", "-m", "cli", "serve"], environment | {"PYTHONPATH": str(_ROOT)}, log
        )
        redis.start()
        try:
            serve.start()
            try:
                store = JobStore.of(settings.model_copy(update={"redis_url": redis.url}))
                _wait_ready(serve, f"http://127.0.0.1:{port}/readyz")
                keyring = Keyring(redis.url)
                yield f"http://127.0.0.1:{port}", store, keyring, serve
                keyring.close()
                store.close()
            finally:
                serve.terminate()
                _until(lambda: serve.code is not None, _STOP_S)
                serve.kill()
        finally:
            redis.kill()


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


def _wait_ready(serve: ChildProcess, url: str) -> None:
    import httpx2
    from rich.console import Console

    def ready() -> bool:
        if serve.code is not None:
            raise record.BenchError("the service ended: " + " | ".join(serve.lines()[-3:]))
        try:
            return httpx2.get(url, trust_env=False).status_code == 200
        except httpx2.TransportError:
            return False

    with Console(stderr=True).status("starting the service"):
        if not _until(ready, _START_S, every_s=0.2):
            raise record.BenchError(f"the service was not ready within {_START_S:g} s")


def _until(condition: Callable[[], bool], limit_s: float, every_s: float = 0.05) -> bool:
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(every_s)
    return True


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
            await _settled(serve)
            status.update(f"measuring capacity with {_CLIENTS} clients")
            await _closed_loop(client, steps, _CLIENTS)
            capacity = await _closed_loop(client, steps, max(2 * _CLIENTS, min(pictures, 4 * _CLIENTS)))
            rate = LOAD * capacity
            status.update(f"{pictures} arrivals at {rate:.2f}/s")
            trace = np.random.default_rng(0).exponential(1 / rate, pictures).cumsum().tolist()
            probes = _Probes()
            probing = [
                asyncio.create_task(probe(probes.healthz_s, _HEALTH_EVERY_S, lambda: _healthz(client))),
                asyncio.create_task(probe(probes.rejected_s, _REFUSED_EVERY_S, lambda: _refused(client, steps))),
            ]
            started = time.monotonic()
            answers = await _play(client, trace, steps)
            whole_s = time.monotonic() - started
            for task in probing:
                task.cancel()
            for ended in await asyncio.gather(*probing, return_exceptions=True):
                if isinstance(ended, record.BenchError):
                    raise ended
    latencies = [answer.latency_s for answer in answers]
    return {
        "rate_per_s": round(rate, 4),
        "p50_s": percentile(latencies, 50),
        "p99_s": percentile(latencies, 99),
        "images_per_s": round(pictures / whole_s, 4),
        **_overhead(store, answers),
        "healthz_p50_s": percentile(probes.healthz_s, 50),
        "healthz_p99_s": percentile(probes.healthz_s, 99),
        "rejected_p50_s": percentile(probes.rejected_s, 50),
        "rejected_p99_s": percentile(probes.rejected_s, 99),
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


async def _healthz(client: httpx2.AsyncClient) -> None:
    if (status := (await client.get("/healthz")).status_code) != 200:
        raise record.BenchError(f"/healthz answered {status}")


async def _refused(client: httpx2.AsyncClient, steps: int) -> None:
    body = {"prompt": "a small red boat on a lake", "steps": steps, "size": "7x7"}
    if (status := (await client.post("/v1/images/generations", json=body)).status_code) != 400:
        raise record.BenchError(f"a size that is not offered was answered {status}")


async def _settled(serve: ChildProcess) -> None:
    """Wait until the worker, which has no jobs, is idle and has finished compiling."""
    import psutil

    workers = [part for part in psutil.Process(serve.pid).children() if part.cmdline()[-1:] == ["worker"]]
    until, quiet = time.monotonic() + _SETTLE_S, 0
    while quiet < 3 and time.monotonic() < until:
        before, at = _busy_s(workers), time.monotonic()
        await asyncio.sleep(_LOOK_S)
        quiet = quiet + 1 if (_busy_s(workers) - before) / (time.monotonic() - at) < _IDLE else 0


def _busy_s(processes: Sequence[Any]) -> float:
    import psutil

    total = 0.0
    for process in processes:
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                times = one.cpu_times()
                total += times.user + times.system
    return total


# -- figures -----------------------------------------------------------------------------------------------------------


def _overhead(store: JobStore, answers: Sequence[_Answer]) -> dict[str, Any]:
    """Latency outside the engine, and its breakdown."""
    whole, accept, claim, end, answer = (list[float]() for _ in range(5))
    for one in answers:
        job = store.get(one.id)
        if job is None or job.result is None or job.started is None or job.ended is None:
            raise record.BenchError("a job that was answered has no record")
        engine_s = job.result["engine_s"]
        whole.append(one.answered - one.sent - engine_s)
        accept.append(job.created - one.sent)
        claim.append(job.started - job.created)
        end.append(job.ended - job.started - engine_s)
        answer.append(one.answered - job.ended)
    return {
        "overhead_s": percentile(whole, 50),
        "overhead_p99_s": percentile(whole, 99),
        "overhead_parts_s": {
            "to_record": percentile(accept, 50),
            "to_claim": percentile(claim, 50),
            "around_engine": percentile(end, 50),
            "to_client": percentile(answer, 50),
        },
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
