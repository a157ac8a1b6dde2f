"""CLIP's text encoder (Radford et al., 2021), written down once, and run on any lowering.

The layout is that of transformers' CLIPTextModel and CLIPTextModelWithProjection.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from core.ops.ops import Lowering, Ops, bind

A = TypeVar("A")


def layers(ops: Ops[A], model: Any, x: A) -> tuple[A, A]:
    """Embedded tokens [B, T, C] to the input of the last layer, which SDXL reads, and to its normalized output."""
    blocks = model.encoder.layers
    for block in blocks[:-1]:
        x = _layer(ops, block, x)
    return x, ops.layer_norm(_layer(ops, blocks[-1], x), model.final_layer_norm)


def _layer(ops: Ops[A], block: Any, x: A) -> A:
    """CLIPEncoderLayer: causal self-attention and a feed-forward, each behind a LayerNorm."""
    attn, mlp = block.self_attn, block.mlp
    h = ops.layer_norm(x, block.layer_norm1, to=(attn.q_proj, attn.k_proj, attn.v_proj))
    qkv = ops.linear(h, attn.q_proj, attn.k_proj, attn.v_proj)
    width = attn.embed_dim
    parts = (ops.columns(qkv, at * width, width) for at in range(3))
    h = ops.attend(*parts, heads=attn.num_heads, causal=True, to=(attn.out_proj,))
    x = ops.linear(h, attn.out_proj, residual=x)
    h = ops.layer_norm(x, block.layer_norm2, to=(mlp.fc1,))
    return ops.linear(ops.linear(h, mlp.fc1, act=model_act(mlp)), mlp.fc2, residual=x)


def model_act(mlp: Any) -> Any:
    """The activation, by its name in `core.ops`."""
    return mlp.config.hidden_act


def project(ops: Ops[A], encoder: Any, x: A) -> A:
    """The pooled text [B, C] in the space that CLIP shares with pictures."""
    return ops.linear(x, encoder.text_projection)


class ClipText:
    """A text encoder on any lowering. Raises ValueError for an activation or a layer that it does not know."""

    def __init__(self, lowering: Lowering, encoder: Any) -> None:
        self.lowering, self.encoder = lowering, encoder
        model = getattr(encoder, "text_model", encoder)
        self._embeddings, self._config = model.embeddings, model.config
        if self._config.hidden_act not in ("quick_gelu", "gelu"):
            raise ValueError(f"text encoder: hidden_act is {self._config.hidden_act!r}; known are quick_gelu and gelu")
        width = self._config.hidden_size
        walk = bind(layers, model)
        lowering.prepare(walk, (1, 1, width))
        self._layers = lowering.lower(walk, "text")
        self._project = None
        if hasattr(encoder, "text_projection"):
            lowering.prepare(bind(project, encoder), (1, width))
            self._project = lowering.lower(bind(project, encoder), "projection")

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Token ids [B, T] to the penultimate layer's output [B, T, C], and the projected end token [B, P], if any."""
        hidden, last = self._layers(self._embeddings(ids).to(self.lowering.dtype))
        if self._project is None:
            return hidden, None
        ends = (ids == self._config.eos_token_id).int().argmax(-1)
        if self._config.eos_token_id == 2:  # an old config's: the end token has the highest number
            ends = ids.argmax(-1)
        pooled = last[torch.arange(len(ids), device=ids.device), ends]
        return hidden, self._project(pooled)[0]
