"""Runs one worker per GPU of this machine, as children of one process, until stopped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

from contract.parallel import parse
from core.config import Settings
from deployment.children import Backoff, ChildProcess, child_environment, end_all, reason
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


def gpu_of(device: str, environment: Mapping[str, str]) -> str:
    """The GPU of a worker of this device setting, as CUDA_VISIBLE_DEVICES names it; "" where that is not known."""
    try:
        return visible_gpus(environment)[int(device.partition(":")[2] or 0)]
    except (NoDevices, ValueError, IndexError):
        return ""


def near_cores(device: str, system: Path = Path("/sys"), query: Callable[[], str] | None = None) -> set[int]:
    """The processors of the NUMA node that a GPU is attached to, or nothing where that is not known.

    `device` is a GPU as CUDA_VISIBLE_DEVICES names it. `query` is what `nvidia-smi` prints of each GPU's index, UUID
    and bus.
    """
    listing = (query or partial(_nvidia_smi, "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"))()
    for line in listing.splitlines():
        index, uuid, bus = ([word.strip() for word in line.split(",")] + [""] * 3)[:3]
        if bus and device in (index, uuid):
            # CUDA writes eight digits of the bus's domain, the kernel four.
            folder = system / "bus/pci/devices" / bus.lower()[-12:]
            try:
                node = int((folder / "numa_node").read_text())
                return _cores((system / f"devices/system/node/node{node}/cpulist").read_text()) if node >= 0 else set()
            except (OSError, ValueError):
                return set()
    return set()


def _cores(ranges: str) -> set[int]:
    """The numbers of a list such as "0-15,32-47"."""
    ends = (part.split("-") for part in ranges.strip().split(",") if part)
    return {core for first, *last in ends for core in range(int(first), int(*last or [first]) + 1)}


def _listed() -> str:
    return _nvidia_smi("-L")


def _nvidia_smi(*arguments: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def serve_each(
    settings: Settings, *, devices: Sequence[str] | None = None, command: Sequence[str] | None = None
) -> int:
    """Run a worker for each device until a signal comes; returns the exit code. Raises `NoDevices`.

    A worker that ends is restarted, as by `diptych serve`; one whose input can never work (exit code 2) ends all.
    `command` runs one worker, which gets the settings, and its device in CUDA_VISIBLE_DEVICES, by its environment.
    """
    devices = visible_gpus(os.environ) if devices is None else devices
    command = command or [sys.executable, "-P", "-m", "cli", "worker"]
    logs = Path(tempfile.mkdtemp(prefix="diptych-workers-"))  # private, under an unpredictable name
    with StopSignals() as stop, StatusDisplay() as screen:
        parts = [
            (ChildProcess(name, command, environment, logs / f"{number}.log"), Backoff())
            for number, (name, environment) in enumerate(
                worker_environments(settings, child_environment(settings), devices)
            )
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
            children = [child for child, _ in parts]
            end_all(children, stop, lambda: _hear(children, screen), settings.drain_s + _HAND_BACK_S)


def worker_environments(
    settings: Settings, environment: Mapping[str, str], devices: Sequence[str] | None
) -> Iterator[tuple[str, dict[str, str]]]:
    """The name and environment of each device's worker: its device, and its own metrics port, counted up from the
    configured one. Without `devices` of the one worker, which chooses its device.

    A worker whose text model is spread over GPUs has so many of them. Raises `NoDevices` if that leaves some over.
    """
    if devices is None:
        yield "worker", dict(environment)
        return
    each = parse(settings.text_parallel).ranks
    if len(devices) % each:
        raise NoDevices(
            f"DIPTYCH_TEXT_PARALLEL={settings.text_parallel} takes {each} GPUs a worker, and there are {len(devices)}"
        )
    for number, first in enumerate(range(0, len(devices), each)):
        own = {**environment, "CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + each])}
        if settings.metrics:
            host, _, port = settings.metrics.rpartition(":")
            own["DIPTYCH_METRICS"] = f"{host}:{int(port) + number}"
        yield f"worker {number}", own


def _look(child: ChildProcess, backoff: Backoff, screen: StatusDisplay) -> int:
    """Print its output, and restart it when due; `_UNUSABLE` if it can never work."""
    _hear([child], screen)
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


def _hear(children: Sequence[ChildProcess], screen: StatusDisplay) -> None:
    for child in children:
        for line in child.lines() if child.process is not None else ():
            screen.line(f"{child.name}: {line}")
