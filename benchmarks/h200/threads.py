"""Measures images per second over HTTP of one worker for each GPU, by the CPU threads that each worker takes.

    python -m benchmarks.h200.threads [--before checkout] [--results folder] [--tiny]

Redis, the API and `diptych worker --each-gpu` run as in production; clients in a closed loop request images of the
seeded stand-in of SDXL in INT8, quantized first by the command. Two ways to draw are measured for each number of
threads: `half`, 20 steps with guidance and DeepCache in every second one, and `four`, 4 steps without guidance. The
numbers are the default, and the same number given by `--threads`. `--before` names a checkout of the project, such as
`git worktree add ../before 6c1abc8` makes, whose service is measured first, with both: up to that commit a GPU worker
took torch's default of one thread per core.

`--tiny` tests all of it within a minute on a CPU with two workers; its measurements have no meaning.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import provenance, record
from benchmarks.h200.clients import Client, closed_loop
from core.jobs.cards import WorkerCard
from core.jobs.registry import Registry
from core.threads import GPU_THREADS
from deployment.devices import NoDevices, visible
from deployment.redis import RedisServer, free_port

_ROOT = provenance.ROOT
_PARTIAL = "threads-partial.json"  # cases so far, in case the run is interrupted
_POLL_S = 0.25
_STOP_S = 30.0


@dataclass(frozen=True)
class Plan:
    """What is drawn, and for how long."""

    model: str
    size: str
    clients: int  # of each worker
    prompts: int  # for calibration, which does not change speed
    ramp_s: float
    window_s: float
    ready_s: float
    graphs_s: float  # the longest to wait for the last graph
    worker_options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def modes(self) -> dict[str, dict[str, Any]]:
        """Fields of a request, by the name of the way to draw."""
        half = {"steps": 20, "guidance_scale": 8.0, "deepcache": {"interval": 2, "depth": "resnet"}}
        four = {"steps": 4, "guidance_scale": 1.0, "deepcache": "off"}
        return {name: {"size": self.size, **fields} for name, fields in (("half", half), ("four", four))}


GPU = Plan(
    model="random:sdxl", size="1024x1024", clients=24, prompts=2, ramp_s=6.0, window_s=10.0, ready_s=150.0,
    graphs_s=40.0,
)  # fmt: skip
TINY = replace(
    GPU, model="random:tiny", size="32x32", clients=2, ramp_s=3.0, window_s=5.0, graphs_s=0.0,
    environment={"DIPTYCH_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "0,1", "DIPTYCH_COMPILE": "false"},
)  # fmt: skip


class BenchFailure(RuntimeError):
    """A part of the service did not do what is measured. The message says which, with the end of its log."""


@dataclass(eq=False)
class Part:
    """A process of the service; its output goes to a log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise `BenchFailure` if it has ended."""
        if self.process.poll() is not None:
            raise BenchFailure(f"{self.name} ended with {self.process.returncode}: {self.tail()}")

    def tail(self) -> str:
        return " | ".join(self.log.read_text("utf-8", "replace").strip().splitlines()[-8:])[-1500:]

    def cpu_s(self) -> dict[int, float]:
        """CPU seconds so far of each child process, or of the process itself where it has none."""
        own = psutil.Process(self.process.pid)
        found = {}
        for process in own.children() or [own]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
        return found

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def run(plan: Plan, folder: Path, results: Path, before: Path | None) -> dict[str, Any]:
    """Measure every number of threads, one service after the other."""
    environment = _environment(plan, folder)
    gpus = visible(environment)
    unet = _quantized(plan, folder, environment)
    numbers: dict[str, list[str]] = {"default": [], f"--threads {GPU_THREADS}": ["--threads", str(GPU_THREADS)]}
    found: dict[str, Any] = {}
    for root in (*([before] if before else []), _ROOT):
        for name, options in numbers.items():
            case = name if root is _ROOT else f"before, {name}"
            print(f"== {case}", flush=True)
            found[case] = _case(plan, folder, environment | _path(root), root, [*unet, *options], len(gpus))
            (results / _PARTIAL).write_text(json.dumps(found, indent=1))
    return {"workers": len(gpus), "torch_default_threads": _torch_threads(), "modes": plan.modes(), "threads": found}


def _environment(plan: Plan, folder: Path) -> dict[str, str]:
    """The user's environment without its settings and limits of threads, and caches that only this run uses."""
    dropped = ("DIPTYCH_", "OMP_", "GOMP_", "MKL_NUM", "OPENBLAS_NUM", "RAYON_NUM")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {
        **_path(_ROOT),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "DIPTYCH_CACHE_DIR": str(folder / "cache"),
        "DIPTYCH_DATA_DIR": str(folder / "data"),
        "DIPTYCH_MODEL": plan.model,
        "DIPTYCH_TEXT_MODEL": "off",
        "DIPTYCH_RATE": "",
        "DIPTYCH_KEY_QUEUED": "",
        "DIPTYCH_DRAIN_S": "1",
        **plan.environment,
    }


