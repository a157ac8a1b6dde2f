"""The decoder of the Llama family, written down once: Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 2 and
the text of Gemma 3.

The layout is that of transformers, whose modules hold the weights: RMSNorm, attention with rotary positions and fewer
heads of keys than of queries, RMSNorm, SwiGLU, each added to the residual stream (Touvron et al., 2023). Qwen3 norms
each head of queries and keys before their rotation. In place of SwiGLU a layer may have a mixture of experts, each of
which is one. A layer may attend to a window of the last tokens only. Gemma has
GELU in place of SiLU, scales its embeddings, norms each branch before it is added, and stores the weights of norms less
one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from core.ops.mixture import Mixture
from core.ops.ops import Activation, Layer, Ops, TokenOps
from llm.families import experts, family

A = TypeVar("A")


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The modules of a layer under transformers' names, looked up once: on modules that costs as much as a launch."""

    index: int
    input_layernorm: Layer
    qkv: tuple[Layer, ...]  # q_proj, k_proj and v_proj, which read one input
    head_norms: tuple[Layer, Layer] | None  # q_norm and k_norm
    o_proj: Layer
    mlp_layernorm: Layer
    up_gate: tuple[Layer, ...]  # up_proj, and gate_proj, which goes through `act`; none of a mixture
    down_proj: Layer | None
    mixture: Mixture | None
    branch_norms: tuple[Layer, Layer] | None  # of what o_proj and down_proj give
    act: Activation
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of attention's scores
    window: int
    cap: float

    @classmethod
    def of(cls, layer: Any, index: int, config: Any) -> DecoderLayer:
        attn, mlp, gemma = layer.self_attn, layer.mlp, config.model_type in family.GEMMA
        norm = ShiftedNorm if gemma else _itself
        mlp_norm, branch_norms = layer.post_attention_layernorm, None
        if gemma:
            branch_norms = norm(layer.post_attention_layernorm), norm(layer.post_feedforward_layernorm)
            mlp_norm = layer.pre_feedforward_layernorm
        mixture = experts.mixture(mlp)
        return cls(
            index, norm(layer.input_layernorm), (attn.q_proj, attn.k_proj, attn.v_proj),
            (norm(attn.q_norm), norm(attn.k_norm)) if hasattr(attn, "q_norm") else None, attn.o_proj,
            norm(mlp_norm), () if mixture else (mlp.up_proj, mlp.gate_proj), None if mixture else mlp.down_proj,
            mixture, branch_norms, family.activation(config),
            int(config.num_attention_heads), int(config.num_key_value_heads), int(attn.head_dim), float(attn.scaling),
            family.windows(config)[index], float(getattr(config, "attn_logit_softcapping", None) or 0),
        )  # fmt: skip

    def with_linear(self, linear: Callable[[Layer], Layer]) -> DecoderLayer:
        """The same with what `linear` makes of each linear layer; of a layer without a mixture."""
        qkv, up_gate = tuple(map(linear, self.qkv)), tuple(map(linear, self.up_gate))
        o_proj, down_proj = linear(self.o_proj), linear(self.down_proj)
        return replace(self, qkv=qkv, o_proj=o_proj, up_gate=up_gate, down_proj=down_proj)


class ShiftedNorm:
    """An RMSNorm of Gemma, whose weights are stored less one."""

    def __init__(self, norm: Layer) -> None:
        self.weight = 1 + norm.weight.detach().float()
        self.eps = float(norm.eps)


def _itself(norm: Layer) -> Layer:
    return norm


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """The modules of a decoder-only model."""

    embed_tokens: Layer
    layers: tuple[DecoderLayer, ...]
    norm: Layer
    lm_head: Layer | None  # None: of a model that only encodes
    embedding_scale: float = 1.0
    cap: float = 0.0  # a logit x is cap · tanh(x / cap); 0: none
    features: tuple[int, ...] = ()  # the layers whose inputs are captured

    @classmethod
    def of(cls, network: Any, features: tuple[int, ...] = ()) -> Decoder:
        """Build it of a transformers model with or without a head."""
        model, config = family.body(network), network.config
        layers = tuple(DecoderLayer.of(layer, index, config) for index, layer in enumerate(model.layers))
        head = getattr(network, "lm_head", None)
        if config.model_type not in family.GEMMA:
            return cls(model.embed_tokens, layers, model.norm, head, features=features)
        scale = model.embed_tokens.embed_scale.to(model.embed_tokens.weight.dtype)
        cap = float(config.final_logit_softcapping or 0)
        return cls(model.embed_tokens, layers, ShiftedNorm(model.norm), head, float(scale), cap, features)


def trunk(ops: TokenOps[A], decoder: Decoder, tokens: A, rows: Any, x: A | None = None) -> A:
    """Tokens [T] to hidden states [T, C], on the KV cache of `ops`; `rows` as for `TokenOps`.

    x: the hidden states of the layers before, if these are not a model's first.
    """

    def attend(layer: DecoderLayer, qkv: A) -> A:
        for place, source in enumerate(decoder.features):
            # Here, since a GPU adds a branch's sums to x in the layer's first norm.
            if source == layer.index and rows is not None:
                rows.capture(x, place)
        q = ops.rotate_paged(qkv, rows, layer.index, heads=layer.heads, norms=layer.head_norms)
        return ops.attend_paged(
            q, rows, layer.index, scale=layer.scale, to=layer.o_proj, window=layer.window, cap=layer.cap
        )

    x = ops.embed(tokens, decoder.embed_tokens, scale=decoder.embedding_scale) if x is None else x
    for layer in decoder.layers:
        x = decoder_layer(ops, layer, x, attend)
    return x


def states(ops: TokenOps[A], decoder: Decoder, x: A) -> A:
    """Hidden states [T, C] as embeddings are pooled of them: after the last norm."""
    return ops.rms_norm(x, decoder.norm)


def logits(ops: TokenOps[A], decoder: Decoder, x: A, out: Any = None) -> A:
    """Hidden states [T, C] to logits [T, V], before `Decoder.cap`."""
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
    x = _added(ops, layer, 0, x, b, layer.o_proj)
    a = ops.rms_norm(x, layer.mlp_layernorm, to=layer.up_gate)
    if layer.mixture is not None:
        return ops.mixture(a, layer.mixture, act=layer.act, residual=x)
    b = ops.gated(a, *layer.up_gate, act=layer.act, to=layer.down_proj)
    return _added(ops, layer, 1, x, b, layer.down_proj)


def _added(ops: Ops[A], layer: DecoderLayer, branch: int, x: A, b: A, projection: Layer) -> A:
    """x and the projection of a branch's result b, normed if the layer has a norm for it."""
    if layer.branch_norms is None:
        return ops.linear(b, projection, residual=x)
    return ops.rms_norm(ops.linear(b, projection), layer.branch_norms[branch], residual=x)
