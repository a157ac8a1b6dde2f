"""What runs a model where: our CPU kernels, the fused GPU kernels, or torch; and why not."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.kernels.kv_cache import TokenBatch
from llm.backends.backend import FUSED, KERNELS, TORCH, TextBackend
from llm.backends.select import select
from llm.checkpoints.load import TextModel, TextModelError, load
from llm.checkpoints.quantized import quantize
from llm.families import tiny
from tests.llm import stage

CUDA = torch.cuda.is_available()
SIZE: dict[str, Any] = {"pages": 12, "sequences": 3, "context": 64}


def logits_of(execution: TextBackend) -> torch.Tensor:
    execution.cache.place(0, [3, 7])
    return execution.forward(TokenBatch.of([*range(40, 60)], [*range(20)], [0] * 20, [19])).logits.clone()


def test_weights_of_4_bits_with_inputs_in_int8_run_on_our_kernels_as_int8() -> None:
    model = quantize(load(tiny.TINY, precision="fp32"), [[*range(3, 40)]], scheme="w4a8")
    native = select(model, kernels=stage.kernels(), **SIZE)
    assert native.kind == KERNELS
    found, expected = logits_of(native), logits_of(select(model, **SIZE))
    assert (found - expected).norm() <= 1e-3 * expected.norm()


def test_fp8_is_refused_on_a_cpu() -> None:
    with pytest.raises(TextModelError, match="fp8 does not run on a CPU; take int8 or fp32"):
        select(replace(stage.small(), precision="fp8"), kernels=stage.kernels(), **SIZE)


def test_pages_in_e4m3_run_on_torch_where_there_is_no_gpu(caplog: pytest.LogCaptureFixture) -> None:
    model = stage.small()
    with caplog.at_level(logging.WARNING):
        eight = select(model, kv="fp8", kernels=stage.kernels(), **SIZE)
    assert eight.kind == TORCH and "not in E4M3" in caplog.text
    found, exact = logits_of(eight), logits_of(select(model, **SIZE))
    # Each key and value loses up to a sixteenth of itself.
    assert 0 < (found - exact).norm() < 0.1 * exact.norm()


def moved(model: TextModel, dtype: torch.dtype) -> TextModel:
    network = model.network.to("cuda", dtype)
    return replace(model, network=network, device=torch.device("cuda"), dtype=dtype)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, FUSED), (torch.float32, TORCH)])
def test_on_a_gpu_fused_kernels_run_all_but_fp32(
    dtype: torch.dtype, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        execution = select(moved(load(tiny.TINY), dtype), **SIZE)
    assert execution.kind == kind
    assert (kind == FUSED) != ("not fp32" in caplog.text)
    execution.prepare(3)
    logits = logits_of(execution)
    assert logits.shape == (1, 262) and logits.dtype == torch.float32 and bool(logits.isfinite().all())


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_texts_lane_submits_to_its_own_stream_of_high_priority() -> None:
    from llm.lane import StreamLane

    lane = StreamLane("text", torch.device("cuda"))
    streams = [lane.call(torch.cuda.current_stream) for _ in range(2)]
    lane.close()
    assert streams[0] == streams[1] != torch.cuda.default_stream() and streams[0].priority < 0


@pytest.mark.parametrize("native", [True, False], ids=["programs", "torch"])
def test_the_states_and_features_of_a_forward_outlive_the_next_one(native: bool) -> None:
    backend = select(stage.small(), kernels=stage.kernels() if native else None, features=(0, 1), **SIZE)
    assert backend.kind == (KERNELS if native else TORCH)
    backend.cache.place(0, [3, 7])
    first = backend.forward(TokenBatch.of([*range(40, 50)], [*range(10)], [0] * 10, [9], [*range(4, 10)]))
    assert first.states is not None and first.features is not None and not first.recorded
    states, features = first.states.clone(), first.features.clone()
    second = backend.forward(TokenBatch.of([*range(60, 70)], [*range(10)], [0] * 10, [9], [*range(4, 10)]))
    assert second.states is not None and not torch.equal(second.states, states)
    assert torch.equal(first.states, states) and torch.equal(first.features, features)
    assert backend.forward(TokenBatch.of([70], [10], [0], [0])).states is None
