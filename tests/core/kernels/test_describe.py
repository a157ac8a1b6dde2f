"""What is seen of a device, digests of sources, and where what is compiled for a GPU is kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.kernels.cpu.library import identity
from core.kernels.cuda import driver, language
from core.kernels.cuda.attention import attention
from core.kernels.describe import describe, digest
from core.kernels.device import AVX2, AVX512, say
from tests.core.quant import stage

fresh = digest.__wrapped__  # without what was remembered


def test_this_processor_is_described_as_its_kernels_say() -> None:
    kernels = stage.kernels()
    found = describe(torch.device("cpu"), stage.CACHE)
    assert found.instructions == identity(kernels).instructions and found.instructions in (AVX512, AVX2)
    assert found.capability is None and found.name and str(found) == found.name


def test_a_machine_without_a_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = describe(torch.device("cpu"), tmp_path / "cache")
    assert found.instructions is None and found.cpu_lacks is not None and "compiler" in found.cpu_lacks


def test_a_gpu_that_is_not_there_has_no_capability(tmp_path: Path) -> None:
    found = describe(torch.device("cuda", 63), tmp_path)
    assert found.kind == "cuda" and found.capability is None and not list(tmp_path.iterdir())


def test_a_fall_back_says_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    say.cache_clear()
    q = torch.randn(1, 4, 2, 64)
    with caplog.at_level("INFO"):
        for _ in range(2):
            attention(q, q, q, None, torch.float32)
    assert [record.getMessage() for record in caplog.records] == ["attention: torch: no CUDA device"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the GPU kernels' sources."""
    root = tmp_path_factory.mktemp("tree")
    shutil.copytree(stage.ROOT / "core/kernels/cuda", root / "cuda")
    return root


def test_a_digest_is_of_names_and_bytes_and_of_no_path(tree: Path, tmp_path: Path) -> None:
    whole = fresh(tree, ("cuda",))
    other = shutil.copytree(tree, tmp_path / "elsewhere" / "deep")
    (other / "cuda" / "__pycache__").mkdir(exist_ok=True)
    (other / "cuda" / "__pycache__" / "gemm.pyc").write_bytes(b"compiled")
    os.utime(other / "cuda" / "gemm.py", (0, 0))
    assert fresh(other, ("cuda",)) == whole
    (other / "cuda" / "gemm.py").rename(other / "cuda" / "gem.py")
    assert fresh(other, ("cuda",)) != whole


@given(st.data())
def test_one_byte_of_any_source_changes_the_digest(tree: Path, data: st.DataObject) -> None:
    files = sorted(path for path in tree.rglob("*") if path.suffix in (".py", ".json") and path.stat().st_size)
    path = data.draw(st.sampled_from(files))
    before, whole = path.read_bytes(), fresh(tree, ("cuda",))
    place = data.draw(st.integers(0, len(before) - 1))
    try:
        path.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
        assert fresh(tree, ("cuda",)) != whole
    finally:
        path.write_bytes(before)
    assert fresh(tree, ("cuda",)) == whole


def test_a_source_that_is_not_there_is_an_error(tree: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fresh(tree, ("cuda/no_such.py",))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs that NVRTC was asked for. It is not on every machine; what is kept of its results is tested here."""
    asked: list[str] = []

    def compile_program(text: str) -> bytes:
        asked.append(text)
        return f"cubin of {text}".encode()

    monkeypatch.setattr(driver, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(driver, "compile_program", compile_program)
    monkeypatch.setattr(driver, "_kept_in", driver._kept_in)  # which is put back
    driver._not_kept.cache_clear()
    return asked


def test_gpu_programs_are_kept_where_they_are_told_to(tmp_path: Path, compiles: list[str]) -> None:
    driver.keep_in(tmp_path / "kernels")
    first = driver.compiled("a"), driver.compiled("b")
    assert (driver.compiled("a"), driver.compiled("b")) == first == (b"cubin of a", b"cubin of b")
    assert compiles == ["a", "b"]
    assert sorted(path.suffix for path in (tmp_path / "kernels").iterdir()) == [".cubin", ".cubin"]


def test_a_folder_that_cannot_be_written_is_told_of_once(
    tmp_path: Path, compiles: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    driver.keep_in(tmp_path / "file" / "kernels")
    assert driver.compiled("a") == driver.compiled("a") == b"cubin of a" and compiles == ["a", "a"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("GPU kernels are compiled at every start") and str(tmp_path / "file") in said


def test_triton_keeps_its_kernels_there_unless_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/users/own")
    language.keep_in(tmp_path / "triton")
    assert os.environ["TRITON_CACHE_DIR"] == "/users/own" and not (tmp_path / "triton").exists()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    language.keep_in(tmp_path / "triton")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton") and not caplog.records
    if language.triton is not None:
        assert language.triton.knobs.cache.dir == str(tmp_path / "triton")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    (tmp_path / "file").write_text("")
    language.keep_in(tmp_path / "file" / "triton")
    elsewhere = Path(os.environ["TRITON_CACHE_DIR"])
    assert elsewhere.is_dir() and "Triton kernels are compiled at every start" in caplog.text
    elsewhere.rmdir()