def _path(root: Path) -> dict[str, str]:
    """The variable by which processes import the project from this checkout."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}


def _quantized(plan: Plan, folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Options that name the quantized UNet, after making it; none for the tiny model, which has no such variant."""
    if plan.model != GPU.model:
        return []
    file, out = folder / "prompts.txt", folder / "quantized"
    file.write_text("".join(f"picture {number} of a red boat on a lake\n" for number in range(plan.prompts)))
    started = time.monotonic()
    command = ["quantize", "--model", plan.model, "--prompts", str(file), "-o", str(out)]
    subprocess.run([sys.executable, "-P", "-m", "cli", *command], env=dict(environment), cwd=_ROOT, check=True)
    print(f"quantized in {time.monotonic() - started:.1f} s", flush=True)
    return ["--precision", "int8", "--unet", str(out / "unet-int8")]


def _case(
    plan: Plan, folder: Path, environment: Mapping[str, str], root: Path, options: Sequence[str], workers: int
) -> dict[str, Any]:
    """One service with these worker options: how long it took to get ready, and each way to draw in a window."""
    started = time.monotonic()
    with _service(folder, environment, root, options) as (url, registry, api, parts):
        cards = _ready(plan, registry, (api, parts), workers)
        ready_s = time.monotonic() - started
        client = Client(url)
        for mode in plan.modes().values():
            client.draw(**mode, seed=0, prompt="a warm cup of tea")
        client.close()
        _recorded(plan, registry)
        found: dict[str, Any] = {"ready_s": round(ready_s, 1), "threads": [card.threads for card in cards]}
        lines = parts.log.read_text("utf-8", "replace").splitlines()
        found["said"] = sorted({line for line in lines if "CPU threads" in line})
        for name, mode in plan.modes().items():
            found[name] = _window(plan, url, mode, (api, parts), workers)
            print(f"  {name}: {json.dumps(found[name])}", flush=True)
    return found


@contextlib.contextmanager
def _service(
    folder: Path, environment: Mapping[str, str], root: Path, options: Sequence[str]
) -> Iterator[tuple[str, Registry, Part, Part]]:
    """A service of its own Redis, API and workers, which ends with the context; yields its URL and parts."""
    with tempfile.TemporaryDirectory(dir=folder) as own, contextlib.ExitStack() as stack:
        redis = RedisServer(Path(own) / "redis", tied=True)
        redis.start()
        stack.callback(redis.stop)
        port = free_port()
        given = {
            **environment,
            "DIPTYCH_REDIS_URL": redis.url,
            "DIPTYCH_ARTIFACTS_URL": (Path(own) / "artifacts").as_uri(),
        }
        (Path(own) / "artifacts").mkdir()

        def start(name: str, *words: str) -> Part:
            log = folder / f"{name}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "cli", *words], env=given, cwd=root, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output,
                )  # fmt: skip
            part = Part(name, process, log)
            stack.callback(part.stop)
            return part

        registry = Registry(redis.url)
        stack.callback(registry.close)
        workers = start("worker", "worker", "--each-gpu", *options)
        api = start("api", "api", "--port", str(port))
        yield f"http://127.0.0.1:{port}", registry, api, workers


