"""Measures a host with several GPUs through HTTP, Redis and Celery: images per second by number of GPUs and plan.

    python -m lab.bench.fleet [--gpus 4,2,1] [--plans full,half,4-steps] [--apis N] [--window S] [--engine]
                               [--checker FOLDER]

Starts what `diptych serve --each-gpu --apis N` starts, once for the most GPUs; then ends workers, so that fewer are
left for the next count. Clients in processes of their own keep `--in-flight` requests per GPU in flight. CPU seconds an
image are those of each kind of process within the window. `--engine` runs `lab.bench.engine` beside it, on the last
GPU, once that has no worker. `--checker` is a network that looks at the pictures of plans whose name says `checked`.
Results are written after every window. `--device cpu --tiny` rehearses it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from contract.plan import RESNET
from core.config import Settings
from deployment.address import listen, url
from deployment.children import ChildProcess
from deployment.devices import visible_gpus
from deployment.redis import RedisServer
from deployment.serve import REDIS_OPTIONS, apis_and_workers
from lab.bench.harness import command, record
from lab.bench.harness.record import BenchError
from lab.bench.harness.service import cpu_s, percentile, until
from lab.bench.tables import TABLES
from pipeline.checkpoints import sdxl, tiny

_HALF = {"deepcache": {"interval": 2, "depth": RESNET}}
PLANS: dict[str, dict[str, Any]] = {
    "full": {"deepcache": {"interval": 1}},
    "half": _HALF,
    "4-steps": {"steps": 4, "guidance_scale": 1.0, "scheduler": "lcm", "deepcache": {"interval": 1}},
}
PLANS["4-steps-png"] = {**PLANS["4-steps"], "output_format": "png"}
PLANS["4-steps-checked"] = {**PLANS["4-steps"], "checker": "tag"}
"""Fields of a request by plan: the rungs `int8`, `half` and `4-steps` of `lab.bench.engine`."""
RUNGS = {"full": "int8", "half": "half"}
_CLIENTS = 2  # processes of clients per GPU
_START_S, _SETTLE_S, _STOP_S, _ANSWER_S = 420.0, 240.0, 60.0, 120.0
_LOOK_S, _IDLE = 2.0, 0.15  # of one core, below which a worker records no more graphs
_SINGLES = 5


# -- clients -----------------------------------------------------------------------------------------------------------


def _client(
    address: str, fields: dict[str, Any], number: int, in_flight: int, start: float, stop: float
) -> list[float]:
    """Keep requests in flight until `stop`, on the system's monotonic clock; the latencies of those that ended after
    `start`. Runs in a process of its own.
    """
    import httpx2

    latencies: list[float] = []

    async def ask(client: httpx2.AsyncClient, lane: int) -> None:
        count = 0
        while (sent := time.monotonic()) < stop:
            seed = (number * 1000 + lane) * 100_000 + count
            body = {"prompt": f"{seed}: a small red boat on a lake", "seed": seed, "output_format": "jpeg", **fields}
            response = await client.post("/v1/images/generations", json=body)
            if response.status_code != 200:
                raise BenchError(f"the service answered {response.status_code}: {response.text[:200]}")
            count += 1
            if start <= (ended := time.monotonic()) < stop:
                latencies.append(ended - sent)

    async def run() -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx2.AsyncClient(base_url=address, timeout=_ANSWER_S, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(ask(client, lane) for lane in range(in_flight)))

    asyncio.run(run())
    return latencies


# -- the service -------------------------------------------------------------------------------------------------------


class Host:
    """What `diptych serve --each-gpu` starts, part by part, so that workers can be ended. Call within its context."""

    def __init__(self, options: argparse.Namespace, devices: Sequence[str] | None, folder: Path) -> None:
        self.redis = RedisServer(folder / "redis", REDIS_OPTIONS, tied=True)
        self._listener = listen("127.0.0.1", 0)
        self.url = url(self._listener)
        settings = Settings(
            model=options.model, precision=options.precision, device=options.device, data_dir=folder,
            redis_url=self.redis.url, text_model="off", max_queued=100_000, cache_dir=folder / "cache",
            artifacts_url=f"file://{folder}/artifacts", threads=options.threads, image_jobs=options.image_jobs,
            apis=options.apis, checker=options.checker,
        )  # fmt: skip
        if options.tiny:
            settings = settings.model_copy(update={"kernels": False, "compile": False})
        self.apis, self.workers = apis_and_workers(settings, self._listener, devices, folder)

    def __enter__(self) -> Host:
        self.redis.start()
        for child in (*self.workers, *self.apis):
            child.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end(self.workers)
        self.end(self.apis)
        self.redis.kill()
        self._listener.close()

    def wait_ready(self) -> None:
        """Wait until all workers are ready and record no more graphs. Raises `BenchError`."""
        from core.jobs.registry import Registry

        registry = Registry(self.redis.url)

        def ready() -> bool:
            for child in (*self.workers, *self.apis):
                if child.code is not None:
                    raise BenchError(f"{child.name} ended: " + " | ".join(child.lines()[-3:]))
            return sum(card.state == "ready" for card in registry.workers()) == len(self.workers)

        if not until(ready, _START_S, every_s=0.5):
            raise BenchError(f"the workers were not ready within {_START_S:g} s")
        registry.close()

    def settle(self) -> None:
        """Wait until workers without jobs are idle."""
        stop, quiet = time.monotonic() + _SETTLE_S, 0
        while quiet < 2 and time.monotonic() < stop:
            before, at = self.cpu_s()["workers"], time.monotonic()
            time.sleep(_LOOK_S)
            idle = (self.cpu_s()["workers"] - before) / (time.monotonic() - at) < _IDLE * len(self.workers)
            quiet = quiet + 1 if idle else 0

    def end(self, children: Sequence[ChildProcess]) -> None:
        for child in children:
            child.terminate()
        until(lambda: all(child.code is not None for child in children), _STOP_S)
        for child in children:
            child.kill()

    def keep(self, count: int) -> None:
        """End the workers beyond so many."""
        self.end(self.workers[count:])
        del self.workers[count:]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far by kind of process."""
        redis = self.redis.process.pid if self.redis.process is not None else 0
        kinds = {"workers": [w.pid for w in self.workers], "apis": [a.pid for a in self.apis], "redis": [redis]}
        return {kind: cpu_s(pids) for kind, pids in kinds.items()}


