"""Measures the service on a GPU as in the README: `diptych quantize`, `diptych serve`, and images over HTTP.

    python -m benchmarks.h200.service [--stages quantize,serve,warm,engine,emoji] [--results folder] [--tiny]

Stages, each with a time limit; if one fails that is recorded, and the others run:

- quantize: the seeded stand-in of SDXL to INT8, by the command.
- serve: cold start without any cache, traffic while graphs are recorded, then windows of a closed loop of clients
  without DeepCache, with "auto" and with "2", and one client alone.
- warm: the same command again, to readiness and to the first picture.
- engine: the engine's images per second with the same settings, without HTTP.
- emoji: the shipped emoji-xl in INT8 and bf16 on the GPU against fp32 on this machine's CPU; a contact sheet.

`--tiny` tests all stages on a CPU within minutes; its measurements have no meaning.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import provenance, record
from benchmarks.h200.clients import closed_loop
from benchmarks.h200.served import H200, POLL_S, TINY, Bench, GraphWatch, Plan, Service, StageError, service

_RECORDED_S = 30.0  # the longest to wait for the last graph, without traffic
_PARTIAL = "service-partial.json"
STAGES = ("quantize", "serve", "warm", "engine", "emoji")
_SCHEDULES: dict[str, Any] = {"off": "off", "auto": "auto", "2": {"interval": 2, "depth": "block"}}
"""DeepCache as the command line says it, and as a request does."""


def quantize(bench: Bench) -> dict[str, Any]:
    """`diptych quantize` on its default number of prompts."""
    subjects = ("boat", "teapot", "moon", "fox", "heart", "apple", "bird", "flower")
    places = ("lake", "table", "harbour", "map", "hill", "plate", "roof", "field")
    prompts = [f"a {one} on a {other}" for one in subjects for other in places][: bench.plan.prompts]
    file = bench.folder / "prompts.txt"
    file.write_text("\n".join(prompts) + "\n")
    started = time.monotonic()
    said = bench.run(
        "diptych",
        ["quantize", "--model", bench.plan.model, "--prompts", str(file), "-o", str(bench.unet.parent)],
    )
    print(said, end="", flush=True)
    return {"seconds": round(time.monotonic() - started, 1), "prompts": len(prompts), "said": said.splitlines()}


def serve(bench: Bench) -> dict[str, Any]:
    """Cold start, traffic while graphs are recorded, windows with all of them, and one client alone."""
    plan, found = bench.plan, dict[str, Any]()
    with service(bench) as on:
        found["cold_ready_s"] = on.ready()
        print(f"  ready after {found['cold_ready_s']} s, cold", flush=True)
        with GraphWatch(on) as watch:
            found["first_picture_s"] = _alone(on, 1)["p50_s"]
            found["while_recording"] = _window(on, "off", ramp_s=0.0, window_s=plan.recording_s)
            if watch.seen:  # without traffic the rest takes seconds
                until = time.monotonic() + _RECORDED_S
                while not watch.complete and time.monotonic() < until:
                    time.sleep(POLL_S)
            for schedule in _SCHEDULES:
                found[f"deepcache {schedule}"] = _window(on, schedule, ramp_s=plan.ramp_s, window_s=plan.window_s)
            found["alone"] = {schedule: _alone(on, plan.alone, schedule) for schedule in ("off", "auto")}
        found["graphs"] = watch.seen
        found["said"] = on.said("graphs", "at most", "precision", "instead of", "drawn by")
        found["stop_s"] = on.stop()
    return found


def _window(on: Service, schedule: str, *, ramp_s: float, window_s: float) -> dict[str, Any]:
    """A closed loop of clients: the images that finish in the window, after batches are full."""
    plan = on.bench.plan
    with closed_loop(on.url, plan.clients, {**plan.wanted, "deepcache": _SCHEDULES[schedule]}) as load:
        time.sleep(ramp_s)
        begin = time.monotonic()
        time.sleep(window_s)
        end = time.monotonic()
    found = {"clients": plan.clients, **load.window(begin, end)}
    if load.errors:
        raise StageError(f"{len(load.errors)} clients got no picture: {load.errors[0]}")
    print(f"  {plan.clients} clients, deepcache {schedule}: {json.dumps(found)}", flush=True)
    return found


def _alone(on: Service, pictures: int, schedule: str = "off") -> dict[str, Any]:
    """The latency of a single client."""
    took = []
    for number in range(pictures):
        started = time.monotonic()
        on.client.draw(
            **on.bench.plan.wanted, deepcache=_SCHEDULES[schedule], seed=number, prompt=f"alone {number}: a red boat"
        )
        took.append(time.monotonic() - started)
    found = {"pictures": pictures, "p50_s": round(sorted(took)[len(took) // 2], 3), "longest_s": round(max(took), 3)}
    print(f"  one client, deepcache {schedule}: {json.dumps(found)}", flush=True)
    return found


def warm(bench: Bench) -> dict[str, Any]:
    """The same command with the caches of the first run."""
    with service(bench) as on:
        found: dict[str, Any] = {"ready_s": on.ready()}
        print(f"  ready after {found['ready_s']} s, warm", flush=True)
        with GraphWatch(on) as watch:
            found["first_picture_s"] = _alone(on, 1)["p50_s"]
            until = time.monotonic() + _RECORDED_S
            while bench.plan.device == "cuda" and not watch.complete and time.monotonic() < until:
                time.sleep(POLL_S)
        found["graphs"] = watch.seen
        found["stop_s"] = on.stop()
    return found


# -- without HTTP ------------------------------------------------------------------------------------------------------


def engine(bench: Bench) -> dict[str, Any]:
    """The engine's throughput, in a separate process."""
    given = [*(["--tiny"] if bench.plan is TINY else []), "--engine", str(bench.unet)]
    said = bench.run("python -m", ["benchmarks.h200.service", *given])
    for line in said.splitlines()[:-1]:
        print(f"  {line}", flush=True)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def _engine(plan: Plan, unet: Path) -> None:
    """Implements `--engine`: the closed loop of the engine benchmark with the service's settings."""
    from benchmarks.h200.engine import closed_loop as engine_loop
    from benchmarks.traces import Order
    from contract.plan import parse
    from core.config import Settings
    from workers.build import build

    given = {"precision": "int8", "unet": str(unet)} if plan.model == H200.model else {}
    settings = Settings(model=plan.model, device=plan.device, compile=False, **given)  # type: ignore[arg-type]
    started, found = time.monotonic(), dict[str, Any]()
    with build(settings, measure_s=90.0 if plan.device == "cuda" else 2.0) as works:
        recorded, wanted = works.images.backend.graphs.counts
        found |= {"ready_s": round(time.monotonic() - started, 2), "graphs": f"{recorded} of {wanted}"}
        print(f"ready after {found['ready_s']} s, graphs {found['graphs']}", flush=True)
        for schedule in _SCHEDULES:
            order = Order(int(plan.size.split("x")[0]), plan.steps, parse(schedule))
            rate, seconds = engine_loop(works.engine, order, plan.engine_pictures, f"engine-{schedule}")
            found[f"deepcache {schedule}"] = {"pictures_per_s": round(rate, 3), "seconds": round(seconds, 2)}
            print(f"engine, deepcache {schedule}: {rate:.3f} pictures/s", flush=True)
    print(json.dumps(found), flush=True)


