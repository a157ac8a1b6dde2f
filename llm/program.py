"""A Llama as programs of CPU kernels, one for each number of tokens: embeddings to logits in two calls.

A row's bits depend neither on the other rows, nor on their number, nor on which pages it uses. Supports transformers'
Llama layout, which Mistral and Qwen2 share.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.kernels.cpu.program import ScratchArena
from core.kernels.cpu.token_program import PagedLayer, TokenPositions, TokenProgram
from core.kernels.kv_cache import KVCache, TokenBatch
from core.ops.packed import PackedLayers
from llm import family
from llm.pages import PAGE


def check(network: Any) -> None:
    """Reject, by name, what these programs would compute differently from transformers. Raises ValueError."""
    family.check(network)
    config = network.config
    width = network.model.layers[0].self_attn.head_dim
    if width % 16 or config.intermediate_size % 16:
        raise ValueError(f"heads of width {width} and {config.intermediate_size} channels are no multiples of 16")


class _Trunk(NamedTuple):
    """Token embeddings to hidden states, in `x`."""

    program: TokenProgram
    x: Tensor  # [T, C]
    positions: Tensor  # int32 [T]
    sequences: Tensor  # int32 [T]


class _Head(NamedTuple):
    """Hidden states to logits."""

    program: TokenProgram
    x: Tensor  # [L, C]
    logits: Tensor  # [L, V]


class LlamaPrograms:
    """Runs a Llama on a cache, for any number of tokens, by one thread at a time.

    Weights are packed at once; programs are built on first use, in milliseconds, and kept.
    """

    def __init__(self, library: ctypes.CDLL, network: Any, cache: KVCache, *, half: bool = False) -> None:
        """Raises ValueError for a model that `check` rejects. `half` keeps unquantized layers in bf16."""
        check(network)
        if cache.keys.dtype == torch.float8_e4m3fn:
            raise ValueError("our CPU kernels read keys and values in floats or int8, not in E4M3")
        self._library = library
        self._network = network
        self._cache = cache
        self._layers = PackedLayers(library, network, half=half)
        self._embeddings = network.model.embed_tokens.weight.detach()
        context = cache.table.shape[1] * PAGE
        self._angles = family.angles(network, context, self._embeddings.device)
        self._blocks = ScratchArena(), ScratchArena()  # a head reads what a trunk wrote
        self._trunks: dict[int, _Trunk] = {}
        self._heads: dict[int, _Head] = {}
        self._trunk(1)  # packs all layers, and finds any that are unsupported
        self._head(1)

    @torch.inference_mode()
    def __call__(self, step: TokenBatch) -> Tensor:
        """Logits [L, V] of the step's picked rows, in fp32. They are overwritten by the next call."""
        trunk = self._trunks.get(len(step.tokens)) or self._trunk(len(step.tokens))
        trunk.x.copy_(torch.index_select(self._embeddings, 0, step.tokens))
        trunk.positions.copy_(step.positions)
        trunk.sequences.copy_(step.sequences)
        trunk.program.run()
        count = len(step.picked)
        if not count:
            return torch.empty(0, int(self._network.config.vocab_size))
        head = self._heads.get(count) or self._head(count)
        torch.index_select(trunk.x, 0, step.picked, out=head.x)
        head.program.run()
        return head.logits

    def release(self) -> None:
        """Drop the original weights of packed layers: the model's own forward cannot be used afterwards."""
        self._layers.release()

    @property
    def size_bytes(self) -> int:
        """Bytes of packed weights."""
        return self._layers.size_bytes

    def _trunk(self, rows: int) -> _Trunk:
        network, cache, layers = self._network, self._cache, self._layers
        p = TokenProgram(self._library, self._blocks[0])
        x = p.buffer(rows, network.config.hidden_size)
        places = TokenPositions(p.buffer(rows, dtype=torch.int32), p.buffer(rows, dtype=torch.int32), cache.table)
        grid = (1, 1, rows)
        for index, layer in enumerate(network.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            pages = PagedLayer(
                cache.keys[index],
                cache.values[index],
                None if cache.key_scales is None else cache.key_scales[index],
                None if cache.value_scales is None else cache.value_scales[index],
            )
            heads = network.config.num_attention_heads
            qkv, out = layers(attention.q_proj, attention.k_proj, attention.v_proj), layers(attention.o_proj)
            a = _norm(p, x, layer.input_layernorm, qkv.inverse)
            made = p.product(a, qkv.weights, grid=grid)
            q = p.rotate(made, self._angles, places, pages, heads=heads)
            b = p.paged_attention(q, places, pages, heads=heads, scale=attention.scaling, inverse=out.inverse)
            p.product(b, out.weights, grid=grid, residual=x, out=x)
            p.give_back(a, made, b)
            # In the order in which the kernels read a gated layer: the gated half, then the gate.
            wide, down = layers(mlp.up_proj, mlp.gate_proj, geglu=True), layers(mlp.down_proj)
            a = _norm(p, x, layer.post_attention_layernorm, wide.inverse)
            b = p.product(a, wide.weights, grid=grid, inverse=down.inverse, act="silu")
            p.product(b, down.weights, grid=grid, residual=x, out=x)
            p.give_back(a, b)
        made_trunk = self._trunks[rows] = _Trunk(p, x, places.positions, places.sequences)
        return made_trunk

    def _head(self, rows: int) -> _Head:
        network = self._network
        p = TokenProgram(self._library, self._blocks[1])
        x = p.buffer(rows, network.config.hidden_size)
        last = self._layers(network.lm_head)
        logits = p.product(_norm(p, x, network.model.norm, last.inverse), last.weights, grid=(1, 1, rows))
        made = self._heads[rows] = _Head(p, x, logits)
        return made


def _norm(p: TokenProgram, x: Tensor, norm: Any, inverse: Tensor | None) -> Tensor:
    return p.rms_norm(x, norm.weight, norm.variance_epsilon, inverse)
