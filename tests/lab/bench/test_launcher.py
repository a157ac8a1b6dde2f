"""The rungs' processes, and the stock pipeline at its best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core import graphs
from core.config import Settings
from core.threads import cores
from lab.bench import launcher
from lab.bench.harness import variants
from lab.bench.harness.processes import AnsweringProcess
from lab.bench.harness.turns import LeftOut
from lab.bench.harness.variants import BestVariant, Variant
from lab.bench.launcher import COMMAND, Launcher
from lab.bench.rungs import first_request
from pipeline.checkpoints import tiny
from tests.core.quant.stage import CACHE


@pytest.mark.long
def test_a_process_that_takes_too_long_or_ends_is_left_out() -> None:
    settings = Settings(model=tiny.TINY, cache_dir=CACHE.parent, threads=1)
    environment = launcher.environment_of(settings, launcher.NATIVE)
    request = first_request("step-batching", settings, 1, None, None)
    slow = AnsweringProcess(request, environment, COMMAND)
    with slow, pytest.raises(LeftOut, match="took more than 0 s"):
        slow.answer(0.0)
    with (
        AnsweringProcess(request | {"rung": "stairs"}, environment, COMMAND) as wrong,
        pytest.raises(LeftOut, match="KeyError"),
    ):
        wrong.answer()


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
    monkeypatch.setattr(variants.json, "dumps", str)
    monkeypatch.setattr(Launcher, "start", lambda *_: (Silent(), {}))
    stock = Launcher(settings, 1, None, {}, 60.0)
    variant, count, trials = launcher.best_stock(stock)
    assert variant == Variant(4, 1 if count > 1 else cores(), channels_last=True, bf16=True, compile=True)
    tried_variants = [trial["variant"] for trial in trials]
    assert count == expected and len(tried_variants) == len(set(tried_variants))
    single, count_alone, _ = launcher.best_stock(stock, alone=True)
    assert single == Variant(1, cores(), channels_last=True, bf16=True, compile=True) and count_alone == 1


@pytest.mark.long
def test_avx2_is_a_run_of_the_same_command() -> None:
    """It limits torch and our kernels, and has a file of its own."""
    settings = Settings(model=tiny.TINY, cache_dir=CACHE.parent)  # where compiled kernels are kept between runs
    environment = launcher.environment_of(settings, launcher.AVX2)
    assert environment["ATEN_CPU_CAPABILITY"] == "avx2" and Path(environment["CXX"]).is_file()
    with AnsweringProcess(first_request("+int8", settings, 1, None, None), environment, COMMAND) as process:
        about = process.answer()
    assert about["capability"] == "AVX2" and about["kernels"] == "avx2"
