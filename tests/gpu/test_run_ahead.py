"""Iterations that run ahead of the device: pictures are those of a host that waits for each."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.backends.run_ahead import AHEAD_S
from tests.gpu.test_recording import drawn, orders, runner_of


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_pictures_do_not_depend_on_how_far_the_host_is_ahead(folder: Path, precision: str) -> None:
    wanted = orders(24)

    def drawn_ahead(seconds: float) -> list[Any]:
        runner._builder._run_ahead._seconds = seconds
        return drawn(runner, wanted)

    with closing(runner_of(folder, precision)) as runner:
        runner.prepare(measure_s=600)
        for one, before, now in zip(wanted, drawn_ahead(0.0), drawn_ahead(AHEAD_S), strict=True):
            if one.deterministic:
                assert before.png() == now.png(), one
        curve = runner.backend.costs.measured()
        assert any(key[0] == "deep" and key[2] for key in curve), "iterations are timed by the device's events"
        assert all(seconds > 0 for rows in curve.values() for seconds in rows.values())
