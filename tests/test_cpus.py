"""Tests `make test-cpus`: the environment of each configuration, unsupported ones, and the counted results."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from core.kernels.cpu import library
from tests import cpus
from tests.cpus import CONFIGURATIONS, ROOMS, ROOT, Configuration


@pytest.fixture(autouse=True)
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(cpus, "WORK", tmp_path)
    return tmp_path


def test_every_room_is_there() -> None:
    assert [room for room in ROOMS if not (ROOT / room).exists()] == []


@pytest.mark.long
def test_torch_takes_what_it_is_told_to_or_the_reason_is_said() -> None:
    assert cpus.lacks(CONFIGURATIONS["default"]) is None
    impossible = Configuration("none", "AVX1024", variables=CONFIGURATIONS["default"].variables)
    assert cpus.lacks(impossible) == "torch takes DEFAULT here"
    row = cpus.Row("avx512", {}, "torch takes AVX2 here")
    assert cpus.table([row]).splitlines()[1].endswith("not run: torch takes AVX2 here") and not row.failed


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ is installed")
def test_kernels_for_avx2_are_another_library_without_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    key = library._key(library._compiler())
    variables = cpus.environment(CONFIGURATIONS["kernels-avx2"])
    monkeypatch.setenv("CXX", variables["CXX"])
    assert library._compiler() == [variables["CXX"]] and library._key(library._compiler()) != key
    command = [variables["CXX"], "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    assert "__AVX512F__" not in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_without_kernels_there_is_no_compiler_and_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++")
    variables = cpus.environment(CONFIGURATIONS["kernels-off"])
    assert "CXX" not in variables
    assert not any(shutil.which(name, path=variables["PATH"]) for name in cpus.COMPILERS)
    for name in ("sh", "git", "make"):
        assert bool(shutil.which(name, path=variables["PATH"])) == bool(shutil.which(name))


@pytest.mark.long
def test_what_ran_is_counted_and_a_failure_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # three processes, which need none
    made = tmp_path / "test_made.py"
    made.write_text(
        "import os, pytest\n"
        "def test_runs(): assert os.environ['ATEN_CPU_CAPABILITY'] == 'default'\n"
        "def test_is_left_out(): pytest.skip('here')\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_is_broken(broken): pass\n"
    )
    assert cpus.main(["default", "--", str(made), "-p", "no:cacheprovider"]) == 1
    line = capfd.readouterr().out.splitlines()[-1].split()
    assert line[0] == "default" and line[-5:-2] == ["1", "1", "1"]
    assert cpus.main(["default", "--", f"{made}::test_runs", "-p", "no:cacheprovider"]) == 0
    assert cpus.main(["default", "--", str(made), "--no-such-option"]) == 1
    assert "not run: pytest ended with 4" in capfd.readouterr().out
