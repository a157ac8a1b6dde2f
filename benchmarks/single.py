"""Measures what a client who is alone waits for, by stage: `python -m benchmarks.single [--plans full,half,4-steps]`.

One client draws `--pictures` one after another, with nothing else in flight, through the service that
`benchmarks.fleet` starts on one GPU: HTTP, Redis and Celery. Then the service ends, and `benchmarks.engine` draws as
many on the same GPU, from prompts to pixels. Stages are medians, by the clock that Redis and clients share: until the
job is in Redis, until a worker claims it, in the engine, until its file is stored and its end recorded, and until the
client has its bytes. Images of random weights are noise, whose JPEG files at full quality are many times as large as
those of pictures; `--qualities` draws each plan again in others. `--device cpu --tiny` rehearses it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.fleet import PLANS, RUNGS, Host
from benchmarks.harness import command, provenance, record
from benchmarks.harness.record import BenchError
from benchmarks.harness.service import percentile
from deployment.devices import visible_gpus
from pipeline.checkpoints import sdxl, tiny

if TYPE_CHECKING:
    from core.jobs.store import JobStore

STAGES = ("accept", "claim", "engine", "store", "answer")
_BEST = 100
_WARM = 3  # pictures of a plan before those that count
_ANSWER_S = 120.0


def draw(url: str, store: JobStore, fields: Mapping[str, Any], pictures: int) -> dict[str, Any]:
    """Draw pictures one after another; seconds of one, and milliseconds by stage. Raises `BenchError`."""
    import httpx2

    seconds: list[float] = []
    stages: dict[str, list[float]] = {stage: [] for stage in STAGES}
    sizes: list[int] = []
    with httpx2.Client(base_url=url, timeout=_ANSWER_S, trust_env=False) as client:
        for number in range(_WARM + pictures):
            body = {"prompt": f"{number}: a small red boat", "seed": number, "output_format": "jpeg", **fields}
            sent, started = time.time(), time.perf_counter()
            response = client.post("/v1/images/generations", json=body)
            took_s, answered = time.perf_counter() - started, time.time()
            if response.status_code != 200:
                raise BenchError(f"the service answered {response.status_code}: {response.text[:200]}")
            job = store.get(response.json()["job_id"])
            if job is None or job.started is None or job.ended is None or job.result is None:
                raise BenchError("a job's record is gone")
            if number < _WARM:
                continue
            seconds.append(took_s)
            engine_s = float(job.result["engine_s"])
            times = (job.created - sent, job.started - job.created, engine_s, job.ended - job.started - engine_s,
                     answered - job.ended)  # fmt: skip
            for stage, time_s in zip(STAGES, times, strict=True):
                stages[stage].append(1e3 * time_s)
            sizes.append(job.result["images"][0]["size_bytes"])
    return {
        "p50_s": percentile(seconds, 50), "p99_s": percentile(seconds, 99), "pictures": pictures,
        "stages_ms": {stage: round(statistics.median(times), 1) for stage, times in stages.items()},
        "file_bytes": round(statistics.median(sizes)),
    }  # fmt: skip


def served(options: argparse.Namespace) -> dict[str, Any]:
    """Figures by plan, through the service. Raises `BenchError`."""
    from core.config import Settings
    from core.jobs.store import JobStore

    devices = visible_gpus(os.environ)[:1] if options.device == "cuda" else None
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="diptych-single-"))
        host = stack.enter_context(Host(options, devices, Path(folder)))
        host.wait_ready()
        host.settle()
        store = stack.enter_context(contextlib.closing(JobStore.of(Settings(redis_url=host.redis.url))))
        for plan in options.plans:
            fields = {"steps": 20, **PLANS[plan], **({"steps": 2} if options.tiny else {})}
            for quality in options.qualities if fields.get("output_format") != "png" else [_BEST]:
                more = {} if quality == _BEST else {"output_compression": quality}
                name = plan if quality == _BEST else f"{plan}, quality {quality}"
                figures[name] = {"plan": plan, **draw(host.url, store, fields | more, options.pictures)}
                record.progress(f"{name}: {json.dumps(figures[name])}")
    return figures


def in_engine(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a picture that is alone in the engine, by plan: the median."""
    rungs = {plan: RUNGS.get(plan, "4-steps") for plan in options.plans}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "benchmarks.engine", "--rungs", ",".join(dict.fromkeys(rungs.values()))]
        words += ["--windows", "0", "--singles", str(options.pictures), "--name", "engine", "--results", folder]
        words += ["--device", options.device, "--model", options.model, *(["--tiny"] if options.tiny else [])]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        measured = json.loads((Path(folder) / "engine.json").read_text())["rungs"]
    return {plan: measured[rung]["single_s"] for plan, rung in rungs.items()}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both, and return the results."""
    plans = served(options)
    result = {"model": options.model, "precision": options.precision, "pictures": options.pictures, "plans": plans}
    record.publish(options.name, result, options.results, verbose=False)
    engine_s = in_engine(options)
    for figures in plans.values():
        alone_s = engine_s[figures["plan"]]
        figures |= {"engine_s": alone_s, "beyond_ms": round(1e3 * (figures["p50_s"] - alone_s), 1)}
    return record.publish(options.name, result, options.results, artifacts=provenance.SERVICE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("single", __doc__)
    parser.add_argument("--plans", default="full,half,4-steps", help="default: %(default)s")
    parser.add_argument("--model", default=sdxl.NAME, help="default: %(default)s")
    parser.add_argument("--pictures", type=int, default=24, help="of each plan; default: %(default)s")
    parser.add_argument("--qualities", default="100", help="of JPEG files; default: %(default)s")
    parser.add_argument("--checker", default="", metavar="FOLDER", help="as of benchmarks.fleet")
    parser.add_argument("--name", default="single", help="of the file of results; default: %(default)s")
    options = parser.parse_args(arguments)
    options.plans = command.names(options.plans, PLANS, "--plans")
    options.qualities = [int(quality) for quality in options.qualities.split(",")]
    options.apis, options.threads, options.image_jobs, options.precision = 1, 0, 32, "int8"  # as of the rungs
    if options.tiny:
        options.model, options.precision = tiny.TINY, "fp32"
    result = run(options)
    rows = [
        (plan, figures["p50_s"], figures["p99_s"], figures["engine_s"], figures["beyond_ms"],
         *figures["stages_ms"].values(), figures["file_bytes"])
        for plan, figures in result["plans"].items()
    ]  # fmt: skip
    header = ("plan", "p50 s", "p99 s", "engine alone s", "beyond it ms", *(f"{stage} ms" for stage in STAGES), "bytes")
    record.table(f"{result['model']}: one client alone", header, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
