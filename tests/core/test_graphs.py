"""Executables: eager at once, compiled in the background, kept on disk, and eager for good where compiling fails."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from core.graphs import CompiledCache, ExecutableKey, compiler
from tests.core.present import present
from tests.starved import no_threads

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler is installed")
# torch.compile's own modules use what Python and numpy have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _urgent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is served here that compiling should give way to: on a busy machine it would wait for minutes."""
    if request.function is not test_compiling_gives_way_to_what_is_served:
        monkeypatch.delattr(os, "setpriority", raising=False)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases are traced, but no C++ is written and compiled of them, which takes seconds for each."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def double(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sin() + x


def example(rows: int):  # type: ignore[no-untyped-def]
    return lambda fn: fn(torch.ones(rows, 3))


@needs_compiler
@pytest.mark.usefixtures("traced")
def test_compiled_code_takes_over_bucket_by_bucket(tmp_path: Path) -> None:
    made = CompiledCache({"double": double}, compiled=True, cache=tmp_path)
    keys = [ExecutableKey("double", rows, (8, 8)) for rows in (2, 4)]
    assert made.find(keys[0]) is None and made.eager("double") is double
    for key in keys:
        made.want(key, example(key.rows))
        made.want(key, example(key.rows))  # asking twice is asking once
    assert made.wait(300)
    assert made.buckets("double", (8, 8)) == [2, 4] and made.buckets("double", (9, 9)) == []
    x = torch.linspace(-1, 1, 6).view(2, 3)
    compiled = present(made.find(keys[0]))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), double(x))
    made.close()


@needs_compiler
def test_eager_serves_while_code_is_compiled(tmp_path: Path) -> None:
    made, release = CompiledCache({"double": double}, compiled=True, cache=tmp_path), threading.Event()

    def slow(fn):  # type: ignore[no-untyped-def]
        release.wait()
        fn(torch.ones(5, 3))

    made.want(ExecutableKey("double", 5, 0), slow)
    assert not made.wait(0.05)
    assert made.find(ExecutableKey("double", 5, 0)) is None
    torch.testing.assert_close(made.eager("double")(torch.zeros(5, 3)), torch.zeros(5, 3))
    release.set()
    assert made.wait(300)
    compiled, x = present(made.find(ExecutableKey("double", 5, 0))), torch.linspace(-1, 1, 15).view(5, 3)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), double(x))


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="no priorities here")
def test_compiling_gives_way_to_what_is_served() -> None:
    made, seen = CompiledCache({"double": double}, compiled=True), list[int]()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    made.want(
        ExecutableKey("double", 6, 0), lambda _: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    )
    assert made.wait(300)
    assert set(seen) == {15} and os.getpriority(os.PRIO_PROCESS, 0) == before


@needs_compiler
@pytest.mark.usefixtures("traced")
def test_what_does_not_compile_stays_eager_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    made = CompiledCache({"breaks": breaks, "double": double}, compiled=True)
    with caplog.at_level(logging.WARNING):
        made.want(ExecutableKey("breaks", 2, 0), example(2))
        made.want(ExecutableKey("double", 3, 0), example(3))
        assert made.wait(300)
    assert made.find(ExecutableKey("breaks", 2, 0)) is None and "breaks" in made.failed
    assert "breaks does not compile and stays eager" in caplog.text
    assert made.find(ExecutableKey("double", 3, 0)) is not None, "one phase's failure is not another's"
    made.want(ExecutableKey("breaks", 4, 0), example(4))
    assert made.wait(1), "a phase that failed is not tried again"


@pytest.mark.parametrize("compiled", [True, False])
def test_without_a_compiler_or_if_that_is_off_everything_is_eager(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, compiled: bool
) -> None:
    if compiled:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
    made = CompiledCache({"double": double}, compiled=compiled)
    assert not made.enabled and ("no C++ compiler" in caplog.text) == compiled
    made.want(ExecutableKey("double", 2, 0), example(2))
    assert made.wait(0) and made.find(ExecutableKey("double", 2, 0)) is None


_PROCESS = """
import os, sys, torch
from pathlib import Path
vars(os).pop("setpriority", None)
from core.graphs import CompiledCache, ExecutableKey
from torch._dynamo.utils import counters
made = CompiledCache({"f": lambda x: (x * 3).cos() - x}, compiled=True, cache=Path(sys.argv[1]))
x = torch.linspace(-1, 1, 28).view(4, 7)
made.want(ExecutableKey("f", 4, 0), lambda fn: torch.testing.assert_close(fn(x), made.eager("f")(x)))
assert made.wait(300) and not made.failed, made.failed
hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
print("hits", hits, "misses", counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.long
@needs_compiler
def test_compiled_code_is_kept_between_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch uses fewer instructions, as on another processor, it is not what was compiled for more."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    root = Path(__file__).resolve().parents[2]
    said = [
        subprocess.run(
            [sys.executable, "-c", _PROCESS, str(tmp_path)],
            cwd=root, env={**os.environ, **variables}, capture_output=True, text=True, check=True,
        ).stdout
        for variables in ({}, {}, {"ATEN_CPU_CAPABILITY": "avx2"}, {"ATEN_CPU_CAPABILITY": "default"})
    ]  # fmt: skip
    assert said[0].startswith("hits 0 misses 1"), said
    assert "hits 0" not in said[1] and "misses 0" in said[1], said
    assert said[3].startswith("hits 0 misses 1"), said
    assert any(tmp_path.rglob("*.so")), "the compiled code lies where it was told to"


@needs_compiler
def test_code_is_kept_by_what_the_processor_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")

    def folder(capability: str, flags: str, cache: Path | None = tmp_path / "ours") -> Path:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**dict.fromkeys(flags.split(), True), "cores": 2})
        CompiledCache({}, compiled=True, cache=cache)
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])

    cases = [("AVX512", "avx512f avx2"), ("AVX512", "avx512f avx2 amx_int8"), ("AVX2", "avx512f avx2")]
    folders = [folder(*case) for case in cases]
    assert len({*folders}) == 3 and {each.parent for each in folders} == {tmp_path / "ours"}
    assert [folder(*case) for case in cases] == folders, "and not one in the other"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "theirs"))
    assert {folder(*case).parent for case in cases} == {tmp_path / "theirs"}, "where the user wants it"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert {folder(*case, None).name for case in cases} == {each.name for each in folders}


@needs_compiler
@pytest.mark.usefixtures("traced")
def test_the_reason_is_told_whole() -> None:
    """torch names a backend first, and what that raised behind it."""

    def breaks(_: object) -> None:
        try:
            raise OSError("no room")
        except OSError as error:
            raise RuntimeError("backend='inductor' raised:\nError: x.cpp:3") from error

    made = CompiledCache({"breaks": double}, compiled=True)
    made.want(ExecutableKey("breaks", 2, 0), breaks)
    assert made.wait(300)
    reason = "RuntimeError: backend='inductor' raised: Error: x.cpp:3; caused by OSError: no room"
    assert made.failed == {"breaks": reason}


@needs_compiler
def test_compiling_waits_until_a_thread_can_start() -> None:
    made = CompiledCache({"double": double}, compiled=True)
    with no_threads():
        made.want(ExecutableKey("double", 2, 0), lambda fn: None)
    assert not made.wait(0)
    made.want(ExecutableKey("double", 3, 0), lambda fn: None)
    assert made.wait(300) and made.buckets("double", 0) == [2, 3]
