"""EAGLE-3: a head of one layer that drafts token by token from the target's hidden states (arXiv 2503.01840), in the
layout of its published checkpoints.

The states of three layers are projected to one. The layer reads it beside the embedding of the token that follows, and
what it returns stands for the state of the next position. It speaks a reduced vocabulary: `d2t` are offsets from its
tokens to the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.ops.ops import Layer, TokenOps
from llm.checkpoints.load import TextModel, place_
from llm.drafts.draft_checkpoint import DraftCheckpoint
from llm.families.network import DecoderLayer

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
A = TypeVar("A")


class EagleNetwork(nn.Module):
    """The weights under their published names; the layer is Llama's, but for its wider queries, keys and values."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Any, sources: tuple[int, ...]) -> None:
        """`config` is a `LlamaConfig` with a `draft_vocab_size`; `sources` are layers of the target whose inputs are
        read.
        """
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        width = config.hidden_size
        self.config, self.sources = config, sources
        self.fc = nn.Linear(len(sources) * width, width, bias=False)
        layer = LlamaDecoderLayer(config, 0)
        attention: Any = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, nn.Linear(2 * width, getattr(attention, name).out_features, bias=False))
        layer.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.midlayer = layer
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.rotary_emb = LlamaRotaryEmbedding(config)


@dataclass(frozen=True, slots=True, eq=False)
class EagleDecoder:
    """The modules that the walk reads."""

    fc: Layer
    embed_tokens: Layer
    hidden_norm: Layer
    layer: DecoderLayer
    norm: Layer
    lm_head: Layer

    @classmethod
    def of(cls, network: EagleNetwork, embed_tokens: Layer, linear: Callable[[Layer], Layer]) -> EagleDecoder:
        """Build it with the target's embedding, and with what `linear` makes of each linear layer."""
        layer = DecoderLayer.of(network.midlayer, 0, network.config).with_linear(linear)
        fc, head = linear(network.fc), linear(network.lm_head)
        return cls(fc, embed_tokens, network.midlayer.hidden_norm, layer, network.norm, head)


def draft(ops: TokenOps[A], decoder: EagleDecoder, tokens: A, x: A, rows: Any) -> A:
    """States [T, C] after the tokens [T], which follow positions whose states are x; before `Decoder.norm`."""
    layer = decoder.layer
    a = ops.rms_norm(ops.embed(tokens, decoder.embed_tokens), layer.input_layernorm, to=layer.qkv)
    b = ops.rms_norm(x, decoder.hidden_norm, to=layer.qkv)
    q = ops.rotate_paged(ops.linear(ops.cat(a, b), *layer.qkv), rows, 0, heads=layer.heads)
    x = ops.linear(ops.attend_paged(q, rows, 0, scale=layer.scale, to=layer.o_proj), layer.o_proj, residual=x)
    a = ops.rms_norm(x, layer.mlp_layernorm, to=layer.up_gate)
    b = ops.gated(a, *layer.up_gate, act=layer.act, to=layer.down_proj)
    return ops.linear(b, layer.down_proj, residual=x)


def logits(ops: TokenOps[A], decoder: EagleDecoder, x: A) -> A:
    """Logits [T, V] of the reduced vocabulary."""
    return ops.head(ops.rms_norm(x, decoder.norm, to=(decoder.lm_head,)), decoder.lm_head)


def sources_of(fields: dict[str, Any], layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs a checkpoint reads: as its config.json says, or else as published ones do."""
    named = (fields.get("eagle_config") or {}).get(LAYER_IDS, fields.get(LAYER_IDS))
    return tuple(named) if named else (2, layers // 2, layers - 3)


def load(folder: Path, model: TextModel) -> EagleNetwork:
    """Load a head for a model. Raises `TextModelError` for one that does not fit it, or is of another kind."""
    from transformers import LlamaConfig

    checkpoint = DraftCheckpoint(folder)
    fields, refuse = checkpoint.fields, checkpoint.refuse
    if checkpoint.architectures not in [[name] for name in ARCHITECTURES]:
        names = ", ".join(ARCHITECTURES)
        raise refuse(f"config.json: architectures must be one of {names}, not {checkpoint.architectures}")
    words = fields.setdefault("draft_vocab_size", fields.get("vocab_size"))
    try:
        config, sources = LlamaConfig(**fields), sources_of(fields, model.layers)
    except Exception as error:  # transformers checks fields in ways of its own
        raise refuse(f"config.json: {error}") from error
    if not all(isinstance(source, int) and 0 <= source < model.layers for source in sources):
        raise refuse(f"config.json: {LAYER_IDS} must be layers of {model.name}, not {[*sources]}")
    if not isinstance(words, int) or not 0 < words <= config.vocab_size:
        raise refuse(f"config.json: draft_vocab_size must be a whole number up to vocab_size, not {words!r}")
    width = model.config.hidden_size
    if (config.hidden_size, config.vocab_size) != (width, model.vocabulary):
        raise refuse(
            f"is for a model of width {config.hidden_size} and {config.vocab_size} words, where {model.name} has "
            f"{width} and {model.vocabulary}"
        )
    network = EagleNetwork(config, sources)
    checkpoint.fill_(network, ignored=("embed_tokens.weight",))  # a copy of the target's
    tokens = torch.arange(words) + network.d2t
    if bool(((tokens < 0) | (tokens >= model.vocabulary)).any()):
        raise refuse(f"d2t leads out of the {model.vocabulary} words of {model.name}")
    place_(network, model.device, model.dtype)
    return network.eval().requires_grad_(False)


def unrolled(model: EagleNetwork, features: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
    """Return the states [B, T, C] of each step of a head that is unrolled, as it is trained: drafters must equal it.

    It reads features [B, T, sources · C] and the embeddings [B, T, C] of the tokens after them: row t of step s is that
    of position t, drafted from features up to t - s.
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    layer: Any = model.midlayer
    attention = layer.self_attn
    x, results = model.fc(features), []
    batch, length, _ = x.shape
    places = torch.arange(length, device=x.device)
    angles = model.rotary_emb(x, places[None])
    keys: list[Tensor] = []
    values: list[Tensor] = []
    heads = model.config.num_attention_heads // model.config.num_key_value_heads
    for step in range(steps):
        both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(x)], -1)
        q, k, v = (
            projection(both).view(batch, length, -1, attention.head_dim).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *angles)
        keys.append(k.repeat_interleave(heads, 1))
        values.append(v.repeat_interleave(heads, 1))
        # Of the first step's keys those up to t - step, and of each later step j the one at t - step + j.
        scores = [(q @ keys[0].mT).masked_fill(places > places[:, None] - step, -torch.inf)]
        shifts = [values[0]]
        for j in range(1, step + 1):
            shift = step - j
            moved, value = (F.pad(z, (0, 0, shift, 0))[:, :, :length] for z in (keys[j], values[j]))
            scores.append((q * moved).sum(-1, keepdim=True))
            shifts.append(value)
        weights = (torch.cat(scores, -1) * attention.scaling).softmax(-1)
        y = weights[..., :length] @ shifts[0]
        for j in range(1, step + 1):
            y = y + weights[..., length + j - 1 : length + j] * shifts[j]
        x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        results.append(x)
        x = F.pad(x, (0, 0, 1, 0))[:, :length]  # of position t the state that was drafted for it
    return results
