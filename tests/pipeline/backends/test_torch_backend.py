"""Eager and compiled code in one runner: pictures do not notice when compiled code takes over."""

from __future__ import annotations

import copy
import gc
from functools import partial
from pathlib import Path

import pytest
import torch

from contract.image import ImageParameters
from core.graphs import ExecutableKey, compiler
from pipeline.backends.backend import BatchGroup
from pipeline.backends.phases import DEEP, VAE
from pipeline.backends.torch_backend import TorchBackend
from pipeline.checkpoints.tiny import SDXLShape
from tests.pipeline import worlds
from tests.pipeline.worlds import Crank, Watching, check_parity, model, solo, together

SIZE = (32, 32)
# One level holds all kinds of layers but those that change the size, and half of the code to be compiled.
SHAPE = "one-level"
worlds.MORE[SHAPE] = SDXLShape(channels=(16,), transformers=(1,), heads=(2,))


def wanted(seed: int, deterministic: bool = False) -> ImageParameters:
    return ImageParameters("a red cat", seed, *SIZE, steps=6, deterministic=deterministic)


@pytest.mark.long
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler is installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own modules
@pytest.mark.parametrize("backend_name", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_code_takes_over_while_pictures_are_drawn(
    backend_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced whole and at fixed shapes; only the long test has C++ written and compiled of the graphs, for a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend_name))
    monkeypatch.delattr("os.setpriority", raising=False)  # nothing is served here that compiling should give way to
    companion = Watching(copy.deepcopy(model(SHAPE)))
    runner = Watching(copy.deepcopy(model(SHAPE)), compiled=True, cache=tmp_path, buckets=(4,), deterministic_rows=4)
    eager = Watching(model(SHAPE), deterministic_rows=4)
    backend = runner.backend
    assert isinstance(backend, TorchBackend)
    expected = solo(eager, wanted(3, True)).png()
    crank = Crank(runner)
    for seed in (1, 2):
        crank.submit(f"free-{seed}", wanted(seed))
        crank.submit(f"fixed-{seed}", wanted(3, True))
        for _ in range(4):
            crank.turn()
    assert {r.work.mode for r in crank.scheduler.live.values() if r.work} == {"", "eager"}
    for phase, rows in ((DEEP, 4), (VAE, 1)):  # as `prepare` asks, less what this test does not use
        backend._executables.want(ExecutableKey(phase, rows, SIZE), backend._timer.example(phase, rows, SIZE))
    assert backend.wait(900)
    assert not backend._executables.failed
    crank.submit("late", wanted(3, True))
    del companion
    gc.collect()
    with torch.compiler.set_stance("fail_on_recompile"):  # no guard is on what another model's end changes
        pictures = crank.pictures()

    # Those that began in eager mode end in it, to the byte; the late one says that it is compiled.
    for seed in (1, 2):
        assert pictures[f"fixed-{seed}"].png() == expected
        check_parity(SHAPE, wanted(seed), pictures[f"free-{seed}"])
    late = pictures["late"]
    assert late.fingerprint["executable"] == "compiled" and late.fingerprint["bucket"] == 4
    check_parity(SHAPE, wanted(3), late)
    # Compiled and deterministic: equal bytes at every position, with companions and without.
    for position in range(2):
        asked = [wanted(3 if other == position else 40 + other, True) for other in range(2)]
        assert together(runner, asked, lambda: 0)[position].png() == late.png()
    runner.close()


def test_a_free_request_takes_whichever_is_cheaper_by_what_was_seen() -> None:
    """Compiled once it is there, so that it is timed, and only if a bucket is wide enough."""
    runner = Watching(model("plain"), buckets=(4,), deterministic_rows=4)
    backend, group = runner.backend, BatchGroup(DEEP, SIZE)
    assert isinstance(backend, TorchBackend)
    backend._executables._compiled[ExecutableKey(DEEP, 4, SIZE)] = lambda *_: None  # chosen here, and not called
    for _ in range(3):
        backend.costs.observe(ExecutableKey(DEEP, 3, SIZE), False, 0.001)
        backend.costs.observe(ExecutableKey(DEEP, 5, SIZE), False, 0.001)
    assert [backend.plan(group, rows)[1:3] for rows in (3, 5)] == [(True, 4), (False, 5)]
    backend.costs.observe(ExecutableKey(DEEP, 4, SIZE), True, 0.002)
    assert not backend.plan(group, 3).compiled
    for _ in range(30):
        backend.costs.observe(ExecutableKey(DEEP, 3, SIZE), False, 0.004)
    assert backend.plan(group, 3).compiled
    runner.close()


def test_measuring_fills_the_curves_within_its_budget() -> None:
    runner = Watching(model("plain"), buckets=(2, 4), deterministic_rows=4)
    runner.backend.prepare(measure_s=0.0)
    assert runner.backend.costs.measured() == {}
    runner.backend.prepare(measure_s=60.0)
    assert set(runner.backend.costs.measured()[DEEP, SIZE, False]) == {2, 4}
    assert set(runner.backend.costs.measured()[VAE, SIZE, False]) == {1, 4}
    runner.close()
