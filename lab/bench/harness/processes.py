"""Runs contenders in processes of their own, which are stopped while others have their turn."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from lab.bench.harness import provenance
from lab.bench.harness.turns import LeftOut

PREPARED_S = 300.0  # for anything but torch's compiler


class AnsweringProcess:
    """A process that answers requests, lines of JSON, one after the other, and is stopped in between if asked to be."""

    def __init__(self, request: Mapping[str, Any], environment: Mapping[str, str], command: Sequence[str]) -> None:
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

    def ask(self, request: Mapping[str, Any], limit_s: float = PREPARED_S) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises `LeftOut`."""
        self.send(request)
        return self.answer(limit_s)

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request without waiting for its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the missing answer tells
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, limit_s: float = PREPARED_S) -> dict[str, Any]:
        """The answer to the last request. Raises `LeftOut` if that says why it cannot, or after `limit_s`."""
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


class ProcessGroup:
    """A contender of several processes, which share the images of each turn. They run in their turns only."""

    def __init__(self, processes: Sequence[AnsweringProcess], description: Mapping[str, Any]) -> None:
        self._processes = processes
        self.processes = len(processes)
        self.description = description
        self.imported: set[str] = set()

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
        answers = [process.answer(10 * PREPARED_S) for process in self._processes]
        seconds = time.perf_counter() - started
        for process in self._processes:
            process.signal(signal.SIGSTOP)
        self.imported.update(*(answer["imported"] for answer in answers))
        return seconds, [answer["ends"] for answer in answers]
