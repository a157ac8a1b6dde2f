"""The decoder of the Llama family, written down once: Llama, Mistral, Qwen2 and Qwen3.

The layout is that of transformers, whose modules hold the weights: RMSNorm, attention with rotary positions and fewer
heads of keys than of queries, RMSNorm, SwiGLU, each added to the residual stream (Touvron et al., 2023). Qwen3 norms
each head of queries and keys before their rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from core.ops.ops import Layer, Ops, TokenOps
from llm.family import body

A = TypeVar("A")


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The modules of a layer under transformers' names, looked up once: on modules that costs as much as a launch."""

    index: int
    input_layernorm: Layer
    qkv: tuple[Layer, ...]  # q_proj, k_proj and v_proj, which read one input
    head_norms: tuple[Layer, Layer] | None  # q_norm and k_norm
    o_proj: Layer
    post_attention_layernorm: Layer
    up_gate: tuple[Layer, ...]  # up_proj, and gate_proj, which goes through SiLU
    down_proj: Layer
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of attention's scores

    @classmethod
    def of(cls, layer: Any, index: int, config: Any) -> DecoderLayer:
        attn, mlp = layer.self_attn, layer.mlp
        norms = (attn.q_norm, attn.k_norm) if hasattr(attn, "q_norm") else None
        return cls(
            index, layer.input_layernorm, (attn.q_proj, attn.k_proj, attn.v_proj), norms, attn.o_proj,
            layer.post_attention_layernorm, (mlp.up_proj, mlp.gate_proj), mlp.down_proj,
            int(config.num_attention_heads), int(config.num_key_value_heads), int(attn.head_dim), float(attn.scaling),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """The modules of a decoder-only model."""

    embed_tokens: Layer
    layers: tuple[DecoderLayer, ...]
    norm: Layer
    lm_head: Layer | None  # None: of a model that only encodes

    @classmethod
    def of(cls, network: Any) -> Decoder:
        """Build it of a transformers model with or without a head."""
        model = body(network)
        layers = (DecoderLayer.of(layer, index, network.config) for index, layer in enumerate(model.layers))
        return cls(model.embed_tokens, tuple(layers), model.norm, getattr(network, "lm_head", None))


def trunk(ops: TokenOps[A], decoder: Decoder, tokens: A, rows: Any) -> A:
    """Tokens [T] to hidden states [T, C], on the KV cache of `ops`; `rows` as for `TokenOps`."""

    def attend(layer: DecoderLayer, qkv: A) -> A:
        q = ops.rotate_paged(qkv, rows, layer.index, heads=layer.heads, norms=layer.head_norms)
        return ops.attend_paged(q, rows, layer.index, scale=layer.scale, to=layer.o_proj)

    x = ops.embed(tokens, decoder.embed_tokens)
    for layer in decoder.layers:
        x = decoder_layer(ops, layer, x, attend)
    return x


def states(ops: TokenOps[A], decoder: Decoder, x: A) -> A:
    """Hidden states [T, C] as embeddings are pooled of them: after the last norm."""
    return ops.rms_norm(x, decoder.norm)


def logits(ops: TokenOps[A], decoder: Decoder, x: A, out: Any = None) -> A:
    """Hidden states [T, C] to logits [T, V]."""
    assert decoder.lm_head is not None
    return ops.head(ops.rms_norm(x, decoder.norm, to=(decoder.lm_head,)), decoder.lm_head, out)


def hidden_states(ops: Ops[A], layers: tuple[DecoderLayer, ...], x: A, angles: A, lengths: A) -> A:
    """Embeddings of prompts [B, T, C] through these layers, without a cache.

    `angles` [B, T, d] as for `Ops.rotate`; `lengths` [B]: the prompts' tokens, behind which the states mean nothing.
    """

    def attend(layer: DecoderLayer, qkv: A) -> A:
        qkv = ops.rotate(qkv, angles, heads=layer.heads, norms=layer.head_norms)
        width, kv_width = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        q, k = ops.columns(qkv, 0, width), ops.columns(qkv, width, kv_width)
        v = ops.columns(qkv, width + kv_width, kv_width)
        return ops.attend(q, k, v, heads=layer.heads, lengths=lengths, causal=True, to=(layer.o_proj,))

    for layer in layers:
        x = decoder_layer(ops, layer, x, attend)
    return x


def decoder_layer(ops: Ops[A], layer: DecoderLayer, x: A, attend: Callable[[DecoderLayer, A], A]) -> A:
    """`attend` makes of queries, keys and values side by side what `o_proj` reads."""
    a = ops.rms_norm(x, layer.input_layernorm, to=layer.qkv)
    b = attend(layer, ops.linear(a, *layer.qkv))
    x = ops.linear(b, layer.o_proj, residual=x)
    a = ops.rms_norm(x, layer.post_attention_layernorm, to=layer.up_gate)
    b = ops.gated(a, *layer.up_gate, act="silu", to=layer.down_proj)
    return ops.linear(b, layer.down_proj, residual=x)
