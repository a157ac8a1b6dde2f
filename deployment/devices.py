"""Runs one worker per GPU of this machine, as children of one process, until stopped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from core.config import Settings
from deployment.children import Backoff, ChildProcess, reason
from deployment.screen import StatusDisplay
from deployment.signals import StopSignals

_LOOK_S = 0.1
_HAND_BACK_S = 15.0  # beyond drain_s, as in serve.py
_UNUSABLE = 2


class NoDevices(ValueError):
    """An error: there is no GPU to start a worker for."""


def visible_gpus(environment: Mapping[str, str], probe: Callable[[], str] | None = None) -> list[str]:
    """The GPUs that a process here may use, as CUDA_VISIBLE_DEVICES names them. Raises `NoDevices`.

    `probe` is what `nvidia-smi -L` prints, one line per GPU.
    """
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    if setting is not None:
        devices = [name.strip() for name in setting.split(",") if name.strip()]
        devices = (
            devices[: devices.index("-1")] if "-1" in devices else devices
        )  # as CUDA reads it: devices after -1 are hidden
    else:
        listing = (probe or _listed)()
        devices = [str(k) for k, _ in enumerate(line for line in listing.splitlines() if line.startswith("GPU "))]
    if not devices:
        raise NoDevices("no GPU is visible here (nvidia-smi -L lists none, or CUDA_VISIBLE_DEVICES is empty)")
    return devices


def expects_gpu(device: str, environment: Mapping[str, str]) -> bool:
    """Return whether a worker of this device setting will run on a GPU, as far as is known before torch is imported."""
    if device != "auto":
        return device != "cpu"
    try:
        if metadata.version("torch").endswith("+cpu"):
            return False
        return bool(visible_gpus(environment))
    except (metadata.PackageNotFoundError, NoDevices):
        return False


def _listed() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        return subprocess.run([command, "-L"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def serve_each(
    settings: Settings, *, devices: Sequence[str] | None = None, command: Sequence[str] | None = None
) -> int:
    """Run a worker for each device until a signal comes; returns the exit code. Raises `NoDevices`.

    A worker that ends is restarted, as by `diptych serve`; one whose input can never work (exit code 2) ends all.
    `command` runs one worker, which gets its device in CUDA_VISIBLE_DEVICES.
    """
    devices = visible_gpus(os.environ) if devices is None else devices
    command = command or [sys.executable, "-P", "-m", "cli", "worker"]
    logs = Path(tempfile.mkdtemp(prefix="diptych-workers-"))  # private, under an unpredictable name
    with StopSignals() as stop, StatusDisplay() as screen:
        parts = [
            (ChildProcess(f"worker {k}", command, _environment(settings, k, device), logs / f"{k}.log"), Backoff())
            for k, device in enumerate(devices)
        ]
        code = 0
        try:
            for child, _ in parts:
                child.start()
            while not stop.asked and code == 0:
                for child, backoff in parts:
                    code = code or _look(child, backoff, screen)
                time.sleep(_LOOK_S)
            return code or stop.exit_code
        finally:
            _end([child for child, _ in parts], stop, screen, settings.drain_s + _HAND_BACK_S)


def _environment(settings: Settings, k: int, device: str) -> dict[str, str]:
    """The k-th worker's environment: its device, and its own metrics port, counted up from the configured one."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
    if settings.metrics:
        host, _, port = settings.metrics.rpartition(":")
        environment["DIPTYCH_METRICS"] = f"{host}:{int(port) + k}"
    return environment


def _look(child: ChildProcess, backoff: Backoff, screen: StatusDisplay) -> int:
    """Print its output, and restart it when due; `_UNUSABLE` if it can never work."""
    _hear(child, screen)
    now = time.monotonic()
    if backoff.due is not None:
        if now >= backoff.due:
            child.start()
            backoff.begun(now)
    elif child.code is not None:
        if child.code == _UNUSABLE:
            return _UNUSABLE
        words = f"{child.name} ended ({reason(child.code)})"
        screen.line(f"diptych: {words}; starting it again in {backoff.ended(now):g} s", "yellow")
    return 0


def _hear(child: ChildProcess, screen: StatusDisplay) -> None:
    for line in child.lines() if child.process is not None else ():
        screen.line(f"{child.name}: {line}")


def _end(children: Sequence[ChildProcess], stop: StopSignals, screen: StatusDisplay, patience_s: float) -> None:
    """Send SIGTERM to all at once; pass on each further stop signal; kill what is left after `patience_s`."""
    until, passed_on = time.monotonic() + patience_s, stop.urged
    for child in children:
        child.terminate()
    while any(child.code is None for child in children) and time.monotonic() < until:
        if stop.urged > passed_on:
            passed_on = stop.urged
            for child in children:
                child.terminate()
        for child in children:
            _hear(child, screen)
        time.sleep(_LOOK_S)
    for child in children:
        child.kill()
        _hear(child, screen)
