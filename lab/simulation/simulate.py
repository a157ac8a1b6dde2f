"""Capacity planning: a fleet of simulated devices with the real scheduler.

One trace of arrivals is run at each number of devices and each load. Figures follow from a cost table and a seed only,
and are the same on every machine. The fleet is in `lab.simulation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from contract.image import ImageParameters
from contract.plan import AUTO, AUTOMATIC, BLOCK, DeepCache
from lab.bench.harness import provenance, record
from lab.simulation import traffic
from lab.simulation.costs import ENCODE, SHIPPED, STEPS, Costs, read
from lab.simulation.fleet import Served, StepLevel
from lab.simulation.plot import Line, draw
from lab.simulation.runner import Device, held_bytes, limit, phases_of
from lab.simulation.traffic import Bursts, Guidance, Mix, SimulatedJob

MOST_GPUS, MOST_PICTURES = 10_000, 10_000_000
_WARM = 0.1  # of the arrivals come to a fleet that is still filling, and do not count for latencies
_AXES = {"gpus": ("GPUs", "GPUs"), "load": ("load", "load, as a share of what the table allows")}
_PERCENTILES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 99.9)


@dataclass(frozen=True)
class Plan:
    """The parameters of a simulation. `loads` are shares of what the fleet could do if every forward were as wide as
    pays best.
    """

    mix: Mix
    gpus: tuple[int, ...] = (1,)
    loads: tuple[float, ...] = (0.8,)
    bursts: Bursts | None = None
    pictures: int = 20_000
    seed: int = 0
    image_jobs: int = 32
    device: Device = field(default_factory=Device)


def run(costs: Costs, plan: Plan, *, results: Path | None = None, name: str = "simulate") -> dict[str, Any]:
    """Simulate and report: a table, `name`.json and `name`.svg. Raises `BenchError`, naming the option or field."""
    from rich.console import Console
    from rich.progress import Progress

    check(costs, plan)
    folder = record.writable(results or record.RESULTS)
    result = about(costs, plan)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(plan.gpus) * len(plan.loads))
        for point, label in points(costs, plan):
            progress.update(task, description=label, advance=1)
            if point is not None:
                result["points"].append(point)
    _tabulate(result, plan)
    (folder / f"{name}.svg").write_text(plot(result))
    return record.publish(name, result, folder, artifacts=_table_file(costs))


def about(costs: Costs, plan: Plan) -> dict[str, Any]:
    """All that the figures follow from, and what the table leaves open; `points` are still to come."""
    mix = {
        "size": _shares(plan.mix.size, lambda size: f"{size[0]}x{size[1]}"),
        "steps": _shares(plan.mix.steps, str),
        "guided": _shares(plan.mix.guided, _guided),
        "deepcache": _shares(plan.mix.deepcache, lambda schedule: "off" if schedule is None else _schedule(schedule)),
        "deadline_s": _shares(plan.mix.deadline_s, lambda s: "none" if math.isinf(s) else f"{s:g}"),
        "priority": _shares(plan.mix.priority, str),
    }
    kinds = plan.mix.kinds()
    return {
        "costs": {"name": costs.name, "device": costs.device, "source": costs.source},
        "notes": notes(costs, plan),
        "mix": mix,
        "bursts": None if plan.bursts is None else {"on_s": plan.bursts.on_s, "off_s": plan.bursts.off_s},
        "pictures": plan.pictures,
        "seed": plan.seed,
        "image_jobs": plan.image_jobs,
        "max_requests": plan.device.max_requests,
        "max_rows": plan.device.max_rows,
        "capacity_per_s": round(capacity(costs, plan.device, plan.mix), 4),
        "solo_s": round(sum(share * solo_s(costs, parameters) for parameters, share in kinds), 4),
        "points": [],
    }


def points(costs: Costs, plan: Plan) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """Each number of devices and load, with what comes next; a point where it is complete."""
    for gpus in plan.gpus:
        for load in plan.loads:
            yield None, f"{gpus} GPUs, load {load:g}"
            rate = load * gpus * capacity(costs, plan.device, plan.mix)
            jobs = traffic.jobs(plan.seed, plan.pictures, rate, plan.mix, plan.bursts)
            served = StepLevel(costs, plan.device, gpus=gpus, image_jobs=plan.image_jobs).run(jobs)
            measured = {"step_level": figures(served, jobs, gpus)}
            yield {"gpus": gpus, "load": load, "rate_per_s": round(rate, 4), "policies": measured}, ""


def figures(served: Served, jobs: Sequence[SimulatedJob], gpus: int) -> dict[str, Any]:
    """Throughput, utilisation and width over the whole run; latencies and misses of those that came after its start.

    Latencies are of the pictures that were in time. `rows` is the mean width of a denoising forward.
    """
    arrived, ended = np.array([job.arrival for job in jobs]), np.array(served.ended)
    missed = np.array(served.missed)
    took_s = float(ended.max() - arrived[0])
    counts = np.arange(len(jobs)) >= int(_WARM * len(jobs))
    latencies = (ended - arrived)[counts & ~missed]
    summary: dict[str, Any] = {
        "throughput_per_s": round(float((~missed).sum()) / took_s, 4),
        "missed": round(float(missed[counts].mean()), 5),
        "utilisation": round(served.busy_s / (gpus * took_s), 4),
        "rows": round(served.rows / served.forwards, 3) if served.forwards else None,
        "mean_s": None,
        "p50_s": None,
        "p99_s": None,
        "percentiles_s": {},
    }
    if len(latencies):
        at = [round(float(value), 4) for value in np.percentile(latencies, _PERCENTILES)]
        by_name = {f"{percentile:g}": seconds for percentile, seconds in zip(_PERCENTILES, at, strict=True)}
        summary |= {"mean_s": round(float(latencies.mean()), 4), "p50_s": by_name["50"], "p99_s": by_name["99"]}
        summary["percentiles_s"] = by_name
    return summary


# -- what the table says -----------------------------------------------------------------------------------------------


def solo_s(costs: Costs, parameters: ImageParameters) -> float:
    """Seconds of a picture that is alone on its device."""
    return sum(costs(*group, rows) for group, rows in phases_of(parameters))


def bound_s(costs: Costs, device: Device, parameters: ImageParameters) -> float:
    """The least seconds of a device that a picture can cost: every forward as wide as a row costs least."""
    return sum(costs.least_s(*group, rows, limit(costs, device, group)) for group, rows in phases_of(parameters))


def capacity(costs: Costs, device: Device, mix: Mix) -> float:
    """Pictures per second of one device that nothing can exceed."""
    return 1 / sum(share * bound_s(costs, device, parameters) for parameters, share in mix.kinds())


def notes(costs: Costs, plan: Plan) -> list[str]:
    """The notes on what was not measured, and what is made of that."""
    lines: list[str] = []
    for parameters, _ in plan.mix.kinds():
        for group, rows in phases_of(parameters):
            name = group.phase if group.phase == ENCODE else f"{group.phase} at {group.size[0]}x{group.size[1]}"
            widest = costs.widest(*group)
            if widest is None:
                lines.append(f"{name}: not measured, counted as no time")
                continue
            if group.phase in STEPS and widest < plan.device.max_rows:
                lines.append(f"{name}: not measured over {widest} rows, so no forward is wider")
            fastest = min(costs.measured[group.phase, group.size])
            if rows < fastest:
                lines.append(f"{name}: not measured under {fastest} rows, which are extrapolated")
    if plan.device.memory_bytes is not None and not costs.held_bytes:
        lines.append("memory: the table does not tell what a picture holds, so memory bounds nothing")
    return list(dict.fromkeys(lines))


def check(costs: Costs, plan: Plan) -> None:
    """Raises `BenchError`, which names the option, or the table and its field."""
    for option, values, low, high in (
        ("--gpus", plan.gpus, 1, MOST_GPUS),
        ("--pictures", (plan.pictures,), 1, MOST_PICTURES),
        ("--load", plan.loads, 0.001, 100),
    ):
        for value in values:
            if not low <= value <= high:
                raise record.BenchError(f"{option}: must be between {low:g} and {high:g}, not {value:g}")
    if len(plan.gpus) > 1 and len(plan.loads) > 1:
        raise record.BenchError("--gpus, --load: only one of them may have several values")
    for parameters, _ in plan.mix.kinds():
        _check_picture(costs, plan.device, parameters)


def _guided(guided: Guidance) -> str:
    return f"{guided[0]:g}:{guided[1]:g}" if isinstance(guided, tuple) else "yes" if guided else "no"


def _check_plan(parameters: ImageParameters) -> None:
    """Reject a schedule or guidance interval that is none for so many steps."""
    refuse = record.BenchError
    if parameters.deepcache is not None and (wrong := parameters.deepcache.error_for(parameters.steps)):
        raise refuse(f"--deepcache: {wrong.message}") from wrong
    if parameters.guidance_interval is not None and not parameters.guidance.fits(parameters.steps):
        raise refuse(f"--guidance: {_guided(parameters.guidance_interval)} contains none of {parameters.steps} steps")


def _check_picture(costs: Costs, device: Device, parameters: ImageParameters) -> None:
    """Reject a picture that the table does not cover, or that a device could never draw."""
    refuse = record.BenchError
    _check_plan(parameters)
    for group, rows in phases_of(parameters):
        widest = costs.widest(*group)
        where = f"{costs.name}: {group.phase}.{group.size[0]}x{group.size[1]}"
        if widest is None and group.phase != ENCODE:
            sizes = ", ".join(f"{width}x{height}" for width, height in costs.sizes)
            raise refuse(f"{where}: is not in the table; sizes that can be drawn: {sizes or 'none'}")
        if group.phase in STEPS and (widest or 0) < rows:
            raise refuse(f"{where}: was measured to {widest} row, and guidance brings 2")
        if group.phase in STEPS and device.max_rows < rows:
            raise refuse(f"--max-rows: must be at least {rows}")
    if device.memory_bytes is not None and held_bytes(costs, parameters) > device.memory_bytes:
        raise refuse(f"--memory-mib: an image of {parameters.width}x{parameters.height} holds more than that")


# -- for people --------------------------------------------------------------------------------------------------------


def _tabulate(result: dict[str, Any], plan: Plan) -> None:
    from rich.console import Console

    swept = sweep_parameter(result)
    rows = []
    for point in result["points"]:
        m = point["policies"]["step_level"]
        rows.append(
            (
                f"{point[swept]:g}",
                f"{m['throughput_per_s']:.2f}",
                *("–" if m[field] is None else f"{m[field]:.2f}" for field in ("mean_s", "p50_s", "p99_s")),
                f"{m['missed']:.1%}",
                f"{m['utilisation']:.0%}",
                "–" if m["rows"] is None else f"{m['rows']:.1f}",
            )
        )
    other = f"load {plan.loads[0]:g}" if swept == "gpus" else f"GPUs: {plan.gpus[0]}"
    traffic_ = "bursts" if plan.bursts else "Poisson"
    record.table(
        f"{result['costs']['device']}: at most {result['capacity_per_s']:.2f} images/s per GPU, one alone takes "
        f"{result['solo_s']:.2f} s. {other}; {plan.pictures} arrivals, {traffic_}, seed {plan.seed}; times in s",
        (_AXES[swept][0], "per s", "mean", "p50", "p99", "missed", "busy", "rows"),
        rows,
    )
    for note in result["notes"]:
        Console(stderr=True).print(note, highlight=False)


def plot(result: dict[str, Any]) -> str:
    """p99 (and p50, dashed) over load or number of devices; of a single point, the distribution of latencies."""
    swept, device = sweep_parameter(result), result["costs"]["device"]
    measured = [(point[swept], point["policies"]["step_level"]) for point in result["points"]]
    if len(measured) == 1:
        at = [(seconds, float(percentile)) for percentile, seconds in measured[0][1]["percentiles_s"].items()]
        return draw([Line("", at, 0)], device, "seconds from arrival to picture", "% of pictures", log_x=True)
    lines = [
        Line(label, [(x, m[figure]) for x, m in measured if m[figure] is not None], 0, dashed)
        for label, figure, dashed in (("p99", "p99_s", False), ("p50", "p50_s", True))
    ]
    return draw(lines, device, _AXES[swept][1], "p99 and p50, s", log_x=swept == "gpus", log_y=True)


def sweep_parameter(result: dict[str, Any]) -> str:
    """The parameter that the points of a result differ by."""
    return "gpus" if len({point["gpus"] for point in result["points"]}) > 1 else "load"


def _table_file(costs: Costs) -> tuple[str, ...]:
    """The cost table, where it is one of those that are shipped."""
    path = SHIPPED / costs.name
    shipped = path.is_file() and read(path).measured == costs.measured
    return (path.relative_to(provenance.ROOT).as_posix(),) if shipped else ()


def _shares(choice: traffic.WeightedChoice[Any], word: Any) -> dict[str, float]:
    return {word(value): round(share, 6) for value, share in zip(choice.values, choice.shares(), strict=True)}


def _schedule(schedule: DeepCache) -> str:
    if schedule == AUTO:
        return AUTOMATIC
    return f"{schedule.interval}" if schedule.depth == BLOCK else f"{schedule.interval}:{schedule.depth}"
