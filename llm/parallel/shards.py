"""Splits a decoder among ranks: layers by stages, and each layer's heads and inner channels by tensor parallelism.

Queries, keys, values, gate and up are split by outputs, and what reads them (o_proj, down_proj) by inputs, so that each
layer sums two results over the ranks of a stage (Shoeybi et al., 2019, section 3). A head of keys and values of which
there are fewer than ranks lies on several. The head's vocabulary is split too; embeddings are whole on each rank of the
first stage, since looking a token up in a part would be one more sum per step. A rank's network remains one of
transformers, of fewer heads and layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from contract.parallel import Parallel
from core.quant.shards import input_slice, output_slice
from llm.families import family


class Rank(NamedTuple):
    """The place of one process. Rank 0, the worker's, is in the last stage: there are the logits."""

    number: int
    parallel: Parallel

    @property
    def tensor(self) -> int:
        """Its number among the ranks of its stage."""
        return self.number % self.parallel.tensor

    @property
    def stage(self) -> int:
        return self.parallel.pipeline - 1 - self.number // self.parallel.tensor

    @property
    def first(self) -> bool:
        """Return whether it is in the first stage."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.parallel.pipeline - 1

    @property
    def peers(self) -> range:
        """The ranks of its stage."""
        start = self.number - self.tensor
        return range(start, start + self.parallel.tensor)

    @property
    def before(self) -> int:
        """The rank whose activations it reads."""
        return self.number + self.parallel.tensor

    @property
    def after(self) -> int:
        """The rank that reads its activations."""
        return self.number - self.parallel.tensor

    def __str__(self) -> str:
        return f"rank {self.number} of {self.parallel}"


def vocabulary_slice(vocabulary: int, rank: Rank) -> range:
    """The tokens whose logits a rank of the last stage computes."""
    each = -(-vocabulary // rank.parallel.tensor)
    return range(min(vocabulary, rank.tensor * each), min(vocabulary, (rank.tensor + 1) * each))


def check(network: Any, parallel: Parallel) -> None:
    """Reject a model that is not divided so. Raises ValueError naming what does not divide."""
    config, tensor = network.config, parallel.tensor
    layers, heads, kv_heads = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    if config.model_type not in family.MODEL_TYPES or not hasattr(network.model.layers[0].mlp, "up_proj"):
        raise ValueError(f"text_parallel: models of type {config.model_type} are not split")
    if layers % parallel.pipeline:
        raise ValueError(f"text_parallel: its {layers} layers are not divided by {parallel.pipeline} stages")
    for count, name in ((heads, "attention heads"), (config.intermediate_size, "inner channels")):
        if count % tensor:
            raise ValueError(f"text_parallel: its {count} {name} are not divided by {tensor} ranks")
    if kv_heads % tensor and tensor % kv_heads:
        raise ValueError(f"text_parallel: its {kv_heads} heads of keys and values are not divided by {tensor} ranks")


def _keep(module: nn.Module) -> None:
    """Leave a module of a network that is in memory as it is."""


def shard_(
    network: Any, rank: Rank, *, fill: Callable[[nn.Module], None] = _keep, place: Callable[[nn.Module], None] = _keep
) -> None:
    """Reduce a network to a rank's part, in place. Raises ValueError as `check`, and for layers that are not split.

    Of a network on meta, `fill` gives a module that the rank needs its tensors before it is split, and `place` takes
    its part to the rank's device before the next layer is filled.
    """
    parallel = rank.parallel
    check(network, parallel)
    config, model = network.config, network.model
    config.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    count = config.num_hidden_layers // parallel.pipeline
    first = rank.stage * count
    model.layers = nn.ModuleList(model.layers[first : first + count])
    for index, layer in enumerate(model.layers):
        layer.self_attn.layer_idx = index
        fill(layer)
        try:
            _shard_layer_(layer, config, rank)
        except ValueError as error:
            raise ValueError(f"text_parallel: {error}") from error
        place(layer)
    if (kinds := getattr(config, "layer_types", None)) is not None:
        config.layer_types = kinds[first : first + count]
    config.num_hidden_layers = count
    config.num_attention_heads //= parallel.tensor
    config.num_key_value_heads = max(1, config.num_key_value_heads // parallel.tensor)
    config.intermediate_size //= parallel.tensor
    config.tie_word_embeddings = False
    if rank.first:
        fill(model.embed_tokens)
    if rank.last:
        fill(model.norm)
        fill(network.lm_head)
        tokens = vocabulary_slice(config.vocab_size, rank)
        each = -(-config.vocab_size // parallel.tensor)
        network.lm_head = output_slice(network.lm_head, tokens.start, tokens.stop, size=each)
    else:
        head = output_slice(network.lm_head, 0, 0)
        network.lm_head = head.to_empty(device="cpu") if network.lm_head.weight.is_meta else head
        model.norm = nn.Identity()
    if not rank.first:
        weight = model.embed_tokens.weight.detach()[:0]
        weight = torch.empty_like(weight, device="cpu") if weight.is_meta else weight.clone()
        model.embed_tokens.weight = nn.Parameter(weight, requires_grad=False)


def _shard_layer_(layer: Any, config: Any, rank: Rank) -> None:
    tensor, number = rank.parallel.tensor, rank.tensor
    if tensor == 1:
        return
    attn, mlp, d = layer.self_attn, layer.mlp, config.head_dim
    heads, inner = config.num_attention_heads // tensor, config.intermediate_size // tensor
    kv_heads = max(1, config.num_key_value_heads // tensor)
    kv_first = number * config.num_key_value_heads // tensor
    attn.q_proj = output_slice(attn.q_proj, number * heads * d, (number + 1) * heads * d)
    for name in ("k_proj", "v_proj"):
        setattr(attn, name, output_slice(getattr(attn, name), kv_first * d, (kv_first + kv_heads) * d))
    attn.o_proj = input_slice(attn.o_proj, number * heads * d, (number + 1) * heads * d, bias=number == 0)
    for name in ("gate_proj", "up_proj"):
        setattr(mlp, name, output_slice(getattr(mlp, name), number * inner, (number + 1) * inner))
    mlp.down_proj = input_slice(mlp.down_proj, number * inner, (number + 1) * inner, bias=number == 0)
