"""`diptych doctor`: checks everything that a service needs, and reports what is wrong.

It undoes every change that a check makes.
"""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cli.arguments import Commands, add_settings, read_settings
from contract.precision import is_quantized
from contract.printable import printable_lines
from core.extras import pip_install
from core.threads import compute_threads, cores

if TYPE_CHECKING:
    from core.config import Settings
    from core.kernels.device import DeviceInfo

_LITTLE_DISK = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """`state`: well, note (it works, and could be better) or ill (it does not work)."""

    state: str
    subject: str
    says: str


def add(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor", help="say what is wrong here", description="Look at all that a service needs, and say what is wrong.",
        epilog="exit codes: 0 all can work; 1 something cannot, and is marked with ✗",
    )  # fmt: skip
    add_settings(doctor, "port")
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    settings = read_settings(options)
    marks = {"well": "✓", "note": "·", "ill": "✗"}
    ill = False
    for look in (_python, _machine, _model, _checker, _disk, _redis, _artifacts, _port, _access):
        for finding in _safely(look, settings):
            ill |= finding.state == "ill"
            print(f"{marks[finding.state]} {finding.subject}: {printable_lines(finding.says)}", flush=True)
    return 1 if ill else 0


def _safely(look: Callable[[Settings], Iterator[Finding]], settings: Settings) -> Iterator[Finding]:
    try:
        yield from look(settings)
    except Exception as error:  # any error is a finding
        yield Finding("ill", look.__name__.strip("_"), f"{type(error).__name__}: {error}")


def _python(settings: Settings) -> Iterator[Finding]:
    needed = ("celery", "fastapi", "limits", "obstore", "prometheus_client", "redis", "uvicorn")
    missing = [name for name in needed if find_spec(name) is None]
    version_text = f"{platform.python_version()}, {sys.prefix}"
    if missing:
        yield Finding("ill", "python", f"{version_text}; {', '.join(missing)} not installed: {pip_install('serve')}")
    else:
        yield Finding("well", "python", version_text)


def _machine(settings: Settings) -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding("note", "torch", "is not installed: this machine can answer, and not draw")
        return
    import torch

    from core.kernels.describe import cuda_versions, describe

    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        yield from threads(gpus * compute_threads(settings.threads, gpu=True), gpus, cores())
        for k in range(gpus):
            memory = torch.cuda.get_device_properties(k).total_memory
            yield from gpu(f"cuda:{k}", describe(torch.device("cuda", k), settings.compiled_kernels), memory)
        versions = [f"{name} {number or 'is not installed'}" for name, number in cuda_versions().items()]
        yield Finding("well", "cuda", ", ".join(versions))
    elif settings.device.startswith("cuda"):
        yield Finding(
            "ill", "device", f"DIPTYCH_DEVICE is {settings.device}, and torch {torch.__version__} sees no GPU"
        )
    cpu = describe(torch.device("cpu"), settings.compiled_kernels)
    yield Finding("well", "cpu", f"{cpu}, {os.cpu_count()} cores, torch {torch.__version__}")
    yield from kernels("cpu", cpu, ("int8", "fp32"))


def gpu(name: str, device: DeviceInfo, memory_bytes: int) -> Iterator[Finding]:
    """A GPU's properties, and its kernels in each precision."""
    yield Finding("well", name, f"{device}, {memory_bytes / 2**30:.0f} GiB")
    yield from kernels(name, device, ("int8", "fp8", "bf16"))


def threads(total: int, workers: int, processors: int) -> Iterator[Finding]:
    """A note where this machine's workers compute on more CPU threads than it has processors."""
    if total > processors:
        text = f"{workers} workers compute on {total} CPU threads, and there are {processors} cores: they wait for each"
        yield Finding(
            "note", "threads", f"{text} other; set DIPTYCH_THREADS to {max(1, processors // workers)} or less"
        )


def kernels(name: str, device: DeviceInfo, precisions: Iterable[str]) -> Iterator[Finding]:
    """Return for each precision the available kernels, with the operations of each, and why no faster ones."""
    from core.kernels.device import EVERY_LAYER, TITLES, decisions, instead, lacks

    for precision in precisions:
        refusal = lacks(device, precision)
        if refusal is not None and is_quantized(precision):  # torch would emulate it, slower than the original
            yield Finding("note", f"{name} {precision}", f"does not run: {refusal}; take {instead(device, precision)}")
            continue
        alike: dict[tuple[str, str], list[str]] = {}
        for decision in decisions(device, precision):
            alike.setdefault((decision.implementation, decision.reason), []).append(decision.operation)
        lines = []
        for (implementation, reason), operations in alike.items():
            names = "" if operations == [EVERY_LAYER] else f" ({', '.join(operations)})"
            lines.append(f"{TITLES[implementation]}{names}" + (f": {reason}" if reason else ""))
        yield Finding("well" if refusal is None else "note", f"{name} {precision}", "; ".join(lines))


def _checker(settings: Settings) -> Iterator[Finding]:
    if find_spec("torch") is None:
        return
    from pipeline.checkpoints.folder import ModelError
    from workers.devices import device_of
    from workers.stages.checker import load

    try:
        checker = load(settings, device_of(settings))
    except ModelError as error:
        yield Finding("ill", "checker", str(error))
        return
    if checker is not None:
        checker.close()
        labels = f" of {', '.join(checker.labels)[:300]}" if checker.labels else ""
        yield Finding("well", "checker", f"{settings.checker}: {settings.checker_action} what it flags{labels}")


