"""Measures what a tenant's flood of jobs costs another tenant: `python -m benchmarks.tenants [--jobs 10000]`.

Runs `diptych serve` with two keys. The measured tenant keeps `--clients` requests in flight and draws `--pictures` in
each phase: alone; beside a peer, a second tenant that does the same; beside that tenant's flood, while `--jobs` of its
jobs wait in the queue; and alone again. Two tenants have half of the device each, so the peer is what sharing costs
whom one half does not suffice. With `--load` the measured tenant pauses after each picture, so that alone it keeps the
device busy for that share of the time. Each phase also has what a picture waited for: until its job was claimed, from
then to its end, and the mean rows of the forwards of that time.
`--device cpu --tiny` rehearses it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.fleet import PLANS
from benchmarks.flood import Connection, key_known
from benchmarks.harness import command, provenance, record, service
from benchmarks.harness.record import BenchError
from benchmarks.harness.service import percentile
from benchmarks.serve import settled
from core.config import EMBEDDED_MODEL, Settings
from deployment.redis import free_port
from pipeline.checkpoints import tiny

if TYPE_CHECKING:
    import httpx2

    from core.jobs.store import JobStore
    from deployment.children import ChildProcess

PHASES = ("alone", "peer", "flood", "alone")
_LIMITS: dict[str, Any] = {"rate": "1000000/minute", "queued": "100%"}  # never reached
_CONNECTIONS = 16
_PROMPT = "a small red boat on a lake"
_WARM = 64  # of the second tenant's jobs, so that wide batches are compiled or recorded
_WARM_PICTURES = 4  # of each client of the measured tenant
_DRAIN_S = 600.0
_LOOK_S = 0.2


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the service, measure all phases, and stop it. Raises `BenchError`."""
    from core.jobs.keyring import Keyring
    from core.jobs.store import JobStore

    metrics = f"127.0.0.1:{free_port()}"
    settings = Settings(
        model=options.model, precision=options.precision, device=options.device, text_model="off", max_queued=1_000_000,
        metrics=metrics,
    )  # fmt: skip
    if options.tiny:
        settings = Settings(**settings.model_dump(exclude_unset=True), kernels=False, compile=False, threads=1)
    with (
        record.alone(), tempfile.TemporaryDirectory(prefix="diptych-tenants-") as name,
        service.running(settings, Path(name)) as (url, redis, serve, _),
    ):  # fmt: skip
        store, keyring = JobStore.of(settings.model_copy(update={"redis_url": redis})), Keyring(redis)
        tokens = {tenant: keyring.add(tenant, ("images",), **_LIMITS)[1] for tenant in ("measured", "other")}
        phases = asyncio.run(_Tenants(url, metrics, store, tokens, options).measure(serve))
        keyring.close()
        store.close()
    figures: dict[str, dict[str, Any]] = {
        phase: {
            **{
                f"{name}p{q}_s": percentile(seconds, q)
                for name, seconds in (
                    ("", measured.seconds), ("to_claim_", measured.to_claim), ("in_engine_", measured.in_engine),
                ) for q in (50, 99)
            },
            "pictures": len(measured.seconds), "rows": measured.mean_rows,
        }
        for phase, measured in phases.items()
    }  # fmt: skip
    result: dict[str, Any] = {
        "model": Path(options.model).name, "precision": options.precision, "steps": options.steps,
        "plan": options.plan, "jobs": options.jobs,
        "clients": options.clients, "load": options.load, **figures, "waiting_at_end": phases["flood"].waiting,
        **{
            f"{phase}_p{q}_ratio": round(figures[phase][f"p{q}_s"] / figures["alone"][f"p{q}_s"], 3)
            for phase in ("peer", "flood") for q in (50, 99)
        },
    }  # fmt: skip
    return record.publish(options.name, result, options.results, artifacts=provenance.SERVICE)


