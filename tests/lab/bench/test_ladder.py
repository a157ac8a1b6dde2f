"""The ladder at small scale: each rung in a process that runs in its own turns only, the stock pipeline at its best."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import graphs
from core.config import Settings
from core.threads import cores
from lab.bench import ladder, rungs
from lab.bench.harness import provenance, record
from lab.bench.ladder import BestVariant, Contender, Ladder, Process, Turns
from lab.bench.rungs import LeftOut, Variant, first_request
from pipeline.checkpoints import tiny
from tests.core.quant.stage import CACHE


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(ladder, "_ROUND", 2)
    monkeypatch.setattr(ladder, "BATCHES", (2,))
    monkeypatch.setattr(ladder, "_TURN_S", 0.0)
    monkeypatch.setattr(ladder, "_WARM", 2)
    monkeypatch.setattr(rungs, "MEASURE_S", 0.1)
    return Settings(model=tiny.TINY, cache_dir=tmp_path / "cache", threads=1)


def within(name: str, folders: tuple[str, ...]) -> bool:
    """Whether a file is, or lies below, one of these."""
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def states(contender: Contender) -> set[str]:
    return {psutil.Process(process._process.pid).status() for process in contender._processes}


@pytest.mark.long
def test_rungs_take_turns_in_processes_of_their_own(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process runs in its turns only; what cannot be prepared is left out; what the processes ran is recorded.

    What draws here is the engine alone: tests/lab/bench/test_rungs.py has the stock pipeline, in this process.
    """
    seen: list[tuple[Contender, set[str]]] = []
    whole = Contender.rate

    def watched(self: Contender, first: int, count: int) -> float:
        rate = whole(self, first, count)
        seen.append((self, states(self)))
        return rate

    monkeypatch.setattr(Contender, "rate", watched)
    monkeypatch.setattr(ladder, "_PREPARED_S", 120.0)
    start, left_out = Ladder.start, {"+compile": "torch.compile took more than 0.001 s", "+gate": "one step"}

    def impatient(self: Ladder, name: str, *given: Any) -> Any:
        if name in left_out:
            raise LeftOut(left_out[name])
        return start(self, name, *given)

    monkeypatch.setattr(Ladder, "start", impatient)
    order = ("+compile", "step-batching", "+gate")
    result = ladder.run(settings, steps=1, pictures=4, results=tmp_path, rungs=order, compile_limit_s=0.0)
    assert [rung["name"] for rung in result["rungs"]] == ["step-batching"]
    assert result["left_out"] == left_out
    assert len(seen) == 3 and all(states == {psutil.STATUS_STOPPED} for _, states in seen), "after a warm-up, two turns"
    stored = json.loads((tmp_path / "ladder.json").read_text())
    assert stored["left_out"] == result["left_out"] and stored["rungs"][0]["speedup"] == 1.0
    rooms = stored["provenance"]["rooms"]
    assert "build.py" in rooms["workers"] and "engine.py" in rooms["core/batching"], "the children's modules"
    imported = {name for name in seen[0][0].imported if not name.startswith("lab/bench/")}
    assert {"core/kernels/device.py", "core/threads.py", "core/ops/ops.py"} <= imported
    assert [name for name in imported if not within(name, provenance.WORKER)] == [], "of workers that do not report"
    told = [line.split(" pictures/s")[0].rpartition(" ")[0] for line in capsys.readouterr().err.splitlines()]
    assert [line for line in told if line.startswith("turn ")] == [
        "turn 1 of 2: step-batching", "turn 2 of 2: step-batching",
    ]  # fmt: skip
    left = [child for child in psutil.Process().children() if "lab.bench.rungs" in " ".join(child.cmdline())]
    assert not left, "every process has ended"


@pytest.mark.long
def test_a_process_that_takes_too_long_or_ends_is_left_out(settings: Settings) -> None:
    environment = ladder.environment_of(settings, ladder.NATIVE)
    request = first_request("step-batching", settings, 1, None, None)
    with Process(request, environment) as slow, pytest.raises(LeftOut, match="took more than 0 s"):
        slow.answer(0.0)
    with Process(request | {"rung": "stairs"}, environment) as wrong, pytest.raises(LeftOut, match="KeyError"):
        wrong.answer()


