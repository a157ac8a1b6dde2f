"""The properties of Llama-family models, as transformers lays them out, that our kernels rely on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position only


def body(network: Any) -> Any:
    """A model without its head, which a model that only encodes lacks."""
    return getattr(network, "model", network)


def check(network: Any) -> None:
    """Reject, by name, what our kernels would compute differently from transformers. Raises ValueError."""
    config = network.config
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"the native kernels support {', '.join(MODEL_TYPES)}, not {config.model_type}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE_TYPES:
        raise ValueError(f"the native kernels do not support rotary positions of type {rope}")
    if config.hidden_act != "silu":
        raise ValueError(f"the native kernels support SwiGLU, not {config.hidden_act}")
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    if set(kinds) != {"full_attention"} or (
        config.model_type == "mistral" and getattr(config, "sliding_window", None) is not None
    ):
        raise ValueError("the native kernels do not support sliding windows")


def angles(network: Any, positions: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of half a head's channels at the first so many positions: fp32 [positions, d]."""
    tables = body(network).rotary_emb(torch.zeros(1, device=device), torch.arange(positions, device=device)[None])
    half = tables[0].shape[-1] // 2
    return torch.cat([part[0, :, :half] for part in tables], dim=-1).float().contiguous()
