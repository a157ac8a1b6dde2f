"""The engine on a GPU: graphs are recorded while it draws, and what is drawn does not notice."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.image import ImageParameters
from contract.plan import AUTO, DeepCache
from core.batching.engine import Engine
from core.batching.request import Request
from core.graphs import ExecutableKey
from pipeline.backends.backend import Widths
from pipeline.backends.graphs import GraphBackend
from pipeline.checkpoints.load import ImageModel, load
from pipeline.runner import ImageRunner

WIDTHS = (2, 4, 8)


@cache
def model(folder: Path, precision: str) -> ImageModel:
    return load(str(folder), precision=precision, device="cuda")


def runner_of(folder: Path, precision: str) -> ImageRunner:
    return ImageRunner(GraphBackend(model(folder, precision), Widths(8, 8, WIDTHS)), max_requests=32)


def cloned(made: Any) -> list[torch.Tensor]:
    return [one.clone() for one in (made if isinstance(made, tuple) else (made,))]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_replay_has_the_bits_of_the_same_kernels_one_by_one(folder: Path, precision: str) -> None:
    with closing(runner_of(folder, precision)) as runner:
        runner.prepare(measure_s=600)
        backend, size = runner.backend, (64, 64)
        assert isinstance(backend, GraphBackend)
        for phase, rows in [*((p, r) for p in ("deep", "shallow", "shallow-resnet") for r in WIDTHS), ("vae", 4)]:
            key = ExecutableKey(phase, rows, size)
            assert backend.graphs.has(key)
            for seed in range(3):
                found = []
                for function in (backend._layers[phase], backend._function(key)):
                    with torch.inference_mode():
                        found.append(cloned(backend._timer.example(phase, rows, size, seed)(function)))
                for one, other in zip(*found, strict=True):
                    assert torch.isfinite(one.float()).all() and torch.equal(one, other), (phase, rows)


def orders(count: int) -> list[ImageParameters]:
    """Pictures of all kinds, every third one deterministic."""
    schedules = (None, AUTO, DeepCache(2), None)
    return [
        ImageParameters(
            f"a hat of kind {i}", i, 64, 64, steps=4 + i % 3, guidance_scale=(5.0, 1.0)[i % 2],
            deepcache=schedules[i % 4], deterministic=i % 3 == 0,
        )
        for i in range(count)
    ]  # fmt: skip


def drawn(runner: ImageRunner, wanted: list[ImageParameters]) -> list[Any]:
    with Engine([runner]) as engine:
        requests = [Request(str(i), "image", one) for i, one in enumerate(wanted)]
        return [future.result(120) for future in [engine.submit(request) for request in requests]]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_all_graphs_are_recorded_while_pictures_are_drawn(folder: Path, precision: str) -> None:
    wanted = orders(24)
    with (
        closing(runner_of(folder, precision)) as beforehand,
        closing(runner_of(folder, precision)) as meanwhile,
    ):
        beforehand.prepare(measure_s=600)
        expected = drawn(beforehand, wanted)
        meanwhile.prepare(measure_s=0.0)  # only says what is wanted
        found = drawn(meanwhile, wanted)
        assert meanwhile.recording.wait(120)
        recorded, total = meanwhile.backend.graphs.counts
        assert recorded == total == beforehand.backend.graphs.counts[0]
        for one, before, now in zip(wanted, expected, found, strict=True):
            if one.deterministic:  # what was begun before there were graphs ran without, and its fingerprint says so
                assert before.png() == now.png() or before.fingerprint["executable"] != now.fingerprint["executable"]
        again = drawn(meanwhile, wanted)
        for one, before, now in zip(wanted, expected, again, strict=True):
            if one.deterministic:
                assert before.png() == now.png()


def test_closing_while_graphs_are_recorded_leaves_the_device_usable(folder: Path) -> None:
    for _ in range(3):
        runner = runner_of(folder, "bf16")
        runner.prepare(measure_s=0.0)
        runner.close()
        recorded, wanted = runner.backend.graphs.counts
        assert recorded < wanted, "it was closed in the middle"
    assert float(torch.ones(8, device="cuda").sum()) == 8.0


def test_memory_that_runs_out_costs_a_graph_and_no_picture(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = replace(orders(1)[0], deepcache=None)
    with closing(runner_of(folder, "bf16")) as runner:
        recordings = runner.backend.graphs
        deep = recordings._graphs._phases["deep"]

        def greedy(*arguments: Any, **options: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                torch.empty(torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")
            return deep(*arguments, **options)

        recordings._graphs._phases = {**recordings._graphs._phases, "deep": greedy}
        with Engine([runner]) as engine:
            first = engine.submit(Request("first", "image", one)).result(120)
            assert runner.recording.wait(120)
            second = engine.submit(Request("second", "image", one)).result(120)
        assert "deep at 8 rows" in caplog.text and "runs without a graph (OutOfMemoryError" in caplog.text
        assert runner.backend.graphs.counts[0] == runner.backend.graphs.counts[1] - 1 > 0
        assert first.png() == second.png()
