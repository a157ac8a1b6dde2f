"""Measures images per second of one model with one more optimization per rung, each rung in a process of its own.

The first rung is the stock pipeline at its best: threads, processes side by side, batches, memory format, precision and
torch's compiler are tried shortly, and the fastest is taken. All rungs are prepared first; then they take turns, and a
process that has not its turn is stopped. It measures only speed; `lab.bench.ways` measures quality.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from core.config import Settings
from core.threads import cores
from lab.bench.harness import provenance, record
from lab.bench.rungs import ENGINE, IN_FLIGHT, RUNGS, STOCK, LeftOut, Variant, first_request
from pipeline.checkpoints.load import defaults_of

LIMIT_S = 300.0  # for torch's compiler
_PREPARED_S = 300.0  # for anything else
_ROUND = 32  # images of each rung at least before it is the next one's turn: drift of the machine meets all alike
_TURN_S, _MOST_ROUNDS = 4.0, 16  # a fast rung's turn has more: its first and last images are in few's company
_WARM = 8  # images before a rung's first turn
BATCHES = (4, 8, 16)  # of a pipeline that draws batches, beside single images
_GAIN = 1.03  # that a variant must bring to be taken
NATIVE, AVX2 = "native", "avx2"
_COMMAND = (sys.executable, "-m", "lab.bench.rungs")


class Process:
    """A rung's process, which answers requests one after the other, and is stopped in between if asked to be."""

    def __init__(
        self, request: Mapping[str, Any], environment: Mapping[str, str], command: Sequence[str] = _COMMAND
    ) -> None:
        """Start it; its first `answer` says what was prepared."""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=dict(environment), cwd=provenance.ROOT, start_new_session=True,
        )  # fmt: skip
        self._rest = b""
        self.send(request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it with the compilers that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def ask(self, request: Mapping[str, Any], limit_s: float = _PREPARED_S) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises `LeftOut`."""
        self.send(request)
        return self.answer(limit_s)

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request without waiting for its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the missing answer tells
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, limit_s: float = _PREPARED_S) -> dict[str, Any]:
        """The answer to the last request. Raises `LeftOut` if the rung cannot be measured, or after `limit_s`."""
        stream = self._process.stdout
        assert stream is not None
        until = time.monotonic() + limit_s
        with selectors.DefaultSelector() as ready:
            ready.register(stream, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise LeftOut(f"took more than {limit_s:g} s")
                data = os.read(stream.fileno(), 65536)
                if not data:
                    raise LeftOut(f"its process ended (exit code {self._process.wait()})")
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "left_out" in answer:
            raise LeftOut(answer["left_out"])
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Suspend it and all that it started, or let it go on; returns when a suspended one no longer runs."""
        os.killpg(self._process.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


class Contender:
    """The processes of one rung, which share each turn's images. They run in their turns only."""

    def __init__(self, processes: Sequence[Process], description: Mapping[str, Any]) -> None:
        self._processes = processes
        self.processes = len(processes)
        self.description = description
        self.imported: set[str] = set()

    def rate(self, first: int, count: int) -> float:
        """Images per second of so many images, from the first request until the last process is done."""
        return count / self.draw(first, count)[0]

    def draw(self, first: int, count: int) -> tuple[float, list[list[float]]]:
        """Draw so many images; returns the seconds, and each process's ends of images, in seconds from its start."""
        parts = [count // len(self._processes)] * len(self._processes)
        parts[0] += count - sum(parts)
        requests = []
        for part in parts:
            requests.append({"first": first, "count": part})
            first += part
        return self._ask(requests)

    def draw_prompts(self, prompts: Sequence[str], seeds: Sequence[int], folder: Path) -> None:
        """Draw an image of each prompt, into a file of this folder that is named by its seed."""
        every = len(self._processes)
        self._ask(
            {"prompts": prompts[number::every], "seeds": seeds[number::every], "folder": str(folder.resolve())}
            for number in range(every)
        )

    def _ask(self, requests: Iterable[Mapping[str, Any]]) -> tuple[float, list[list[float]]]:
        started = time.perf_counter()
        for process, request in zip(self._processes, requests, strict=True):
            process.signal(signal.SIGCONT)
            process.send(request)
        answers = [process.answer(10 * _PREPARED_S) for process in self._processes]
        seconds = time.perf_counter() - started
        for process in self._processes:
            process.signal(signal.SIGSTOP)
        self.imported.update(*(answer["imported"] for answer in answers))
        return seconds, [answer["ends"] for answer in answers]


class Turns:
    """Runs turns of `_ROUND` images of each rung, or of about `_TURN_S` where these are more, and prints each rate."""

    def __init__(self, count: int) -> None:
        self._count = max(1, count)
        self._contenders: dict[str, tuple[Contender, int]] = {}  # with the images of a turn
        self._number = 0

    def add(self, name: str, contender: Contender) -> None:
        """Warm a rung up."""
        record.progress(f"warming up {name}")
        rate = self._measured(contender, _WARM * contender.processes)
        images = _ROUND * min(_MOST_ROUNDS, max(1, round(_TURN_S * rate / _ROUND)))
        self._contenders[name] = contender, images

    def run(self) -> dict[str, tuple[float, float, float]]:
        """Run all turns, alternating; returns each rung's (median, lowest, highest) images per second."""
        rates: dict[str, list[float]] = {name: [] for name in self._contenders}
        for turn in range(1, self._count + 1):
            for name, (contender, images) in self._contenders.items():
                rates[name].append(self._measured(contender, images))
                record.progress(f"turn {turn} of {self._count}: {name} {rates[name][-1]:.3f} pictures/s")
        return {name: (statistics.median(rates_of), min(rates_of), max(rates_of)) for name, rates_of in rates.items()}

    def _measured(self, contender: Contender, count: int) -> float:
        self._number += count
        return contender.rate(self._number - count, count)


Start = Callable[[Variant, ExitStack], Process]
"""Starts a prepared process of a variant, which ends with the stack. Raises `LeftOut`."""


@dataclass(frozen=True)
class Ladder:
    """The settings and processes that all rungs share."""

    settings: Settings
    steps: int
    student: str | None
    environment: Mapping[str, str]
    compile_limit_s: float

    def start(self, name: str, stack: ExitStack, variant: Variant | None = None) -> tuple[Process, dict[str, Any]]:
        """A rung's process and what it says once it is prepared. Raises `LeftOut`; then it has ended."""
        threads = variant.threads if variant is not None else self.settings.threads
        environment = {**self.environment, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        request = first_request(name, self.settings, self.steps, self.student, variant)
        with ExitStack() as starting:
            process = starting.enter_context(Process(request, environment))
            compiles = name in ENGINE and ENGINE[name].compile
            try:
                description = process.answer(self.compile_limit_s + _PREPARED_S if compiles else _PREPARED_S)
            except LeftOut as error:
                raise LeftOut(f"torch.compile {error}" if compiles and "took" in str(error) else str(error)) from None
            stack.push(starting.pop_all())
        return process, description


class BestVariant:
    """Finds how a pipeline draws fastest, by short trials: one change of its variant after the other, in this order."""

    def __init__(self, start: Start, changes: Sequence[Mapping[str, Any]], first: Variant) -> None:
        """`first` has all threads of the machine."""
        self._start = start
        self._changes = changes
        self._first = first
        self.trials: list[dict[str, Any]] = []
        self._number = 10**6

    def find(self, *, processes: bool = True, compile_limit_s: float = 0.0) -> tuple[Variant, int]:
        """The fastest variant, and in how many processes. Raises `LeftOut` if there is no such pipeline.

        Without `processes` it is one process with all threads, as one client has them for itself.
        """
        best, seen = self._first, {self._first}
        with ExitStack() as stack:
            process = self._start(best, stack)
            rate = self._tried([process], best)
            for change in self._changes:
                other = replace(best, **change)
                if other in seen:  # a change is repeated after others, which may have made it worth it
                    continue
                seen.add(other)
                limit_s = compile_limit_s if other.compile else _PREPARED_S
                try:
                    best, rate = self._better(process, best, rate, other, limit_s)
                except LeftOut as error:
                    self._note({"variant": asdict(other), "left_out": str(error)})
                    stack.close()  # it has ended, or still works on that variant
                    process = self._start(best, stack)
        count = self._first.threads
        if count == 1 or not processes:
            return best, 1
        alone = best.side_by_side()
        with ExitStack() as stack:
            try:
                started = [self._start(alone, stack) for _ in range(count)]
                if self._tried(started, alone, compile_limit_s + _PREPARED_S) > _GAIN * rate:
                    return alone, count
            except LeftOut as error:
                self._note({"variant": asdict(alone), "processes": count, "left_out": str(error)})
        return best, 1

    def _better(
        self, process: Process, best: Variant, rate: float, other: Variant, limit_s: float
    ) -> tuple[Variant, float]:
        process.ask({"variant": asdict(other)})
        tried = self._tried([process], other, limit_s)
        if tried > _GAIN * rate:
            return other, tried
        process.ask({"variant": asdict(best)})
        return best, rate

    def _tried(self, processes: Sequence[Process], variant: Variant, limit_s: float = _PREPARED_S) -> float:
        """Images per second of one batch in each process, after one image that warms up."""
        warm, count = variant.batch if variant.compile else 1, max(4, variant.batch)
        for images in (warm, count):
            started = time.perf_counter()
            for process in processes:
                process.send({"first": self._number, "count": images})
                self._number += images
            for process in processes:
                process.answer(limit_s)
            seconds = time.perf_counter() - started
        rate = count * len(processes) / seconds
        self._note({"variant": asdict(variant), "processes": len(processes), "images_per_s": round(rate, 4)})
        return rate

    def _note(self, trial: dict[str, Any]) -> None:
        self.trials.append(trial)
        record.progress(f"trial: {json.dumps(trial)}")


def best_stock(ladder: Ladder, *, alone: bool = False) -> tuple[Variant, int, list[dict[str, Any]]]:
    """The stock pipeline's fastest variant, in how many processes, and all trials. Raises `LeftOut` if there is none.

    `alone` is for one image at a time.
    """
    from core.graphs import compiler

    limit_s = ladder.compile_limit_s if compiler() is not None else 0.0
    batches: list[dict[str, Any]] = [{"batch": batch} for batch in BATCHES if not alone]
    changes: list[dict[str, Any]] = [
        *batches, {"channels_last": True}, {"bf16": True}, {"channels_last": True}, *batches,
        *([{"compile": True}, *batches] if limit_s > 0 else []),
    ]  # fmt: skip
    search = BestVariant(
        lambda variant, stack: ladder.start(STOCK, stack, variant)[0], changes,
        Variant(threads=ladder.settings.threads or cores()),
    )  # fmt: skip
    variant, count = search.find(processes=not alone, compile_limit_s=limit_s)
    return variant, count, search.trials


def run(
    settings: Settings,
    *,
    steps: int,
    pictures: int,
    results: Path | None,
    rungs: Sequence[str] = RUNGS,
    student: str | None = None,
    compile_limit_s: float = LIMIT_S,
    instructions: str = NATIVE,
) -> dict[str, Any]:
    """Measure the rungs in turns of at least `_ROUND` images, at least `pictures` of each; report the median turn.

    A rung that cannot run here, or that torch.compile does not compile within `compile_limit_s`, is left out, with the
    reason. `student` is the model of the rungs that draw with one; default: the model's own name and "-turbo".
    `instructions` limit torch, its libraries and our kernels to AVX2.
    """
    unknown = [name for name in rungs if name not in RUNGS]
    if unknown:
        raise record.BenchError(f"--rungs: there is no {', '.join(unknown)}; there are {', '.join(RUNGS)}")
    ladder = Ladder(settings, steps, student, environment_of(settings, instructions), compile_limit_s)
    turns = Turns(-(-pictures // _ROUND))
    with record.alone(), ExitStack() as stack:
        contenders, stock, left_out = _prepared(ladder, rungs, turns, stack)
        measured = turns.run()
    result = {
        "rungs": _rows(settings, steps, measured, contenders),
        "left_out": left_out,
        "stock": stock,
        "capability": next(iter(contenders.values())).description["capability"],
        "model": Path(settings.model_name).name,
        "steps": steps,
        "pictures": -(-pictures // _ROUND) * _ROUND,
        "in_flight": IN_FLIGHT,
    }
    imported = set[str]().union(*(contender.imported for contender in contenders.values()))
    file = "ladder" if instructions == NATIVE else f"ladder-{instructions}"
    artifacts = (*provenance.EMOJI_XL, "models/emoji-xl-turbo")
    return record.publish(file, result, results, artifacts=artifacts, imported=imported)


def _prepared(
    ladder: Ladder, rungs: Sequence[str], turns: Turns, stack: ExitStack
) -> tuple[dict[str, Contender], dict[str, Any], dict[str, str]]:
    """The rungs' processes, warmed up and stopped; how the stock pipeline is best; and why rungs are left out.

    Raises `BenchError` if all are.
    """
    contenders: dict[str, Contender] = {}
    stock: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in rungs:
        record.progress(f"preparing {name}")
        try:
            if name == STOCK:
                variant, count, trials = best_stock(ladder)
                stock = {"best": asdict(variant), "processes": count, "trials": trials}
                started = [ladder.start(name, stack, variant) for _ in range(count)]
            else:
                started = [ladder.start(name, stack)]
            contender = Contender([process for process, _ in started], started[0][1])
            turns.add(name, contender)
            contenders[name] = contender
        except LeftOut as error:
            left_out[name] = str(error)
            record.progress(f"{name} is left out: {error}")
    if not contenders:
        raise record.BenchError(f"no rung can be measured here: {left_out}")
    return contenders, stock, left_out


def environment_of(settings: Settings, instructions: str = NATIVE) -> dict[str, str]:
    """The environment of the rungs' processes, without this project's settings, which are given to each."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
    path = os.pathsep.join(filter(None, (str(provenance.ROOT), environment.get("PYTHONPATH"))))
    environment["PYTHONPATH"] = path
    if instructions == NATIVE:
        return environment
    compiler = settings.compiled_code.expanduser() / "avx2" / "c++"
    compiler.parent.mkdir(parents=True, exist_ok=True)
    path = next(filter(None, map(shutil.which, (environment.get("CXX", ""), "g++", "clang++"))), "no-compiler")
    compiler.write_text(f'#!/bin/sh\nexec {path} -mno-avx512f "$@"\n')
    compiler.chmod(0o755)
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    return environment | limits | {"CXX": str(compiler)}


def _rows(
    settings: Settings, steps: int, measured: Mapping[str, tuple[float, float, float]],
    contenders: Mapping[str, Contender],
) -> list[dict[str, Any]]:  # fmt: skip
    """The rungs as recorded and printed."""
    first, defaults = next(iter(measured.values())), defaults_of(settings.model_name, settings.variant)
    guided = defaults.rows(defaults.guidance_scale) > 1
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "images_per_s": round(rate, 4),
            "speedup": round(rate / first[0], 3),
            "spread": [round(value, 4) for value in (low, high)],
            **{key: value for key, value in contenders[name].description.items() if key != "capability"},
        }
        for name, (rate, low, high) in measured.items()
    ]
    lines = [
        (row["name"], f"{row['images_per_s']:.3f}", f"{row['speedup']:.2f}×", "{:.3f} to {:.3f}".format(*row["spread"]))
        for row in rows
    ]
    title = f"{Path(settings.model_name).name}, {steps} steps, {'with' if guided else 'without'} guidance"
    record.table(title, ("rung", "pictures/s", "speedup", "lowest to highest"), lines)
    return rows