def emoji(bench: Bench) -> dict[str, Any]:
    """Run all variants at once, in separate processes: this stage does not measure time."""
    files, errors = {}, list[str]()
    drawn: dict[str, Any] = {}
    variants = [("fp32", "cpu"), ("int8", bench.plan.device)]
    if bench.plan.device == "cuda":
        variants.append(("bf16", "cuda"))

    def draw(precision: str, device: str) -> None:
        files[precision] = out = bench.folder / f"{precision}.npz"
        count = str(bench.plan.emoji_pictures)
        try:
            said = bench.run(
                "python -m",
                ["benchmarks.h200.fidelity", "draw", "--device", device, "--precision", precision,
                 "--pictures", count, "--out", str(out)],
            )  # fmt: skip
            drawn[precision] = json.loads(said.splitlines()[-1])
            print(f"  {precision} on {drawn[precision]['device']} by {drawn[precision]['executable']}", flush=True)
        except StageError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=draw, args=variant) for variant in variants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise StageError("; ".join(errors))
    from benchmarks.h200 import fidelity

    page = bench.results / "service-emoji-xl.png"
    found = fidelity.compare(files["fp32"], [file for name, file in files.items() if name != "fp32"], page)
    for name, figures in found.items():
        print(f"  {name} against fp32 on the CPU: {json.dumps(figures)}", flush=True)
    return {"drawn_by": drawn, "against_fp32": found, "sheet": page.name}


