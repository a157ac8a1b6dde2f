"""The properties of models, as transformers lays them out, that our attention and our kernels rely on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.ops.ops import Activation

GEMMA = ("gemma2", "gemma3_text")
MIXTURES = ("mixtral", "qwen3_moe")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", *MIXTURES, *GEMMA)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position only
_ACTS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LLAMA4 = "llama4_text"
# Whose attention passes the window of each layer on, which has been compared with transformers'.
_WINDOWED = (
    *MODEL_TYPES, "cohere2", "ministral", "olmo3", "phi3", "starcoder2",
)  # fmt: skip


def body(network: Any) -> Any:
    """A model without its head, which a model that only encodes lacks."""
    return getattr(network, "model", network)


def windows(config: Any) -> tuple[int, ...]:
    """How many of the last tokens each layer attends to; 0: all. Raises ValueError for other kinds of attention."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    if not isinstance(window, int) or not 0 <= window < 2**31:  # kernels count with it
        raise ValueError(f"has a sliding window of {str(window)[:40]} tokens, which is none")
    if kinds is None:  # the window of all layers
        kinds = [_SLIDING if window else _FULL] * config.num_hidden_layers
    known = {_FULL, _SLIDING, *([_CHUNKED] if config.model_type == LLAMA4 else [])}
    if unknown := sorted({*kinds} - known):
        raise ValueError(f"has layers of {unknown[0].replace('_', ' ')}, which the cache does not know")
    if _SLIDING in kinds and config.model_type not in _WINDOWED:
        raise ValueError(f"has sliding windows, which are not known of {config.model_type}")
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def chunk(config: Any, layer: int) -> int:
    """Return the tokens of a chunk, outside of which tokens of a layer attend to none (Llama 4); 0: all."""
    chunked = config.model_type == LLAMA4 and config.layer_types[layer] == _CHUNKED
    return int(config.attention_chunk_size) if chunked else 0


def temper_(network: Any) -> None:
    """Leave the temperatures of Llama 4's queries to our attention: transformers takes rows for positions."""
    for module in network.modules():
        if network.config.model_type == LLAMA4 and getattr(module, "attn_temperature_tuning", False):
            module.attn_temperature_tuning, module.tempered = False, not module.use_rope


def temperatures(module: Any, positions: Tensor) -> Tensor:
    """What the queries of a tempered layer at these positions are multiplied by (Nakanishi, 2025)."""
    steps = torch.floor((positions.float() + 1) / module.floor_scale)
    return torch.log1p(steps) * float(module.attn_scale) + 1


def check_attention(network: Any) -> None:
    """Reject a model whose attention is not ours, on any kernels. Raises ValueError."""
    config = network.config
    windows(config)
    if getattr(config, "attn_logit_softcapping", None) is not None and config.model_type != "gemma2":
        raise ValueError("caps the logits of its attention, which ours does not")
    if any(getattr(module, "is_causal", True) is False for module in network.modules()):
        raise ValueError("attends to later tokens, which the cache does not hold")
    if any(name.endswith("sinks") for name, _ in network.named_parameters()):
        raise ValueError("has sinks in its attention, which ours has not")


def check(network: Any) -> None:
    """Reject, by name, what our kernels would compute differently from transformers. Raises ValueError."""
    config = network.config
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"the native kernels support {', '.join(MODEL_TYPES)}, not {config.model_type}")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if config.model_type == "gemma3_text" else [rope]:
        if (kind := parameters.get("rope_type", "default")) not in _ROPE_TYPES:
            raise ValueError(f"the native kernels do not support rotary positions of type {kind}")
    if _activation(config) not in _ACTS:
        raise ValueError(f"the native kernels support SwiGLU and GeGLU by tanh, not {_activation(config)}")
    check_attention(network)


def activation(config: Any) -> Activation:
    """The activation of gates, which `check` accepts."""
    return _ACTS[_activation(config)]


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


def angles(network: Any, positions: int, device: torch.device) -> list[Tensor]:
    """Cosines, then sines, of half a head's channels at the first so many positions: fp32 [positions, d], by layer."""
    config, rotary = network.config, body(network).rotary_emb
    x, places = torch.zeros(1, device=device), torch.arange(positions, device=device)[None]
    kinds: list[Any] = [None] * config.num_hidden_layers
    if config.model_type == "gemma3_text":
        kinds = config.layer_types
    tables = {kind: _angles(*(rotary(x, places) if kind is None else rotary(x, places, kind))) for kind in {*kinds}}
    return [tables[kind] for kind in kinds]


def _angles(cosines: Tensor, sines: Tensor) -> Tensor:
    half = cosines.shape[-1] // 2
    return torch.cat([part[0, :, :half] for part in (cosines, sines)], dim=-1).float().contiguous()