def test_no_rung_at_all_is_an_error(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def left_out(*_: Any) -> Any:
        raise LeftOut("guidance ends after one step at least")

    monkeypatch.setattr(Ladder, "start", left_out)
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

    def rate(self, first: int, count: int) -> float:
        self.drawn.append(range(first, first + count))
        return next(self._rates)


@given(rates=st.lists(st.lists(st.floats(0.1, 100.0), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_rungs_rate_is_the_median_of_its_turns(rates: list[list[float]]) -> None:
    """And no image is drawn twice."""
    turns = Turns(3)
    contenders = {str(number): Fixed(each) for number, each in enumerate(rates)}
    for name, contender in contenders.items():
        turns.add(name, contender)  # type: ignore[arg-type]
    found = turns.run()
    assert found == {str(k): (sorted(each)[1], min(each), max(each)) for k, each in enumerate(rates)}
    drawn = [image for contender in contenders.values() for part in contender.drawn for image in part]
    assert len(drawn) == len(set(drawn))


@pytest.mark.parametrize(("processes", "expected"), [(1.5, cores()), (1.0, 1)])
def test_the_stock_pipeline_is_measured_at_its_best(
    processes: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What brings at least 3% is taken, one after the other, and tried again after others; every trial is recorded."""
    if cores() == 1:
        pytest.skip("one core: nothing to run side by side")
    settings = Settings(model=tiny.TINY)
    batches = {(False, False): 8, (True, False): 16, (True, True): 4}  # the best one by bf16 and compiler

    def tried(self: BestVariant, started: list[Any], variant: Variant, limit_s: float = 0.0) -> float:
        rate = 1.0 * (processes if len(started) > 1 else 1.0)
        rate *= 1.5 if variant.batch == batches[variant.bf16, variant.compile] else 1.2 if variant.batch > 1 else 1.0
        rate *= (1.3 if variant.bf16 else 1.0) * (2.0 if variant.compile else 1.0)
        rate *= (1.1 if variant.bf16 else 0.9) if variant.channels_last else 1.0
        self._note({"variant": variant, "images_per_s": rate})
        return rate

    class Silent:
        def ask(self, request: Any) -> None:
            pass

    monkeypatch.setattr(BestVariant, "_tried", tried)
    monkeypatch.setattr(graphs, "compiler", lambda: "c++")
    monkeypatch.setattr(ladder.json, "dumps", str)
    monkeypatch.setattr(Ladder, "start", lambda *_: (Silent(), {}))
    stock = Ladder(settings, 1, None, {}, 60.0)
    variant, count, trials = ladder.best_stock(stock)
    assert variant == Variant(4, 1 if count > 1 else cores(), channels_last=True, bf16=True, compile=True)
    tried_variants = [trial["variant"] for trial in trials]
    assert count == expected and len(tried_variants) == len(set(tried_variants))
    single, count_alone, _ = ladder.best_stock(stock, alone=True)
    assert single == Variant(1, cores(), channels_last=True, bf16=True, compile=True) and count_alone == 1


def test_a_variant_that_fails_is_left_out_and_the_search_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure costs its process, whose late answer would be taken for the next variant's."""
    started: list[Variant] = []

    def start(variant: Variant, stack: ExitStack) -> Any:
        started.append(variant)
        stack.callback(lambda: ended.append(variant))
        return Silent()

    class Silent:
        def ask(self, request: Any) -> None:
            if request["variant"]["channels_last"]:
                raise LeftOut("took more than 300 s")

    ended: list[Variant] = []
    monkeypatch.setattr(BestVariant, "_tried", lambda self, processes, variant, *_: float(variant.batch))
    search = BestVariant(start, [{"batch": 2}, {"channels_last": True}, {"batch": 4}], Variant())
    assert search.find(processes=False) == (Variant(batch=4), 1)
    assert started == ended == [Variant(), Variant(batch=2)]
    assert [trial["left_out"] for trial in search.trials] == ["took more than 300 s"]


@pytest.mark.long
def test_avx2_is_a_run_of_the_same_command() -> None:
    """It limits torch and our kernels, and has a file of its own."""
    settings = Settings(model=tiny.TINY, cache_dir=CACHE.parent)  # where compiled kernels are kept between runs
    environment = ladder.environment_of(settings, ladder.AVX2)
    assert environment["ATEN_CPU_CAPABILITY"] == "avx2" and Path(environment["CXX"]).is_file()
    with Process(first_request("+int8", settings, 1, None, None), environment) as process:
        about = process.answer()
    assert about["capability"] == "AVX2" and about["kernels"] == "avx2"
