"""Every test has its own machine lock: none waits for another's benchmark, or is told of one."""

from pathlib import Path

import pytest

from benchmarks.harness import record


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bench.lock"
    monkeypatch.setattr(record, "LOCK", path)
    return path