def _model(settings: Settings) -> Iterator[Finding]:
    from core.config import STAND_IN_MODEL

    name = settings.model_name
    if name == STAND_IN_MODEL:
        yield Finding("note", "model", f"not set and models/emoji-xl is not installed: {name} draws noise")
    elif Path(name).is_dir() or not Path(name).is_absolute():
        is_local = (Path(name) / "model_index.json").is_file()
        yield Finding("well", "model", name if is_local else f"{name}, from the hub when it is first needed")
        if is_local and find_spec("torch") is not None:
            from pipeline.families import diffusers

            if diffusers.find(name) is not None:
                yield Finding("note", "model", diffusers.NOTICE)
            else:
                yield from _scheduler(Path(name))
    else:
        yield Finding("ill", "model", f"DIPTYCH_MODEL: there is no folder {name}")


def _scheduler(folder: Path) -> Iterator[Finding]:
    """Report a scheduler that another sampler replaces, or that none can."""
    from pipeline.checkpoints import load
    from pipeline.checkpoints.folder import ModelError, read_json
    from pipeline.families import registry

    try:
        family = registry.read(folder)
        if "scheduler" not in family.parts:
            return
        reason = load.scheduler_of(
            str(folder), family, read_json(folder / "scheduler" / "scheduler_config.json")
        ).reason
    except ModelError as error:
        yield Finding("ill", "sampler", str(error))
    else:
        if reason:
            yield Finding("note", "sampler", reason)


def _disk(settings: Settings) -> Iterator[Finding]:
    for name, folder in (("data", settings.data_dir), ("cache", settings.cache_dir)):
        existing = next(
            path for path in (folder.expanduser(), *folder.expanduser().absolute().parents) if path.exists()
        )
        free = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK | os.X_OK):
            yield Finding("ill", name, f"{folder} cannot be written (DIPTYCH_{name.upper()}_DIR)")
        else:
            state = "note" if free < _LITTLE_DISK else "well"
            yield Finding(state, name, f"{folder}, {free / 2**30:.1f} GiB free")


def _redis(settings: Settings) -> Iterator[Finding]:
    from core.jobs.connection import StoreError
    from core.jobs.registry import Registry, condition_faults
    from deployment.redis import address_in
    from deployment.redis_programs import OLDEST, RedisError, choose

    folder = settings.data_dir.expanduser() / "redis"
    url = settings.redis_url or address_in(folder)
    program = None
    if not settings.redis_url:
        try:
            program = choose(folder)
        except RedisError as error:
            yield Finding("ill", "redis", str(error))
            return
    origin = "; bundled: for this machine alone, updated with Diptych" if program and program.bundled else ""
    if not url:
        yield Finding("well", "redis", f"{program}, which `diptych serve` starts{origin}")
        return
    registry = Registry(url)
    try:
        condition = registry.condition()
        version = tuple(int(part) for part in condition["version"].split(".")[:2])
        text = f"{condition['server']}, {condition['used']} used of {condition['most']}{origin}"
        yield Finding("well" if version >= OLDEST else "ill", "redis", text)
        for fault in condition_faults(condition):
            yield Finding("ill", "redis", fault)
        workers = registry.workers()
        for worker in workers:
            models = ", ".join(f"{model.name} {model.precision} {model.kernels}".rstrip() for model in worker.models)
            state = "well" if worker.state == "ready" else "note"
            yield Finding(state, "worker", f"{worker.id}, {worker.state} ({worker.message or models}); {models}")
        if not workers:
            yield Finding("note", "worker", "none has announced itself")
        local_threads = [worker.threads for worker in workers if worker.host == socket.gethostname()]
        yield from threads(sum(local_threads), len(local_threads), cores())
    except StoreError as error:
        yield Finding("ill", "redis", str(error))
    finally:
        registry.close()


def _artifacts(settings: Settings) -> Iterator[Finding]:
    from core.artifacts import ArtifactError, Artifacts

    try:
        artifacts = Artifacts(settings.artifacts)
        data = secrets.token_bytes(32)
        key = artifacts.put(data, "application/jsonl")
        same = artifacts.get(key) == data
        artifacts.delete(key)
    except ArtifactError as error:
        yield Finding("ill", "artifacts", f"{settings.artifacts}: {error} (DIPTYCH_ARTIFACTS_URL)")
    else:
        yield Finding("well" if same else "ill", "artifacts", f"{settings.artifacts}, written, read and deleted")


def _port(settings: Settings) -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.settimeout(2)
        if probe.connect_ex(("127.0.0.1", settings.port)):
            yield Finding("well", "port", f"{settings.port} is free")
            return
    from deployment.probe import api

    well, result = api(settings)
    yield Finding("well" if well else "ill", "port", f"{settings.port}: " + ("Diptych answers" if well else result))


def _access(settings: Settings) -> Iterator[Finding]:
    from core.jobs.keyring import Keyring
    from deployment.redis import address_in

    url = settings.redis_url or address_in(settings.data_dir.expanduser() / "redis")
    count, closed = 0, False
    if url:
        keyring = Keyring(url)
        try:
            guard = keyring.guard()
            count, closed = len(guard.keys), guard.closed
        finally:
            keyring.close()
    if count:
        yield Finding("well", "access", f"{count} keys; every caller needs one")
    elif closed:
        words = "the last key was revoked, so nobody is served: `diptych keys add NAME`, or `diptych keys open`"
        yield Finding("note", "access", words)
    elif settings.trust_network:
        yield Finding("note", "access", "no keys, and DIPTYCH_TRUST_NETWORK: whoever reaches the API may use it")
    else:
        yield Finding("well", "access", "no keys: this machine alone is served")
