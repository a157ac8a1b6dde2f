"""The ladder at small scale: each rung in a process that runs in its own turns only, the stock pipeline at its best."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import Settings
from lab.bench import ladder, launcher, rungs
from lab.bench.harness import provenance, record
from lab.bench.harness.processes import ProcessGroup
from lab.bench.harness.turns import LeftOut
from lab.bench.ladder import Turns
from lab.bench.launcher import Launcher
from pipeline.checkpoints import tiny


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(ladder, "_ROUND", 2)
    monkeypatch.setattr(launcher, "BATCHES", (2,))
    monkeypatch.setattr(ladder, "_TURN_S", 0.0)
    monkeypatch.setattr(ladder, "_WARM", 2)
    monkeypatch.setattr(rungs, "MEASURE_S", 0.1)
    return Settings(model=tiny.TINY, cache_dir=tmp_path / "cache", threads=1)


def within(name: str, folders: tuple[str, ...]) -> bool:
    """Whether a file is, or lies below, one of these."""
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def states(contender: ProcessGroup) -> set[str]:
    return {psutil.Process(process._process.pid).status() for process in contender._processes}


@pytest.mark.long
def test_rungs_take_turns_in_processes_of_their_own(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process runs in its turns only; what cannot be prepared is left out; what the processes ran is recorded.

    What draws here is the engine alone: tests/lab/bench/test_rungs.py has the stock pipeline, in this process.
    """
    seen: list[tuple[ProcessGroup, set[str]]] = []
    whole = ProcessGroup.draw

    def watched(self: ProcessGroup, first: int, count: int) -> tuple[float, list[list[float]]]:
        drawn = whole(self, first, count)
        seen.append((self, states(self)))
        return drawn

    monkeypatch.setattr(ProcessGroup, "draw", watched)
    monkeypatch.setattr(launcher, "PREPARED_S", 120.0)
    start, left_out = Launcher.start, {"+compile": "torch.compile took more than 0.001 s", "+gate": "one step"}

    def impatient(self: Launcher, name: str, *given: Any) -> Any:
        if name in left_out:
            raise LeftOut(left_out[name])
        return start(self, name, *given)

    monkeypatch.setattr(Launcher, "start", impatient)
    order = ("+compile", "step-batching", "+gate")
    result = ladder.run(settings, steps=1, pictures=4, results=tmp_path, rungs=order, compile_limit_s=0.0)
    assert [rung["name"] for rung in result["rungs"]] == ["step-batching"]
    assert result["left_out"] == left_out
    assert len(seen) == 3 and all(states == {psutil.STATUS_STOPPED} for _, states in seen), "after a warm-up, two turns"
    stored = json.loads((tmp_path / "ladder.json").read_text())
    assert stored["left_out"] == result["left_out"] and stored["rungs"][0]["speedup"] == 1.0
    rooms = stored["provenance"]["rooms"]
    assert "build.py" in rooms["workers"] and "engine.py" in rooms["core/batching"], "the children's modules"
    imported = {name for name in seen[0][0].imported if not name.startswith("lab/")}
    assert {"core/kernels/device.py", "core/threads.py", "core/ops/ops.py"} <= imported
    assert [name for name in imported if not within(name, provenance.WORKER)] == [], "of workers that do not report"
    told = [line.split(" pictures/s")[0].rpartition(" ")[0] for line in capsys.readouterr().err.splitlines()]
    assert [line for line in told if line.startswith("turn ")] == [
        "turn 1 of 2: step-batching", "turn 2 of 2: step-batching",
    ]  # fmt: skip
    left = [child for child in psutil.Process().children() if "lab.bench.rungs" in " ".join(child.cmdline())]
    assert not left, "every process has ended"


def test_no_rung_at_all_is_an_error(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def left_out(*_: Any) -> Any:
        raise LeftOut("guidance ends after one step at least")

    monkeypatch.setattr(Launcher, "start", left_out)
    with pytest.raises(record.BenchError, match="guidance ends"):
        ladder.run(settings, steps=1, pictures=2, results=tmp_path, rungs=("+gate",))
    with pytest.raises(record.BenchError, match="--rungs: there is no stairs"):
        ladder.run(settings, steps=1, pictures=2, results=tmp_path, rungs=("stairs",))


class Fixed:
    """A contender whose turns have these rates, after a warm-up."""

    processes = 1

    def __init__(self, rates: list[float]) -> None:
        self._rates: Iterator[float] = iter([1.0, *rates])
        self.drawn: list[range] = []

    def draw(self, first: int, count: int) -> tuple[float, list[list[float]]]:
        self.drawn.append(range(first, first + count))
        return count / next(self._rates), [[]]


@given(rates=st.lists(st.lists(st.floats(0.1, 100.0), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_rungs_rate_is_the_median_of_its_turns(rates: list[list[float]]) -> None:
    """And no image is drawn twice."""
    turns = Turns(3)
    contenders = {str(number): Fixed(each) for number, each in enumerate(rates)}
    for name, contender in contenders.items():
        turns.add(name, contender)  # type: ignore[arg-type]
    found = turns.run()
    assert found == {str(k): pytest.approx((sorted(each)[1], min(each), max(each))) for k, each in enumerate(rates)}
    drawn = [image for contender in contenders.values() for part in contender.drawn for image in part]
    assert len(drawn) == len(set(drawn))