# -- measuring ---------------------------------------------------------------------------------------------------------


def window(host: Host, fields: Mapping[str, Any], gpus: int, options: argparse.Namespace) -> dict[str, Any]:
    """Images per second in one window after a warm-up, latencies, and CPU seconds an image."""
    processes = _CLIENTS * gpus
    each = max(1, options.in_flight * gpus // processes)
    context = multiprocessing.get_context("spawn")
    started = context.Barrier(processes + 1)  # a new process takes seconds, which are none of the window's
    with context.Pool(processes, started.wait) as pool:
        started.wait(_START_S)
        start = time.monotonic() + options.warm
        stop = start + options.window
        jobs = [
            pool.apply_async(_client, (host.url, dict(fields), number, each, start, stop))
            for number in range(processes)
        ]
        time.sleep(max(0.0, start - time.monotonic()))
        before = host.cpu_s()
        time.sleep(max(0.0, stop - time.monotonic()))
        after = host.cpu_s()
        latencies = [latency for job in jobs for latency in job.get(_ANSWER_S)]
    if not latencies:
        raise BenchError("no image ended within the window")
    return {
        "images_s": round(len(latencies) / options.window, 3),
        "pictures": len(latencies),
        "in_flight": each * processes,
        "p50_s": percentile(latencies, 50),
        "p99_s": percentile(latencies, 99),
        "cpu_s_an_image": {kind: round((after[kind] - before[kind]) / len(latencies), 4) for kind in before},
    }


def single(host: Host, fields: Mapping[str, Any]) -> float:
    """Median seconds of single images, one after another, with nothing else in flight."""
    import httpx2

    seconds = []
    with httpx2.Client(base_url=host.url, timeout=_ANSWER_S, trust_env=False) as client:
        for number in range(_SINGLES + 1):
            body = {"prompt": f"{number}: a small red boat", "seed": number, "output_format": "jpeg", **fields}
            started = time.monotonic()
            client.post("/v1/images/generations", json=body).raise_for_status()
            seconds.append(time.monotonic() - started)
    return round(statistics.median(seconds[1:]), 4)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all, and return the results; they are saved after each window."""
    counts, plans = options.counts, options.plans
    devices = visible_gpus(os.environ)[: max(counts)] if options.device == "cuda" else None
    if max(counts) > (there := len(devices) if devices is not None else 1):
        raise BenchError(f"--gpus: {max(counts)}, and there are {there}")
    results: dict[str, Any] = {
        "model": options.model, "precision": options.precision, "apis": options.apis, "window_s": options.window,
        "cores": len(os.sched_getaffinity(0)), "gpus": {},
    }  # fmt: skip
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diptych-fleet-")))
        host = stack.enter_context(Host(options, devices, folder))
        started = time.monotonic()
        try:
            host.wait_ready()
        except BenchError:
            for child in (*host.workers, *host.apis):
                record.progress(f"{child.name}: {child.log.read_text()[-3000:]}")
            raise
        results["ready_s"] = round(time.monotonic() - started, 1)
        engine: subprocess.Popen[bytes] | None = None
        for count in counts:
            host.keep(count)
            if options.engine and engine is None and devices is not None and count < len(devices):
                engine = _engine(devices[-1], plans, options)
                stack.callback(engine.kill)
            figures = results["gpus"][str(count)] = {}
            host.settle()
            record.progress(f"{count} GPUs: settled after {time.monotonic() - started:.0f} s")
            for plan in plans:
                fields = {"steps": 20, **PLANS[plan], **({"steps": 2} if options.tiny else {})}
                figures[plan] = window(host, fields, count, options)
                if count == counts[-1]:
                    figures[plan]["single_s"] = single(host, fields)
                record.progress(f"{count} GPUs, {plan}: {json.dumps(figures[plan])}")
                record.publish(options.name, results, options.results, verbose=False)
        if engine is not None:
            engine.wait()
    return record.publish(options.name, results, options.results, table=TABLES["h200-fleet"])


def _engine(device: str, plans: Sequence[str], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Begin to measure the engine alone on this GPU, which serves nothing."""
    rungs = ",".join(dict.fromkeys(RUNGS.get(plan, "4-steps") for plan in plans))
    words = [sys.executable, "-m", "lab.bench.engine", "--rungs", rungs, "--windows", "1", "--window", "20"]
    words += ["--name", f"{options.name}-engine", "--results", str(options.results)]
    return subprocess.Popen(words, env={**os.environ, "CUDA_VISIBLE_DEVICES": device}, stdin=subprocess.DEVNULL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("fleet", __doc__)
    parser.add_argument("--gpus", default="1", help="numbers of GPUs, the most first; default: %(default)s")
    parser.add_argument("--plans", default="full,half,4-steps", help="default: %(default)s")
    parser.add_argument("--model", default=sdxl.NAME, help="default: %(default)s")
    parser.add_argument("--precision", default="int8", help="default: %(default)s")
    parser.add_argument("--apis", type=int, default=1, help="API processes; default: %(default)s")
    parser.add_argument("--threads", type=int, default=0, help="of a worker; default: the worker's own")
    parser.add_argument("--image-jobs", type=int, default=32, help="DIPTYCH_IMAGE_JOBS; default: %(default)s")
    parser.add_argument("--in-flight", type=int, default=48, help="requests per GPU; default: %(default)s")
    parser.add_argument("--window", type=float, default=60.0, help="seconds; default: %(default)s")
    parser.add_argument("--warm", type=float, default=12.0, help="seconds of load before it; default: %(default)s")
    parser.add_argument("--engine", action="store_true", help="measure the engine alone beside")
    parser.add_argument("--checker", default="", metavar="FOLDER", help="DIPTYCH_CHECKER; default: none")
    parser.add_argument("--name", default="fleet", help="of the file of results; default: %(default)s")
    options = parser.parse_args(arguments)
    options.plans = command.names(options.plans, PLANS, "--plans")
    options.counts = sorted({int(count) for count in options.gpus.split(",")}, reverse=True)
    if options.tiny:
        options.model, options.precision = tiny.TINY, "fp32"
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
