"""Mixtures of experts: quantized as stacks, written and read again; weights are held once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.quant.grouped import StackedLinear
from core.quant.linear import Int8Linear
from llm.backends.backend import KERNELS
from llm.backends.select import select
from llm.checkpoints.load import load
from llm.checkpoints.quantized import Layerwise, make, quantize
from llm.families import tiny
from llm.families.experts import Experts
from tests.llm import stage
from tests.llm.checkpoints.test_load import logits


def test_experts_share_transformers_weights() -> None:
    network, _ = tiny.make(tiny.SHAPES[tiny.MIXTRAL_TINY])
    theirs = network.model.layers[0].mlp.experts
    ours = Experts(theirs).gate_up
    assert isinstance(ours, StackedLinear) and ours.weight.data_ptr() == theirs.gate_up_proj.data_ptr()


@pytest.mark.parametrize("layerwise", [None, Layerwise(search=True, gptq=True)])
def test_a_written_mixture_is_what_was_made(layerwise: Layerwise | None, tmp_path: Path) -> None:
    """With a scale for each output channel of each expert; on kernels, also after the model's own weights are gone."""
    shape = tiny.SHAPES[tiny.QWEN3_MOE_TINY]
    tiny.save(tmp_path / "moe", shape)
    source = load(str(tmp_path / "moe"))
    texts = stage.prompts(source, 6)
    report = make(source, texts, tmp_path / "moe", layerwise=layerwise)
    assert not report.skipped and "model.layers.0.mlp.experts.down" in report.changed
    loaded, made = load(str(tmp_path / "moe"), precision="int8"), quantize(source, texts, layerwise=layerwise)
    down = loaded.network.model.layers[1].mlp.experts.down
    assert isinstance(down, Int8Linear) and down.scale.shape == (4 * 32,)
    ids = torch.tensor([texts[0][:12]])
    size = {"pages": 4, "sequences": 1, "context": 64}
    runs = [select(model, kernels=stage.kernels(), **size) for model in (loaded, made)]  # type: ignore[arg-type]
    assert runs[0].kind == KERNELS
    first = logits(runs[0], ids, [12])
    runs[1].release()
    assert torch.equal(logits(runs[1], ids, [12]), first) and torch.equal(logits(runs[1], ids, [5, 7]), first)
