"""CLIP's text encoders written down once, near transformers' on torch and on the CPU kernels."""

from __future__ import annotations

import pytest
import torch

from core.ops.cpu import CpuLowering
from core.ops.reference import TorchLowering
from pipeline.families.sdxl.clip import ClipText
from tests.core.quant.stage import check_close, kernels


@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize(("act", "end"), [("quick_gelu", 2), ("gelu", 49)])
@torch.inference_mode()
def test_its_states_are_those_of_transformers(act: str, end: int, projected: bool, backend: str) -> None:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=11, projection_dim=24, hidden_act=act, bos_token_id=48, eos_token_id=end,
    )  # fmt: skip
    torch.manual_seed(0)
    encoder = (CLIPTextModelWithProjection if projected else CLIPTextModel)(config).eval()
    lowering = TorchLowering(torch.float32) if backend == "torch" else CpuLowering(kernels(), encoder)
    ids = torch.randint(3, 48, (3, 11))
    for row, at in enumerate((2, 7, 10)):
        ids[row, at:] = 49
    expected = encoder(ids, output_hidden_states=True)
    hidden, pooled = ClipText(lowering, encoder)(ids)
    assert expected.hidden_states[-2].std() > 0.01
    check_close(hidden, expected.hidden_states[-2], relative=1e-5)
    assert (pooled is not None) == projected
    if pooled is not None:
        assert expected.text_embeds.std() > 0.01
        check_close(pooled, expected.text_embeds, relative=1e-5)
