"""Iterations that run ahead of the device: pictures are those of a host that waits for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.batching.engine import Engine
from core.batching.request import Request
from pipeline.backends.run_ahead import AHEAD_S
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.quantization import quantized
from tests.gpu.test_recording import SHAPE, model, orders, runner_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its INT8 variant."""
    made = tiny.save(tmp_path_factory.mktemp("models") / "tiny", SHAPE)
    quantized.make(load(str(made)), ["a red hat", "a blue hat", "an old cat"], made)
    return made


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_pictures_do_not_depend_on_how_far_the_host_is_ahead(folder: Path, precision: str) -> None:
    runner, wanted = runner_of(model(folder, precision)), orders(24)
    ahead = runner._builder._run_ahead

    def drawn(seconds: float, name: str) -> list[Any]:
        ahead._seconds = seconds
        with Engine([runner]) as engine:
            requests = [Request(f"{name}-{i}", "image", one) for i, one in enumerate(wanted)]
            return [future.result(120) for future in [engine.submit(request) for request in requests]]

    try:
        runner.prepare(measure_s=600)
        waited, default = drawn(0.0, "waited"), drawn(AHEAD_S, "default")
        for one, before, now in zip(wanted, waited, default, strict=True):
            if one.deterministic:
                assert before.png() == now.png(), one
        curve = runner.backend.costs.measured()
        assert any(key[0] == "deep" and key[2] for key in curve), "iterations are timed by the device's events"
        assert all(seconds > 0 for rows in curve.values() for seconds in rows.values())
    finally:
        runner.close()
