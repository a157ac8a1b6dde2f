"""Cost curves of phases: what is counted, and that examples have the shapes of requests."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from core.graphs import ExecutableKey
from pipeline.backends.phases import DEEP, KEYS, STEPS, TEXT, VAE, VAE_TINY, on_torch
from pipeline.backends.timing import PhaseCosts, PhaseTimer
from tests.pipeline.worlds import SHAPES, model, tiny_model

SIZE = (32, 32)


def key(rows: int, phase: str = DEEP) -> ExecutableKey:
    return ExecutableKey(phase, rows, SIZE)


def test_the_first_run_without_a_graph_is_not_counted_where_it_compiles() -> None:
    costs = PhaseCosts(skip_first=True)
    for rows in (2, 4):
        costs.observe(key(rows), False, 9.0)
    assert costs.measured() == {}
    costs.warmed(key(6))
    for rows in (2, 6):
        costs.observe(key(rows), False, 0.5)
    costs.observe(key(8), True, 0.1)
    assert costs.measured() == {(DEEP, SIZE, False): {2: 0.5, 6: 0.5}, (DEEP, SIZE, True): {8: 0.1}}
    assert costs.curve(DEEP, SIZE, False)(2) == 0.5 and costs.curve(DEEP, SIZE, True)(8) == 0.1


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_examples_run_every_phase(shape: str) -> None:
    made = model(shape)
    denoiser, _, phases, _ = on_torch(made)
    timer = PhaseTimer(made, PhaseCosts(), denoiser)
    side, scale = made.native, made.vae_scale
    channels = made.denoiser.config.in_channels
    for phase in STEPS:
        output, *_ = timer.example(phase, 3, (side, side))(phases[phase])
        assert output.shape == (3, channels, side // scale, side // scale) and output.isfinite().all()
    assert timer.example(VAE, 2, (side, side))(phases[VAE])[0].shape == (2, side, side, 3)
    with_tiny = on_torch(tiny_model(shape)).phases
    assert timer.example(VAE_TINY, 2, (side, side))(with_tiny[VAE_TINY])[0].shape == (2, side, side, 3)
    hidden, pooled = timer.example(TEXT, 2, (0, 0))(phases[TEXT])
    assert hidden.shape[0] == pooled.shape[0] == 2
    assert phases[KEYS](hidden).shape == (2, hidden.shape[1], denoiser.text_width)


def test_timing_leaves_out_the_first_run_and_ends_when_time_is_up() -> None:
    costs, ran = PhaseCosts(), list[int]()
    timer = PhaseTimer(model("plain"), costs, on_torch(model("plain")).denoiser)

    def slow(*_: Any, **__: Any) -> tuple[torch.Tensor]:
        ran.append(1)
        if len(ran) == 1:
            time.sleep(0.2)
        return (torch.zeros(1),)

    assert timer(key(2), slow, False) and len(ran) == 3
    assert costs.measured()[DEEP, SIZE, False].keys() == {2}
    assert not timer(key(4), slow, False, until=time.monotonic()) and len(ran) == 3
    assert costs.measured()[DEEP, SIZE, False].keys() == {2}
