"""Simulates many models on many GPUs: `python -m benchmarks.capacity --models 200 --rate 300 --p99 5`.

Tells throughput, latencies, loads of models and seconds of devices for each number of `--gpus`; with `--p99` and
without `--gpus`, the fewest GPUs whose p99 is at most that. Requests choose models by Zipf's law. `--accept` makes a
cascade of each: that share of drafts is kept, the others are drawn anew. `--scale` starts and ends GPUs by queued work,
from none to `--gpus`. `--check FILE` compares with a file of `benchmarks.fleet`, and the exit code is 1 where a
throughput differs by more than a tenth. Costs are the tables of `benchmarks/costs`, or a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import record
from benchmarks.harness.record import BenchError
from benchmarks.harness.service import percentile
from benchmarks.simulation import costs, traffic
from benchmarks.simulation.models import FleetUsage, ModelFleet, ModelJob, Residency, Scaling, Stage
from benchmarks.simulation.runner import Device
from contract.plan import RESNET, DeepCache

TOLERANCE = 0.1
MOST_GPUS = 10_000
_WARM = 0.1  # of the arrivals come while models are loaded where they are wanted, and do not count for latencies
# Plans of `benchmarks.fleet`: steps, guidance, DeepCache.
PLANS: dict[str, tuple[int, bool, DeepCache | None]] = {
    "full": (20, True, None), "half": (20, True, DeepCache(2, RESNET)), "4-steps": (4, False, None),
}  # fmt: skip


def stage(table: costs.Costs, plan: str, places: int, host_s: float = 0.0) -> Stage:
    """One picture of a plan. A table without the shallow steps of depth `resnet` counts those of `block`.

    Raises `BenchError`.
    """
    steps, guided, deepcache = PLANS[plan]
    size = max(table.sizes, default=costs.ANY)
    if deepcache is not None and table.widest(costs.SHALLOW[deepcache.depth], size) is None:
        deepcache = DeepCache(deepcache.interval)
    parameters = traffic.picture(size, steps, guided, deepcache)
    if table.widest(costs.DEEP, size) is None:
        raise BenchError(f"{table.name}: has no size for which both deep and vae were measured")
    return Stage.of(table, Device(max_requests=places), parameters, places=places, host_s=host_s)


def jobs(options: argparse.Namespace, draft: Stage, full: Stage | None) -> list[ModelJob]:
    """Poisson arrivals for `seconds`; `full` is the second stage of a cascade's rejected drafts."""
    rng = np.random.default_rng(options.seed)
    count = max(1, round(options.rate * options.seconds))
    arrivals = traffic.arrivals(rng, count, options.rate).tolist()
    weights = np.arange(1, options.models + 1) ** -options.zipf
    models = rng.choice(options.models, count, p=weights / weights.sum()).tolist()
    kept = (rng.random(count) < (1.0 if full is None else options.accept)).tolist()
    stages = ((draft, full or draft), (draft,))
    return [ModelJob(when, model, stages[keep]) for when, model, keep in zip(arrivals, models, kept, strict=True)]


def simulate(options: argparse.Namespace, table: costs.Costs, gpus: int) -> dict[str, Any]:
    """One number of GPUs."""
    draft = stage(table, options.plan, options.image_jobs, options.host)
    full = None if options.accept is None else stage(table, options.redraw, options.image_jobs, options.host)
    work = jobs(options, draft, full)
    unit_s = draft.least_s + (0.0 if full is None else (1 - options.accept) * full.least_s)
    scaling = None
    if options.scale is not None:
        scaling = Scaling(0, gpus, work_s=options.scale, start_s=options.start, cooldown_s=options.cooldown)
    residency = Residency(options.loaded, options.pinned, options.load, options.switch)
    begun = time.perf_counter()
    usage = ModelFleet(gpus, places=options.image_jobs, residency=residency, unit_s=unit_s, scaling=scaling).run(work)
    return {"gpus": gpus, **figures(usage), "simulated_in_s": round(time.perf_counter() - begun, 1)}


def figures(usage: FleetUsage) -> dict[str, Any]:
    latencies = usage.latencies[int(_WARM * len(usage.latencies)) :]
    return {
        "images_s": round(len(usage.latencies) / usage.ends, 3),
        "p50_s": percentile(latencies, 50), "p99_s": percentile(latencies, 99),
        "busy": round(usage.busy_s / usage.device_s, 4), "device_s": round(usage.device_s, 1),
        "loads": usage.loads, "switches": usage.switches, "most_gpus": usage.most_devices,
    }  # fmt: skip