_RUN: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "quantize": quantize, "serve": serve, "warm": warm, "engine": engine, "emoji": emoji,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES), help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU")
    parser.add_argument("--work", type=Path, help="folder that is kept, such as for a quantized UNet of an earlier run")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/h200/results"))
    parser.add_argument("--name", default="service", help="of the file of results; default: %(default)s")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    plan = TINY if options.tiny else H200
    if options.engine is not None:
        _engine(plan, options.engine)
        return
    stages = options.stages.split(",")
    if unknown := set(stages) - set(STAGES):
        parser.error(f"--stages: {', '.join(sorted(unknown))} is none of {', '.join(STAGES)}")
    results: dict[str, Any] = {
        "model": plan.model,
        "size": plan.size,
        "steps": plan.steps,
        "guidance": 8.0,
        "stages": {},
    }
    with contextlib.ExitStack() as stack:
        folder = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diptych-service-")))
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(plan, folder.resolve(), options.results.resolve())
        record.writable(bench.results)
        for stage in stages:
            print(f"== {stage}", flush=True)
            began = time.monotonic()
            bench.until = began + plan.limits_s[stage]
            try:
                found = _RUN[stage](bench)
            except Exception as error:
                found = {"failed": f"{type(error).__name__}: {error}"}
                print(f"  FAILED {found['failed']}", flush=True)
            results["stages"][stage] = {**found, "stage_s": round(time.monotonic() - began, 1)}
            _keep(bench.results, results)
    _table(results["stages"])
    name = f"{options.name}-tiny" if options.tiny else options.name
    rooms = (*provenance.SERVICE, *(("models/emoji-xl",) if "emoji" in stages else ()))
    record.publish(name, results, bench.results, rooms=rooms, children=True)
    (bench.results / _PARTIAL).unlink(missing_ok=True)
    if any("failed" in found for found in results["stages"].values()):
        sys.exit(1)


def _keep(folder: Path, results: dict[str, Any]) -> None:
    """Write the results so far, in case the run is interrupted."""
    (folder / _PARTIAL).write_text(json.dumps(results, indent=2) + "\n")


def _table(stages: dict[str, Any]) -> None:
    served, alone = stages.get("serve", {}), stages.get("engine", {})
    rows = []
    for schedule in _SCHEDULES:
        name = f"deepcache {schedule}"
        over_http, own = served.get(name, {}), alone.get(name, {})
        rows.append(
            (name, *(str(over_http.get(key, "–")) for key in ("pictures_per_s", "p50_s", "p99_s")),
             str(own.get("pictures_per_s", "–")))
        )  # fmt: skip
    record.table("Over HTTP, and the engine's own", ("", "pictures/s", "p50 s", "p99 s", "engine pictures/s"), rows)
    graphs = (served.get("graphs") or [None])[-1]
    said = [
        ("cold, seconds to ready", served.get("cold_ready_s")),
        ("warm, seconds to ready", stages.get("warm", {}).get("ready_s")),
        ("graphs: after seconds, recorded, of how many", graphs and list(graphs.values())),
        ("pictures/s while they were recorded", served.get("while_recording", {}).get("pictures_per_s")),
        *((f"emoji-xl {name}: PSNR mean, median, min in dB",
           [figures[f"psnr_{k}_db"] for k in ("mean", "median", "min")])
          for name, figures in stages.get("emoji", {}).get("against_fp32", {}).items()),
        *((f"{name} failed", found["failed"]) for name, found in stages.items() if "failed" in found),
    ]  # fmt: skip
    record.table("The rest", ("", ""), [(name, str(value)) for name, value in said if value is not None])


if __name__ == "__main__":
    main()
