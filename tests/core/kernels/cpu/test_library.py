"""Compiling the kernels: once, whole or not at all, and where it cannot be done the reason is said in a sentence."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.kernels.cpu import library as module
from core.kernels.cpu.library import KernelsUnavailable, library
from tests.core.quant.stage import CACHE, kernels, threads

fresh = library.__wrapped__  # without what was remembered
GXX = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ is installed")


@pytest.fixture(autouse=True)
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is, it could run the kernels; there is no CXX."""
    flags = module._processor_flags() | {"avx512_vnni"}
    monkeypatch.setattr(module, "_processor_flags", lambda: flags)
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Makes CXX a compiler that answers --version and then does what the script says, with $out for its output."""

    def used(script: str) -> Path:
        path = tmp_path / "stub"
        path.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit 0\n'
            'for word; do [ "$last" = -o ] && out="$word"; last="$word"; done\n' + script + "\n"
        )
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return used


def refused(cache: Path) -> str:
    with pytest.raises(KernelsUnavailable) as caught:
        fresh(cache)
    assert not cache.is_dir() or not list(cache.iterdir()), "something was left behind"
    return str(caught.value)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refused(tmp_path / "c") == "INT8 kernels need a C++ compiler (CXX, g++ or clang++), and none was found"
    monkeypatch.setenv("CXX", "no-such-compiler -O2 'unclosed")
    assert "none was found" in refused(tmp_path / "c")


def test_on_other_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_processor_flags", lambda: {"avx2"})  # but no fma
    assert refused(tmp_path / "c") == "INT8 kernels need a processor with AVX-512 VNNI or AVX2"
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    assert "are for x86 processors under Linux, not aarch64, linux" in refused(tmp_path / "c")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'In file from x.cpp:1:' >&2; echo 'x.cpp:3: error: no AVX' >&2; exit 1",
         "do not compile with {}: x.cpp:3: error: no AVX"),
        ("exit 3", "do not compile with {}: no reason given"),
        ('echo garbage >"$out"', "cannot be loaded from "),
        ("exit 0", "cannot be loaded from "),
        pytest.param('echo | g++ -shared -fPIC -x c++ - -o "$out"', "undefined symbol: diptych_run", marks=GXX),
    ],
)  # fmt: skip
def test_a_compiler_that_fails(script: str, said: str, use: Callable[[str], Path], tmp_path: Path) -> None:
    assert said.format(use(script)) in refused(tmp_path / "c")


def test_a_compiler_that_cannot_be_run(use: Callable[[str], Path], tmp_path: Path) -> None:
    compiler = use("")
    compiler.write_bytes(b"\x7fELF, but not really")
    assert f"need a C++ compiler, and {compiler} cannot be run" in refused(tmp_path / "c")


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[str], Path], tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_COMPILE_S", 0.5)
    use(f"(sleep 60; echo >{tmp_path}/survived) & echo $! >{tmp_path}/child; wait")
    assert "are not compiled by" in refused(tmp_path / "c")
    assert not (tmp_path / "survived").exists(), "it was waited for"
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}")
    until = time.monotonic() + 60
    while child.exists() and "Z" not in (child / "stat").read_text().split()[2]:
        assert time.monotonic() < until, "the compiler's child goes on"
        time.sleep(0.02)


def test_a_cache_that_is_no_folder(use: Callable[[str], Path], tmp_path: Path) -> None:
    use("exit 0")
    (tmp_path / "file").write_text("")
    assert f"cannot be compiled into {tmp_path}/file/c: " in refused(tmp_path / "file" / "c")


def test_cxx_may_have_arguments_and_each_setting_has_a_library_of_its_own(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[str], Path]
) -> None:
    one = use("exit 0")
    other, keys = shutil.copy(one, one.with_name("other")), set()
    for command in (f"{one}", f"{one} -g", f"{other}"):
        monkeypatch.setenv("CXX", command)
        assert module._compiler() == command.split()
        keys.add(module._key(module._compiler()))
    monkeypatch.setattr(module, "_processor_flags", lambda: {"avx512_vnni", "avx512_fp16"})
    keys.add(module._key(module._compiler()))
    assert len(keys) == 4


@pytest.fixture
def compiled(use: Callable[[str], Path]) -> Path:
    """The kernels, which the compiler in use copies."""
    kernels()
    found = max(CACHE.glob("int8-*.so"), key=lambda path: path.stat().st_mtime)
    use(f'sleep 0.2; cp {found} "$out"')
    return found


def test_a_damaged_library_is_compiled_anew(compiled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c" / f"int8-{module._key(module._compiler())}.so"
    path.parent.mkdir()
    path.write_bytes(b"damaged")
    assert fresh(tmp_path / "c").diptych_size(99) == -1
    assert "; recompiling" in caplog.text and path.read_bytes() == compiled.read_bytes()
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.usefixtures("compiled")
def test_two_may_compile_at_once(tmp_path: Path) -> None:
    made: list[object] = []
    both = [threading.Thread(target=lambda: made.append(fresh(tmp_path / "c"))) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(made) == 2 and len(list((tmp_path / "c").iterdir())) == 1


def test_what_a_killed_compiler_left_is_swept_and_what_is_under_way_is_not(tmp_path: Path) -> None:
    old, new = tmp_path / "int8-old.part", tmp_path / "int8-new.part"
    for folder in (old, new):
        folder.mkdir()
        (folder / "kernels.o").write_text("")
    long_ago = time.time() - 100 * module._COMPILE_S
    os.utime(old, (long_ago, long_ago))
    module._sweep(tmp_path)
    assert not old.exists() and new.exists()


def test_the_kernels_share_torchs_threads() -> None:
    """One OpenMP runtime in the process: a second would keep a second team of threads."""
    kernels()
    with threads(2):
        torch.ones(1000, 1000).sum()
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}
    assert len(runtimes) == 1, runtimes


def test_code_that_others_could_have_put_there_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not a library that everybody may write, which is made anew, nor one in a folder of everybody."""
    path = tmp_path / "int8.so"
    path.touch(0o755)
    module._check_ours(path)
    for wrong, mode, well in ((path, 0o777, 0o755), (tmp_path, 0o777, 0o1777)):
        wrong.chmod(mode)
        with pytest.raises(KernelsUnavailable, match="everybody may write it"):
            module._check_ours(path)
        wrong.chmod(well)
        module._check_ours(path)

    def plant(_: list[str], made: Path) -> None:
        made.touch()
        made.chmod(0o777)

    monkeypatch.setattr(module, "_compile", plant)
    monkeypatch.setattr(module, "_load", lambda _: pytest.fail("it was loaded"))
    for _ in range(2):  # made just now, and found there
        with pytest.raises(KernelsUnavailable, match="everybody may write it"):
            fresh(tmp_path)