def _ready(plan: Plan, registry: Registry, parts: tuple[Part, Part], workers: int) -> list[WorkerCard]:
    """Wait until all workers are ready; returns their cards."""
    until = time.monotonic() + plan.ready_s
    while True:
        for part in parts:
            part.check()
        cards = [card for card in registry.workers() if card.state == "ready"]
        if len(cards) == workers:
            time.sleep(1.0)  # the API reads cards once a second
            return cards
        if time.monotonic() > until:
            raise BenchFailure(f"{len(cards)} of {workers} workers were ready in time: {parts[1].tail()}")
        time.sleep(_POLL_S)


def _recorded(plan: Plan, registry: Registry) -> None:
    """Wait until every worker has recorded all of its CUDA graphs, without traffic, at most `graphs_s`."""
    until = time.monotonic() + plan.graphs_s
    counts: list[dict[str, int]] = []
    while time.monotonic() < until:
        counts = [getattr(model, "graphs", {}) for card in registry.workers() for model in card.models]
        if all(count.get("recorded", 0) >= count.get("wanted", 0) > 0 for count in counts):
            break
        time.sleep(_POLL_S)
    print(f"  graphs: {counts}", flush=True)


def _window(plan: Plan, url: str, mode: dict[str, Any], parts: tuple[Part, Part], workers: int) -> dict[str, Any]:
    """A closed loop of clients: images per second, latencies, and CPU use of workers and API in percent of a core."""
    with closed_loop(url, plan.clients * workers, mode) as load:
        time.sleep(plan.ramp_s)
        begin, before = time.monotonic(), [part.cpu_s() for part in parts]
        time.sleep(plan.window_s)
        end, after = time.monotonic(), [part.cpu_s() for part in parts]
    for part in parts:
        part.check()
    if load.errors:
        raise BenchFailure(f"{len(load.errors)} clients got no image: {load.errors[0]}")
    used = [
        [round(100 * (later[pid] - earlier.get(pid, 0.0)) / (end - begin)) for pid in later]
        for earlier, later in zip(before, after, strict=True)
    ]
    return {**load.window(begin, end), "api_cpu_percent": used[0], "worker_cpu_percent": used[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="measure this checkout's service first")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/h200/results"))
    options = parser.parse_args()
    plan = TINY if options.tiny else GPU
    record.writable(options.results.resolve())
    with tempfile.TemporaryDirectory(prefix="diptych-threads-") as name:
        folder = Path(name)
        try:
            found = run(plan, folder, options.results, options.before and options.before.resolve())
        except (BenchFailure, NoDevices, subprocess.CalledProcessError) as error:
            print(f"failed: {error}", file=sys.stderr)
            for kept in folder.glob("*.log"):
                shutil.copy(kept, options.results / kept.name)
            return 1
    _table(found)
    (options.results / _PARTIAL).unlink(missing_ok=True)
    result = {"model": plan.model, "clients": plan.clients * found["workers"], "window_s": plan.window_s, **found}
    file = "threads-tiny" if options.tiny else "threads"
    record.publish(file, result, options.results, rooms=provenance.SERVICE, children=True)
    return 0


def _torch_threads() -> int:
    """The number of threads that torch takes here by itself, asked of a process of its own."""
    limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in limits}
    code = "import torch; print(torch.get_num_threads())"
    return int(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)


def _table(found: dict[str, Any]) -> None:
    rows = [
        (name, mode, f"{case[mode]['pictures_per_s']:.2f}", f"{case[mode].get('p99_s', 0.0):.2f}",
         ", ".join(f"{percent}%" for percent in case[mode]["worker_cpu_percent"]))
        for name, case in found["threads"].items() for mode in found["modes"]
    ]  # fmt: skip
    record.table("Over HTTP", ("threads", "mode", "pictures/s", "p99 s", "CPU of each worker"), rows)


if __name__ == "__main__":
    sys.exit(main())
