"""Runs the service for a benchmark: plan, working folder, commands, and `diptych serve` itself."""

from __future__ import annotations

import contextlib
import os
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.h200.clients import Client, ClientError

_ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.1
_STOP_S = 40.0
_MODULES = {"diptych": ["cli"], "python -m": []}


@dataclass(frozen=True)
class Plan:
    """What to measure, and for how long. Limits apply to whole stages."""

    model: str
    device: str
    prompts: int
    clients: int
    size: str
    steps: int
    recording_s: float  # traffic right after a cold start, while graphs are recorded
    window_s: float
    ramp_s: float  # before a window, for batches to fill
    alone: int  # pictures of one client alone
    engine_pictures: int
    emoji_pictures: int
    limits_s: dict[str, float] = field(default_factory=dict)

    @property
    def wanted(self) -> dict[str, Any]:
        return {"size": self.size, "steps": self.steps, "guidance_scale": 8.0}


H200 = Plan(
    model="random:sdxl", device="cuda", prompts=64, clients=24, size="1024x1024", steps=20, recording_s=30.0,
    window_s=40.0, ramp_s=6.0, alone=4, engine_pictures=32, emoji_pictures=64,
    limits_s={"quantize": 150, "serve": 330, "warm": 100, "engine": 150, "emoji": 120},
)  # fmt: skip
TINY = Plan(
    model="random:tiny", device="cpu", prompts=4, clients=3, size="32x32", steps=4, recording_s=2.0, window_s=3.0,
    ramp_s=1.0, alone=2, engine_pictures=8, emoji_pictures=4,
    limits_s={"quantize": 300, "serve": 300, "warm": 300, "engine": 300, "emoji": 300},
)  # fmt: skip


class StageError(RuntimeError):
    """A stage failed. The message has the reason."""


@dataclass
class Bench:
    """One run: its folder, and the deadline of the current stage."""

    plan: Plan
    folder: Path
    results: Path
    until: float = 0.0

    @property
    def unet(self) -> Path:
        return self.folder / "quantized" / "unet-int8"

    @property
    def environment(self) -> dict[str, str]:
        """The user's environment with caches that only this run uses."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DIPTYCH_", "TRITON_CACHE", "TORCHINDUCTOR"))}
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        found = {"HOME": str(home), "PYTHONUSERBASE": site.getuserbase(), "PYTHONPATH": path}
        return kept | found | {"DIPTYCH_DEVICE": self.plan.device}

    @property
    def left_s(self) -> float:
        return max(1.0, self.until - time.monotonic())

    def run(self, name: str, command: Sequence[str]) -> str:
        """Run `diptych` or `python -m` within the stage's time limit; returns stdout. Raises `StageError`."""
        print(f"$ {name} {' '.join(command)}", flush=True)
        try:
            ended = subprocess.run(
                [sys.executable, "-P", "-m", *_MODULES[name], *command], env=self.environment, capture_output=True,
                text=True, timeout=self.left_s, cwd=_ROOT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise StageError(f"{name} was not done in time; it said: {_tail(error.stderr)}") from None
        if ended.returncode:
            raise StageError(f"{name} ended with {ended.returncode}: {_tail(ended.stderr)}")
        return ended.stdout


class Service:
    """`diptych serve` in a separate process, with its own Redis; its log goes to a file."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        with contextlib.closing(_socket()) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = bench.folder / "serve.log"
        command = ["serve", "--port", str(self.port), "--data", str(bench.folder / "data"), "--model", bench.plan.model]
        if bench.plan.model == H200.model:
            command += ["--precision", "int8", "--unet", str(bench.unet)]
        print(f"$ diptych {' '.join(command)}", flush=True)
        self.started = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cli", *command], env=bench.environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, cwd=_ROOT,
            )  # fmt: skip
        self.client = Client(self.url)

    def ready(self) -> float:
        """Wait for `/readyz`; returns the seconds since the start. Raises `StageError`."""
        while True:
            if self._process.poll() is not None:
                raise StageError(f"diptych serve ended with {self._process.returncode}: {self.tail()}")
            if time.monotonic() > self.bench.until:
                raise StageError(f"the service was not ready in time: {self.tail()}")
            with contextlib.suppress(OSError):
                if self.client.ask("GET", "/readyz")[0] == 200:
                    return round(time.monotonic() - self.started, 2)
            self.client.close()
            time.sleep(POLL_S)

    def tail(self) -> str:
        return _tail(self.log.read_text(errors="replace"))

    def said(self, *words: str) -> list[str]:
        """Lines of the log that contain one of the words."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if any(word in line for word in words)]

    def stop(self) -> float:
        """Send SIGINT, like Ctrl-C; returns the seconds until the process has ended, with any exit code."""
        began = time.monotonic()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.client.close()
        return round(time.monotonic() - began, 2)


@contextlib.contextmanager
def service(bench: Bench) -> Iterator[Service]:
    made = Service(bench)
    try:
        yield made
    finally:
        made.stop()


class GraphWatch:
    """Context: polls the number of recorded graphs every second. Times are seconds since the process's start."""

    def __init__(self, on: Service) -> None:
        self._on, self._end = on, threading.Event()
        self._name = on.bench.plan.model
        self.seen: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> GraphWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def complete(self) -> bool:
        last = self.seen[-1] if self.seen else {}
        return bool(last) and last["recorded"] >= last["wanted"]

    def _run(self) -> None:
        client = Client(self._on.url)
        while not self._end.wait(1.0):
            with contextlib.suppress(ClientError, OSError):
                found = client.graphs(self._name)
                entry = {"at_s": round(time.monotonic() - self._on.started, 1), **found}
                if found and (not self.seen or found != {k: self.seen[-1][k] for k in found}):
                    self.seen.append(entry)
                    print(
                        f"  graphs recorded {found['recorded']} of {found['wanted']} after {entry['at_s']} s",
                        flush=True,
                    )
        client.close()


def _socket() -> socket.socket:
    """A socket on a free port of this machine."""
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    return made


def _tail(text: str | bytes | None) -> str:
    """The last lines, as one."""
    words = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
    return " | ".join(words.strip().splitlines()[-6:])[-1200:]