def fewest(options: argparse.Namespace, table: costs.Costs) -> list[dict[str, Any]]:
    """The points that a search for the fewest GPUs tries; the last one is the answer. Raises `BenchError`."""
    points: dict[int, dict[str, Any]] = {}

    def meets(gpus: int) -> bool:
        points[gpus] = simulate(options, table, gpus)
        record.progress(json.dumps(points[gpus]))
        return bool(points[gpus]["p99_s"] <= options.p99)

    draft = stage(table, options.plan, options.image_jobs, options.host)
    high = max(1, int(options.rate * draft.least_s))
    low = 0
    while not meets(high):
        if low and points[high]["p99_s"] == points[low]["p99_s"]:
            raise BenchError(
                f"--p99: {points[high]['p99_s']:g} s is what loads of models leave, with any number of GPUs"
            )
        if high >= MOST_GPUS:
            raise BenchError(f"--p99: not even {MOST_GPUS:,} GPUs meet it")
        low, high = high, min(MOST_GPUS, 1 + high * 5 // 4)
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return [*(point for gpus, point in sorted(points.items()) if gpus != high), points[high]]


def check(fleet: Mapping[str, Any], engine_s: Mapping[str, float], table: costs.Costs) -> list[dict[str, Any]]:
    """Compare a run of `benchmarks.fleet` with the simulation of it: a closed loop of as many requests in flight.

    `engine_s`: images per second of the engine alone, by plan. What a picture costs beside its iterations is taken from
    one figure, that of the lightest plan on the fewest GPUs; all others are predicted. Raises `BenchError`.
    """
    counts = sorted(map(int, fleet["gpus"]))
    plans = [plan for plan in fleet["gpus"][str(counts[0])] if plan in engine_s and plan in PLANS]
    if not plans:
        raise BenchError("--check: the file has no plan of which the engine's throughput is known")
    lightest = max(plans, key=lambda plan: engine_s[plan])
    first = fleet["gpus"][str(counts[0])][lightest]["images_s"] / counts[0]
    host_s = max(0.0, 1 / first - 1 / engine_s[lightest])
    rows = []
    for count in counts:
        for plan, measured in fleet["gpus"][str(count)].items():
            if plan not in engine_s or plan not in PLANS:
                continue
            places = int(fleet.get("image_jobs", 32))
            alone = stage(table, plan, places)
            # The table's own error, which the engine alone shows: it is taken out.
            own_s = 1 / engine_s[plan] - 1 / closed_loop(alone, 1, 48, places)
            picture = stage(table, plan, places, host_s + own_s)
            predicted = closed_loop(picture, count, measured["in_flight"], places)
            error = predicted / measured["images_s"] - 1
            rows.append({
                "gpus": count, "plan": plan, "measured": measured["images_s"], "simulated": round(predicted, 3),
                "error": round(error, 4), "calibrates": (count, plan) == (counts[0], lightest),
            })  # fmt: skip
    return rows


def closed_loop(picture: Stage, gpus: int, in_flight: int, places: int) -> float:
    """Images per second with so many requests in flight on GPUs that all have the model."""
    count = max(200, 24 * in_flight)
    fleet = ModelFleet(gpus, places=places, residency=Residency(), unit_s=picture.least_s, first=(0,))
    ends = sorted(fleet.run([ModelJob(0.0, 0, (picture,))] * count).latencies)
    # While the queue is never empty it does not matter when its jobs came: the last in flight are left out.
    first, last = min(in_flight, count // 4), count - gpus * places - 1
    return (last - first) / (ends[last] - ends[first])


def _read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return result
    except (OSError, ValueError) as error:
        raise BenchError(f"--check: {path} cannot be read ({error})") from error


def _checked(options: argparse.Namespace, table: costs.Costs) -> int:
    name = str(options.check)
    path = Path(name) if name.endswith(".json") else options.results / f"{name}.json"
    fleet, rungs = _read(path), _read(path.with_name(f"{path.stem}-engine.json"))["rungs"]
    names = {"full": "int8", "half": "half", "4-steps": "4-steps"}
    engine = {plan: rungs[name]["images_s"] for plan, name in names.items() if name in rungs}
    rows = check(fleet, engine, table)
    record.table(
        f"{options.check}: images/s", ("GPUs", "plan", "measured", "simulated", "error"),
        [(*(row[key] for key in ("gpus", "plan", "measured", "simulated")), _error(row)) for row in rows],
    )  # fmt: skip
    return int(any(abs(row["error"]) > TOLERANCE for row in rows))


def _error(row: Mapping[str, Any]) -> str:
    return "calibrates" if row["calibrates"] else f"{row['error']:+.1%}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--costs", default="h200", metavar="NAME", help="a table of benchmarks/costs, or a file; default: %(default)s")
    add("--gpus", default="", help="numbers of GPUs, such as 64,128")
    add("--p99", type=float, help="seconds: search the fewest GPUs that meet it")
    add("--models", type=int, default=1, help="default: %(default)s")
    add("--zipf", type=float, default=1.0, help="exponent of the models' popularity; default: %(default)s")
    add("--rate", type=float, default=2.0, help="images per second; default: %(default)s")
    add("--seconds", type=float, default=600.0, help="of arrivals; default: %(default)s")
    add("--plan", choices=tuple(PLANS), default="full", help="of a picture, or of a cascade's draft")
    add("--accept", type=float, help="share of drafts that a cascade keeps; default: no cascade")
    add("--redraw", choices=tuple(PLANS), default="full", help="the plan of the other drafts' pictures")
    add("--loaded", type=int, default=8, help="models on a GPU; default: %(default)s")
    add("--pinned", type=int, default=32, help="more of them in a worker's host memory; default: %(default)s")
    add("--load", type=float, default=20.0, help="seconds from disk; default: %(default)s")
    add("--switch", type=float, default=1.0, help="seconds from host memory; default: %(default)s")
    add("--image-jobs", type=int, default=32, help="jobs that a worker takes at once; default: %(default)s")
    add("--host", type=float, default=0.0, help="seconds of a device that a picture costs beside its iterations")
    add("--scale", type=float, metavar="S", help="one GPU for each S seconds of work; default: all GPUs, always")
    add("--start", type=float, default=90.0, help="seconds until a GPU that is asked for serves; default: %(default)s")
    add("--cooldown", type=float, default=300.0, help="seconds until one is given back; default: %(default)s")
    add("--seed", type=int, default=0)
    add("--check", metavar="FILE", help="results of benchmarks.fleet --engine, by name or path")
    add("--name", default="capacity", help="of the file of results; default: %(default)s")
    add("--results", type=Path, default=record.RESULTS, metavar="DIR", help="where the JSON goes")
    options = parser.parse_args(arguments)
    try:
        _validate(options)
        table = costs.read(costs.find(options.costs))
        if options.check:
            return _checked(options, table)
        if options.gpus:
            points = [simulate(options, table, int(count)) for count in options.gpus.split(",")]
        else:
            points = fewest(options, table)
        result = {**{k: v for k, v in vars(options).items() if k not in ("results", "check")}, "points": points}
        record.publish(options.name, result, options.results)
    except BenchError as error:
        print(f"capacity: {error}", file=sys.stderr)
        return 2
    keys = ("gpus", "images_s", "p50_s", "p99_s", "busy", "device_s", "loads", "switches", "most_gpus")
    header = ("GPUs", "images/s", "p50 s", "p99 s", "busy", "GPU seconds", "loads", "switches", "most GPUs")
    title = f"{table.device}: {options.models} models, {options.rate:g} images/s"
    record.table(title, header, [[point[key] for key in keys] for point in points])
    return 0


def _validate(options: argparse.Namespace) -> None:
    if not options.check and not options.gpus and options.p99 is None:
        raise BenchError("--gpus, --p99: one of them is needed")
    for word in options.gpus.split(",") if options.gpus else ():
        if not (word.isdigit() and 1 <= int(word) <= MOST_GPUS):
            raise BenchError(f"--gpus: must be whole numbers from 1 to {MOST_GPUS:,}, not {word}")
    for name, least in (("models", 1), ("loaded", 1), ("pinned", 0), ("image_jobs", 1), ("seed", 0), ("zipf", 0.0)):
        if not getattr(options, name) >= least:
            raise BenchError(f"--{name.replace('_', '-')}: must be at least {least}")
    for name in ("rate", "seconds", "scale", "p99"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:
            raise BenchError(f"--{name}: must be above 0")
    for name in ("load", "switch", "host", "start", "cooldown"):
        if not getattr(options, name) >= 0:
            raise BenchError(f"--{name}: must be at least 0")
    if options.accept is not None and not 0 <= options.accept <= 1:
        raise BenchError("--accept: must be between 0 and 1")


if __name__ == "__main__":
    sys.exit(main())
