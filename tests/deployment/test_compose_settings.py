"""What docker-compose.yml and the Dockerfile tell each part: the settings that it reads, the fused path, the caches.

Reads the files as docker-compose does, with an environment of its own.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import torch
import yaml
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from core.config import Settings
from core.kernels import describe as description
from deployment.redis import free_port
from deployment.redis_programs import choose
from pipeline.checkpoints.load import load
from tests.core.kernels.test_device import H200
from tests.deployment.served import ROOT, killed_at_last
from tests.test_floors import Module, read
from workers.build_images import precision
from workers.devices import device_of, fused

SHELL = {"REDIS_PASSWORD": "secret"}  # as `make up` writes into .env
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")


def environment(service: str, given: Mapping[str, str]) -> dict[str, str]:
    """A container's environment: the image's, then the compose file's, with the `given` shell's variables put in."""
    found, known = image_environment("worker" if service.startswith("worker") else "api"), {**SHELL, **given}
    for name, value in COMPOSE["services"][service]["environment"].items():
        if value is not None:
            found[name] = re.sub(r"\$\{(\w+):[-?]([^}]*)\}", lambda match: known.get(match[1]) or match[2], str(value))
        elif name in given:
            found[name] = given[name]
    return found


def image_environment(stage: str) -> dict[str, str]:
    """What ENV says in the Dockerfile's stage and in those that it comes from."""
    parents, variables = {}, {}
    for part in re.split(r"^(?=FROM )", DOCKERFILE.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        first, *lines = part.splitlines()
        _, parent, _, name = first.split()
        parents[name] = parent
        variables[name] = [pair for line in lines if line.startswith("ENV ") for pair in line.split()[1:]]
    chain = [stage]
    while chain[0] in parents:
        chain.insert(0, parents[chain[0]])
    found: dict[str, str] = {}
    for pair in (pair for name in chain[1:] for pair in variables[name]):
        name, value = pair.split("=", 1)
        found[name] = re.sub(r"\$(\w+)", lambda match: found.get(match[1], ""), value)
    return found


def settings(service: str, monkeypatch: pytest.MonkeyPatch, **given: str) -> Settings:
    for name in (f"DIPTYCH_{field.upper()}" for field in Settings.model_fields):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(service, given).items():
        monkeypatch.setenv(name, value)
    return Settings()


# --- the path that a container takes on a GPU -----------------------------------------------------------------------


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H200 and Triton, as far as the choice of kernels looks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(description, "describe", lambda *_: H200)


@pytest.mark.usefixtures("h200")
def test_the_gpu_worker_runs_int8_on_fused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compose file's settings with no variable set, and the embedded model."""
    read_there = settings("worker-gpu", monkeypatch)
    device = device_of(read_there)
    chosen = precision(read_there, device)
    assert (device, chosen) == ("cuda", "int8")
    # Loaded for any device that is no CPU; "meta" holds shapes and types, and decisions look at nothing else.
    model = replace(load(read_there.model_name, precision=chosen, device="meta"), device=torch.device(device))
    assert fused(read_there, model) == (True, "")
    assert read_there.compile and read_there.kernels


@pytest.mark.usefixtures("h200")
def test_a_shell_that_names_a_precision_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    for service, device in ("worker", "cpu"), ("worker-gpu", "auto"):
        by_default = settings(service, monkeypatch)
        assert (by_default.precision, by_default.device) == ("auto", device)
        assert settings(service, monkeypatch, DIPTYCH_PRECISION="fp16").precision == "fp16"
    read_there = settings("worker-gpu", monkeypatch, DIPTYCH_PRECISION="fp16")
    model = replace(load("random:tiny", precision="fp16", device="meta"), device=torch.device("cuda"))
    assert fused(read_there, model) == (False, "the GPU kernels support bf16 and 8 bits, not fp16")


def test_every_image_of_others_names_its_version() -> None:
    """`latest` and a name without a tag are another image tomorrow."""
    composed = {
        service["image"] for service in COMPOSE["services"].values() if not service["image"].startswith("diptych-")
    }
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE))
    built_on = set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) - stages
    assert len(composed) >= 2 and built_on
    for image in composed | built_on:
        tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
        assert re.match(r"v?\d", tag), image


def test_all_that_is_kept_between_starts_lies_on_the_volume() -> None:
    """Containers can write nowhere else: the root file system is read-only, /tmp ends with the container."""
    for name in ("worker", "worker-gpu"):
        inside = environment(name, {})
        (cache,) = [v.split(":")[1] for v in COMPOSE["services"][name]["volumes"] if v.startswith("cache:")]
        for variable in ("DIPTYCH_CACHE_DIR", "HF_HOME", "TRITON_CACHE_DIR"):
            assert Path(inside[variable]).is_relative_to(cache), (name, variable)


