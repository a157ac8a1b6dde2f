"""Prompts' hidden states on every lowering: transformers' own, and in a batch what they are alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from core.ops.cpu import CpuLowering
from core.ops.cuda import CudaLowering
from core.ops.ops import Lowering
from core.ops.reference import TorchLowering
from core.quant.convert import quantize_
from core.quant.linear import Int8Linear
from core.quant.statistics import Statistics
from llm.families import tiny
from llm.families.encoder import MULTIPLE, PromptEncoder
from llm.families.recipe import llama
from tests.core.quant.stage import kernels

LOWERINGS: dict[str, Callable[[nn.Module], Lowering]] = {
    "torch": lambda network: TorchLowering(torch.float32),
    "cpu": lambda network: CpuLowering(kernels(), network),
    "cuda": lambda network: CudaLowering(torch.float32, 8),  # on a CPU its kernels' references
}
LENGTHS = (1, 40, 17, 33)


def text_encoder(seed: int = 0) -> Any:
    """A Qwen3 without a head, as Z-Image has one, with weights in all its norms."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, initializer_range=0.1,
    )  # fmt: skip
    network = Qwen3Model(config).eval().requires_grad_(False)
    for name, weight in network.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight, mean=1.0, std=0.3)
    return network


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 300, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.inference_mode()
def wanted(network: Any, layer: int = -2) -> list[Tensor]:
    """Transformers' states, of each prompt alone."""
    return [
        network(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[layer][0]
        for ids in prompts()
    ]


def check(found: list[Tensor], expected: list[Tensor], slack: float = 1e-5) -> None:
    for state, theirs in zip(found, expected, strict=True):
        assert state.shape == theirs.shape
        assert (state - theirs).norm() <= slack * theirs.norm()


@pytest.mark.parametrize("name", LOWERINGS)
def test_states_are_transformers(name: str) -> None:
    network = text_encoder()
    expected, first = wanted(network), wanted(network, 1)
    lowering = LOWERINGS[name](network)
    check(PromptEncoder(lowering, network)(prompts()), expected)
    check(PromptEncoder(LOWERINGS[name](network), network, layers=1)(prompts()), first)


@pytest.mark.parametrize("name", LOWERINGS)
def test_a_prompts_states_are_those_of_the_prompt_alone(name: str) -> None:
    """On the CPU's kernels bit for bit, also beside longer prompts."""
    network = text_encoder()
    encoder = PromptEncoder(LOWERINGS[name](network), network)
    together = encoder(prompts())
    for ids, state in zip(prompts(), together, strict=True):
        (alone,) = encoder([ids])
        assert torch.equal(alone, state) if name == "cpu" else (alone - state).norm() <= 1e-5 * state.norm()


@pytest.mark.parametrize("name", LOWERINGS)
def test_int8_layers_are_near_their_modules(name: str) -> None:
    network = quantized(text_encoder())
    expected = wanted(network)
    check(PromptEncoder(LOWERINGS[name](network), network)(prompts()), expected, 1e-5 if name == "torch" else 0.02)
    check(expected, wanted(text_encoder()), 0.05)  # and those near the unquantized ones


def quantized(network: Any) -> Any:
    statistics = Statistics("")
    made = copy.deepcopy(network)
    with statistics.observe(made, llama().targets(made), 0), torch.inference_mode():
        for ids in prompts():
            made(torch.tensor([ids]), use_cache=False)
    report = quantize_(made, llama(), statistics)
    assert len(report.changed) == 21 and isinstance(made.layers[0].self_attn.q_proj, Int8Linear)
    return made


def test_widths_are_few() -> None:
    """Prompts of all lengths share programs."""
    network = text_encoder()
    lowering = CpuLowering(kernels(), network)
    encoder = PromptEncoder(lowering, network)
    for length in range(1, 2 * MULTIPLE + 1):
        encoder([[5] * length])
    _, buffers = lowering.size_bytes
    assert {first[:2] for _, first in buffers} == {(1, MULTIPLE), (1, 2 * MULTIPLE)}


def test_other_models_are_refused() -> None:
    network = text_encoder()
    network.config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="GeGLU by tanh, not gelu"):
        PromptEncoder(TorchLowering(torch.float32), network)
    windowed, _ = tiny.make(tiny.SHAPES[tiny.MISTRAL_TINY])
    with pytest.raises(ValueError, match="with the attention of mistral"):
        PromptEncoder(TorchLowering(torch.float32), windowed)
