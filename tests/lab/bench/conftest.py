"""Every test has its own machine lock: none waits for another's benchmark, or is told of one."""

from pathlib import Path

import pytest

from deployment.children import ChildProcess
from lab.bench.harness import record
from tests.forks import API, REAL, forker


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bench.lock"
    monkeypatch.setattr(record, "LOCK", path)
    return path


@pytest.fixture
def forked_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """APIs and workers that a benchmark starts are forks: a rehearsal is not about what they import."""

    def start(part: ChildProcess) -> None:
        _, _, *words = part.command  # python -P
        part.log.parent.mkdir(parents=True, exist_ok=True)
        with part.log.open("ab") as output:
            fork = forker(*(API if "api" in words else REAL)).start(
                words, env=part.environment, stderr=output.fileno(), pass_fds=part.descriptors,
                start_new_session=True, niceness=part.niceness,
            )  # fmt: skip
        monkeypatch.setattr(part, "process", fork)

    monkeypatch.setattr(ChildProcess, "start", start)