def test_uploads_wait_on_a_volume_and_not_in_memory() -> None:
    """`TMPDIR` of the API is a volume's folder, which the image gives to its user: a new volume takes its owner."""
    service = COMPOSE["services"]["api"]
    spool = environment("api", {})["TMPDIR"]
    (volume,) = [v.split(":")[0] for v in service["volumes"] if v.split(":")[1] == spool]
    assert volume in COMPOSE["volumes"] and COMPOSE["volumes"][volume] is None
    assert not any(Path(spool).is_relative_to(folder) for folder in service["tmpfs"])
    made = DOCKERFILE.partition("AS source")[0]
    for command in ("mkdir -p", "chown -R diptych:diptych"):
        assert re.search(rf"{command} [^&]* {spool}\s", made), command


def test_redis_asks_for_the_password_that_the_others_are_given(tmp_path: Path) -> None:
    """The container's own command, run here on another port."""
    urls = {environment(name, {})["DIPTYCH_REDIS_URL"] for name in ("api", "worker")}
    assert urls == {"redis://:secret@redis:6379/0"}
    service, port = COMPOSE["services"]["redis"], free_port()
    *shell, script = service["command"]
    script = script.replace("$$", "$").replace("redis-server -", f"{choose().path} - --port {port}", 1)
    variables = {**os.environ, "REDISCLI_AUTH": "secret", "REDIS_MAXMEMORY": "64mb"}
    assert set(service["environment"]) == {"REDISCLI_AUTH", "REDIS_MAXMEMORY"}
    process = subprocess.Popen([*shell, script], cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL)
    promised = {
        "appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "save": "",
        "maxmemory": str(64 * 2**20),
    }  # fmt: skip
    patient = Retry(ConstantBackoff(0.1), 600)
    with killed_at_last(process):
        with redis.Redis(port=port, password="secret", retry=patient, decode_responses=True) as client:
            assert client.config_get("*").items() >= promised.items()
        with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        process.terminate()
        assert process.wait(60) == 0, "it is the signal's, not the shell"


# --- every setting that a part reads can be given to it -------------------------------------------------------------

# What a container is, rather than how it is run: set in the Dockerfile, or by the service's command.
FIXED = {
    "data_dir": "the image's, with the volume of artifacts",
    "cache_dir": "the image's, with the volume of caches",
    "host": "the image's command listens on all addresses of the container",
    "port": "the container's; PORT is the host's",
}
ROOTS = {
    "api": ("api", "deployment.probe"),
    "worker": ("workers", "deployment.probe", "deployment.devices"),
}
COMMANDS = {  # functions of cli/serve.py
    "api": {"_api", "_check_redis", "_begin_traces"},
    "worker": {"_worker", "_each_gpu", "_check_redis", "_begin_traces"},
}
# Read by code that both parts share, to do what one of them never does.
UNUSED = {"api": {}, "worker": {"max_queued": "bounds a queue when a job is made, which the API alone does"}}


def reached(modules: dict[str, Module], roots: tuple[str, ...]) -> set[str]:
    """The modules that the roots import, and those that these import, at the top or in a function."""
    todo = [name for name in modules if any(name == root or name.startswith(root + ".") for root in roots)]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in modules and name not in seen:
            seen.add(name)
            todo += [found.name for found in modules[name].imports(modules)]
    return seen


def fields_read(nodes: Iterable[ast.AST]) -> set[str]:
    """Fields of Settings that are read as `settings.field`, `self.settings.field` or `self._settings.field`."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            if owner.lstrip("_") == "settings":
                found.add(node.attr)
    return found


def nodes(part: str, modules: dict[str, Module]) -> Iterator[ast.AST]:
    """The source that a part runs: its command, and every module that it reaches."""
    for name in reached(modules, ROOTS[part]) - {"core.config"}:
        yield from modules[name].nodes
    for node in ast.parse(modules["cli.serve"].source).body:
        if isinstance(node, ast.FunctionDef) and node.name in COMMANDS[part]:
            yield from ast.walk(node)


def behind() -> dict[str, set[str]]:
    """The fields that each property of Settings reads, itself or by another property."""
    (settings,) = [
        node
        for node in ast.parse((ROOT / "core" / "config.py").read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
    ]
    names = {
        method.name: {n.attr for n in ast.walk(method) if isinstance(n, ast.Attribute)}
        for method in settings.body
        if isinstance(method, ast.FunctionDef) and method.decorator_list
    }
    for _ in names:
        names = {name: read.union(*(names.get(other, set()) for other in read)) for name, read in names.items()}
    return {name: read & Settings.model_fields.keys() for name, read in names.items()}


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read(ROOT)


@pytest.mark.parametrize("part", ["api", "worker"])
def test_a_part_is_given_the_settings_that_it_reads_and_no_others(part: str, modules: dict[str, Module]) -> None:
    properties = behind()
    names_read = fields_read(nodes(part, modules))
    fields = {field for name in names_read for field in properties.get(name, {name})} & Settings.model_fields.keys()
    for service in ["api"] if part == "api" else ["worker", "worker-gpu"]:
        given = {name for name in COMPOSE["services"][service]["environment"] if name.startswith("DIPTYCH_")}
        expected = {f"DIPTYCH_{field.upper()}" for field in fields - FIXED.keys() - UNUSED[part].keys()}
        if service == "worker-gpu":
            expected -= {"DIPTYCH_DEVICE"}  # `auto`: each process is shown one GPU
        assert given == expected, service
