"""DFlash: a small denoiser that drafts a block of tokens in one forward (arXiv 2602.06036), in the layout of its
published checkpoints.

The block is the last token and mask tokens behind it, and its rows see each other both ways. Hidden states of several
of the target's layers are projected and normed once for each token of the context, and each layer makes keys and values
of them. Embedding and head are the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import nn

from core.ops.ops import Layer, TokenOps
from llm.checkpoints.load import TextModel, place_
from llm.drafts.draft_checkpoint import DraftCheckpoint
from llm.drafts.speculate import MOST_OF_A_BLOCK
from llm.families.network import DecoderLayer, decoder_layer

ARCHITECTURE = "DFlashDraftModel"
A = TypeVar("A")


def target_layers(count: int, layers: int) -> tuple[int, ...]:
    """The layers, from 0, of a target of `count` ones whose outputs a drafter of `layers` layers reads by default."""
    if layers == 1:
        return (count // 2,)
    return tuple(round(1 + i * (count - 4) / (layers - 1)) for i in range(layers))


class DFlashNetwork(nn.Module):
    """The weights under their published names; the layers are Qwen3's."""

    def __init__(self, config: Any, sources: tuple[int, ...]) -> None:
        """`config` is a `Qwen3Config`; `sources` are the target's layers, from 0, whose outputs it reads."""
        from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

        super().__init__()
        width = config.hidden_size
        self.config, self.sources = config, sources
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.fc = nn.Linear(len(sources) * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)


@dataclass(frozen=True, slots=True, eq=False)
class BlockDecoder:
    """The modules that the walks read."""

    fc: Layer
    hidden_norm: Layer
    layers: tuple[DecoderLayer, ...]
    norm: Layer
    embed_tokens: Layer
    lm_head: Layer

    @classmethod
    def of(
        cls, network: DFlashNetwork, embed_tokens: Layer, lm_head: Layer, linear: Callable[[Layer], Layer]
    ) -> BlockDecoder:
        """Build it with the embedding and the head of the target, and with what `linear` makes of each linear layer."""
        layers = tuple(
            DecoderLayer.of(layer, i, network.config).with_linear(linear) for i, layer in enumerate(network.layers)
        )
        return cls(linear(network.fc), network.hidden_norm, layers, network.norm, embed_tokens, linear(lm_head))


def read(ops: TokenOps[A], decoder: BlockDecoder, features: A, rows: Any) -> A:
    """Put keys and values of the context's features [T, sources · C] into the pages; returns the last layer's."""
    first, *_ = decoder.layers
    x = y = ops.rms_norm(ops.linear(features, decoder.fc), decoder.hidden_norm, to=first.qkv)
    for layer in decoder.layers:
        y = ops.linear(x, *layer.qkv)
        ops.rotate_paged(y, rows, layer.index, heads=layer.heads, norms=layer.head_norms)
    return y


def draft(ops: TokenOps[A], decoder: BlockDecoder, tokens: A, rows: Any, ends: Any) -> A:
    """Logits [T, V] of the blocks' tokens [T]; `ends` are `rows` at the position of their block's last one."""

    def attend(layer: DecoderLayer, qkv: A) -> A:
        q = ops.rotate_paged(qkv, rows, layer.index, heads=layer.heads, norms=layer.head_norms)
        return ops.attend_paged(q, ends, layer.index, scale=layer.scale, to=layer.o_proj)

    x = ops.embed(tokens, decoder.embed_tokens)
    for layer in decoder.layers:
        x = decoder_layer(ops, layer, x, attend)
    return ops.head(ops.rms_norm(x, decoder.norm, to=(decoder.lm_head,)), decoder.lm_head)


class Checkpoint(NamedTuple):
    """A drafter as published: the last token and masks are a block of at most `block` tokens."""

    network: DFlashNetwork
    block: int
    mask: int  # the token


def load(folder: Path, model: TextModel) -> Checkpoint:
    """Load a drafter for a model. Raises `TextModelError` for one that does not fit it, or is of another kind."""
    from transformers import Qwen3Config

    checkpoint = DraftCheckpoint(folder)
    fields, refuse = checkpoint.fields, checkpoint.refuse
    try:
        own = fields.pop("dflash_config", None) or {}
        if not isinstance(own, dict):
            raise ValueError(f"dflash_config must be an object, not {str(own)[:40]}")
        config = Qwen3Config(**fields)
        block, mask = (own.get(key, fields.get(key)) for key in ("block_size", "mask_token_id"))
        sources = own.get("target_layer_ids") or target_layers(model.layers, config.num_hidden_layers)
    except Exception as error:  # transformers checks fields in ways of its own
        raise refuse(f"config.json: {error}") from error
    if checkpoint.architectures != [ARCHITECTURE]:
        raise refuse(f"config.json: architectures must be {[ARCHITECTURE]}, not {checkpoint.architectures}")
    for key, value, most in (("block_size", block, MOST_OF_A_BLOCK + 1), ("mask_token_id", mask, model.vocabulary - 1)):
        if not isinstance(value, int) or not 2 * (key == "block_size") <= value <= most:
            raise refuse(f"config.json: {key} must be a whole number up to {most}, not {value!r}")
    if {*(config.layer_types or ())} - {"full_attention"} or fields.get("is_causal"):
        raise refuse("config.json: layers must attend to the whole context and block")
    if not all(isinstance(source, int) and 0 <= source < model.layers - 1 for source in sources):
        raise refuse(f"config.json: target_layer_ids must be layers of {model.name} before the last, not {sources}")
    width, layers = model.config.hidden_size, fields.get("num_target_layers", model.layers)
    if (config.hidden_size, config.vocab_size, layers) != (width, model.vocabulary, model.layers):
        raise refuse(
            f"is for a model of width {config.hidden_size}, {config.vocab_size} words and {layers} layers, where "
            f"{model.name} has {width}, {model.vocabulary} and {model.layers}"
        )
    network = DFlashNetwork(config, tuple(sources))
    checkpoint.fill_(network)
    place_(network, model.device, model.dtype)
    network = network.eval().requires_grad_(False)
    assert isinstance(block, int) and isinstance(mask, int)
    return Checkpoint(network, block, mask)