@dataclass
class _Phase:
    """Seconds of each picture from submission to its bytes; of them those until a worker claimed its job, and those
    from then to its job's end. `rows` are the forwards and rows of each phase of the engine, of all tenants.
    """

    seconds: list[float] = field(default_factory=list)
    to_claim: list[float] = field(default_factory=list)
    in_engine: list[float] = field(default_factory=list)
    rows: dict[str, tuple[float, float]] = field(default_factory=dict)
    waiting: int = 0  # jobs in the queue when the phase ended

    def count(self, before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> None:
        """Add the forwards and rows between two readings."""
        for phase, (forwards, rows) in after.items():
            first, known = before.get(phase, (0.0, 0.0)), self.rows.get(phase, (0.0, 0.0))
            self.rows[phase] = known[0] + forwards - first[0], known[1] + rows - first[1]

    @property
    def mean_rows(self) -> dict[str, float]:
        return {phase: round(rows / forwards, 2) for phase, (forwards, rows) in self.rows.items() if forwards}


class _Tenants:
    """The measured tenant, and the one beside it."""

    def __init__(
        self, url: str, metrics: str, store: JobStore, tokens: Mapping[str, str], options: argparse.Namespace
    ) -> None:
        self._url = url
        self._metrics = metrics
        self._store = store
        self._tokens = tokens
        self._options = options
        self._seed = 0
        self._pause_s = 0.0

    async def measure(self, serve: ChildProcess) -> dict[str, _Phase]:
        """Raises `BenchError`."""
        phases = {phase: _Phase() for phase in PHASES}
        async with self._client("measured") as client, self._client("other") as other:
            await asyncio.gather(key_known(client), key_known(other))
            await self._submit(_WARM)
            await self._drained()
            await settled(serve)
            warm = _Phase()
            await self._draw(client, _WARM_PICTURES * self._options.clients, warm)
            self._pause_s = percentile(warm.seconds, 50) * (1 / self._options.load - 1)
            for phase in PHASES:
                record.progress(phase)
                async with self._beside(phase, other):
                    before = await self._rows()
                    await self._draw(client, self._options.pictures, phases[phase])
                    phases[phase].count(before, await self._rows())
                    phases[phase].waiting = self._store.backlog("image").queued
                if phase == "flood" and not phases[phase].waiting:
                    raise BenchError("--jobs: the flood ended before the measurement did")
        return phases

    async def _rows(self) -> dict[str, tuple[float, float]]:
        """The worker's forwards and rows so far, by phase of the engine."""
        import httpx2
        from prometheus_client.parser import text_string_to_metric_families

        async with httpx2.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://{self._metrics}/metrics")).text
        sums: dict[str, dict[str, float]] = {"diptych_batch_rows_count": {}, "diptych_batch_rows_sum": {}}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in sums:
                    sums[sample.name][sample.labels["phase"]] = sample.value
        forwards, rows = sums.values()
        return {phase: (count, rows[phase]) for phase, count in forwards.items()}

    def _client(self, tenant: str) -> httpx2.AsyncClient:
        import httpx2

        headers = {"Authorization": f"Bearer {self._tokens[tenant]}"}
        return httpx2.AsyncClient(base_url=self._url, timeout=None, trust_env=False, headers=headers)

    @asynccontextmanager
    async def _beside(self, phase: str, other: httpx2.AsyncClient) -> AsyncIterator[None]:
        """What the second tenant does in this phase; nothing of it is left afterwards."""
        peer: asyncio.Task[None] | None = None
        if phase == "peer":
            peer = asyncio.create_task(self._draw(other, sys.maxsize, _Phase()))
        elif phase == "flood":
            await self._submit(self._options.jobs)
            record.progress(f"{self._store.backlog('image').queued} jobs wait")
        try:
            yield
        finally:
            if peer is not None:
                peer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await peer
            while self._store.empty("image"):
                pass
            await self._drained()

    async def _draw(self, client: httpx2.AsyncClient, pictures: int, phase: _Phase) -> None:
        """Draw, with as many requests in flight as there are clients."""
        left = pictures

        async def ask() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                started = time.monotonic()
                response = await client.post("/v1/images/generations", json=self._body())
                if response.status_code != 200:
                    raise BenchError(f"the service answered {response.status_code}: {response.text[:200]}")
                phase.seconds.append(time.monotonic() - started)
                job = self._store.get(response.json()["job_id"])
                if job is not None and job.started is not None and job.ended is not None:
                    phase.to_claim.append(job.started - job.created)
                    phase.in_engine.append(job.ended - job.started)
                await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))

        async with asyncio.TaskGroup() as group:
            for _ in range(self._options.clients):
                group.create_task(ask())

    async def _submit(self, jobs: int) -> None:
        """Submit this many of the second tenant's jobs as fast as they are accepted."""
        left = jobs

        async def submit(connection: Connection) -> None:
            nonlocal left
            await connection.open()
            while left > 0:
                left -= 1
                status, answer = await connection.post("/v1/jobs", {"type": "image", **self._body()})
                if status != 202:
                    raise BenchError(f"a submission was answered {status}: {answer}")
            connection.close()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(jobs, _CONNECTIONS)):
                group.create_task(submit(Connection(self._url, self._tokens["other"])))

    def _body(self) -> dict[str, Any]:
        self._seed += 1
        fields = {"steps": self._options.steps, **PLANS.get(self._options.plan, {})}
        return {"prompt": f"{self._seed}: {_PROMPT}", "seed": self._seed, **fields}

    async def _drained(self) -> None:
        """Wait until nothing waits or runs."""
        until = time.monotonic() + _DRAIN_S
        while (backlog := self._store.backlog("image")).queued or backlog.running:
            if time.monotonic() > until:
                raise BenchError(f"jobs were left after {_DRAIN_S:g} s")
            await asyncio.sleep(_LOOK_S)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("tenants", __doc__)
    parser.add_argument(
        "--model", default=str(EMBEDDED_MODEL), help="default: the embedded one; `sdxl` is a seeded SDXL"
    )
    parser.add_argument("--precision", default="auto", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="of a picture; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=10_000, help="of the flood; default: %(default)s")
    parser.add_argument("--pictures", type=int, default=100, help="in each phase; default: %(default)s")
    parser.add_argument("--clients", type=int, default=1, help="of the measured tenant; default: %(default)s")
    parser.add_argument(
        "--plan", choices=PLANS, help="fields of a request as benchmarks.fleet has them, in place of --steps"
    )
    parser.add_argument("--load", type=float, default=1.0, help="of the measured tenant, alone; default: %(default)s")
    parser.add_argument("--name", default="tenants", help="of the file of results; default: %(default)s")
    options = parser.parse_args(arguments)
    for name in ("jobs", "pictures", "clients", "steps"):
        if getattr(options, name) < 1:
            raise SystemExit(f"--{name}: must be at least 1")
    options.steps = PLANS.get(options.plan, {}).get("steps", options.steps)
    if not 0 < options.load <= 1:
        raise SystemExit("--load: must be above 0 and at most 1")
    if options.tiny:
        options.model, options.precision = tiny.TINY, "fp32"
    result = run(options)
    rows = [
        (phase, *(result[phase][f"{of}p{q}_s"] for of in ("", "to_claim_", "in_engine_") for q in (50, 99)),
         result[phase]["rows"].get("deep"), result.get(f"{phase}_p99_ratio"))
        for phase in dict.fromkeys(PHASES)
    ]  # fmt: skip
    title = f"{result['model']}: a tenant beside another one's {result['jobs']:,} jobs"
    record.table(
        title,
        ("", "p50 s", "p99 s", "to claim: p50 s", "p99 s", "engine: p50 s", "p99 s", "deep rows", "p99 to alone"),
        rows,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
