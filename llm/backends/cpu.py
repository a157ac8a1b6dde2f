"""A decoder as programs of CPU kernels, one for each number of tokens: embeddings to logits in two calls.

A row's bits depend neither on the other rows, nor on their number, nor on which pages it uses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.kernels.kv_cache import PAGE, KVCache, TokenBatch
from core.ops.branches import LowRank, PackedBranches, RowBranches
from core.ops.cpu import adapt
from core.ops.cpu_arrays import Array
from core.ops.cpu_tokens import CpuTokenOps, TokenRows
from core.ops.ops import Walk, bind
from core.ops.packed import PackedLayers
from llm.families import family
from llm.families.network import Decoder, logits, states, trunk


class _Trunk(NamedTuple):
    """Tokens to hidden states."""

    ops: CpuTokenOps
    tokens: Array  # [T]
    rows: TokenRows
    x: Array  # [T, C]


class _Head(NamedTuple):
    """Hidden states of the last layer to logits, or to normed states."""

    ops: CpuTokenOps
    x: Array  # [L, C]
    out: Array  # [L, V] or [L, C]


class CpuDecoder:
    """Runs a model on a cache, for any number of tokens, by one thread at a time.

    Weights are packed at once; programs are built on first use, in milliseconds, and kept. They share their memory.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        network: Any,
        cache: KVCache,
        *,
        half: bool = False,
        features: tuple[int, ...] = (),
    ) -> None:
        """Raises ValueError for a model that the kernels do not support. `half` as for `PackedLayers`."""
        family.check(network)
        if cache.keys.dtype == torch.float8_e4m3fn:
            raise ValueError("our CPU kernels read keys and values in floats or int8, not in E4M3")
        self.layers = PackedLayers(library, network, half=half)
        decoder = Decoder.of(network, features)
        self._walk, self._cap = bind(trunk, decoder), decoder.cap
        self._ends = {walk: bind(walk, decoder) for walk in (logits, states)}
        self._width, self._vocabulary = int(network.config.hidden_size), int(network.config.vocab_size)
        angles = family.angles(network, cache.table.shape[1] * PAGE, cache.table.device)
        self._ops = partial(CpuTokenOps, library, self.layers, cache, angles)
        self._trunks: dict[int, _Trunk] = {}
        self._heads: dict[tuple[Walk, int], _Head] = {}
        self._bound: dict[int, tuple[RowBranches, list[Any]]] = {}  # adapters of programs, by their numbers of tokens
        self._feature_width = len(features) * self._width
        self.states: Tensor | None = None  # fp32 [S, C] of the last step's `state_rows`
        self.features: Tensor | None = None  # [T, layers · C] of the last step
        self._trunk(1)  # packs all layers, and finds any that are unsupported
        self._head(logits, 1)

    @torch.inference_mode()
    def __call__(self, step: TokenBatch) -> Tensor:
        """Logits [L, V] of the step's picked rows, in fp32. They are overwritten by the next call."""
        trunk = self._trunks.get(len(step.tokens)) or self._trunk(len(step.tokens))
        trunk.tokens.x.copy_(step.tokens)
        trunk.rows.positions.copy_(step.positions)
        trunk.rows.sequences.copy_(step.sequences)
        self._adapt(trunk, step.adapters)
        trunk.ops.program.run()
        # Copies: programs share their memory.
        self.features = None if trunk.rows.features is None else trunk.rows.features.clone()
        x = torch.index_select(trunk.x.x, 0, step.output_rows)
        self.states = None
        if step.state_rows is not None:
            self.states = self._end(states, torch.index_select(trunk.x.x, 0, step.state_rows)).clone()
        if not len(x):
            return torch.empty(0, self._vocabulary)
        out = self._end(logits, x)
        return out.div_(self._cap).tanh_().mul_(self._cap) if self._cap else out

    def _end(self, walk: Walk, x: Tensor) -> Tensor:
        """What the walk makes of hidden states [L, C], overwritten by the next program that runs."""
        head = self._heads.get((walk, len(x))) or self._head(walk, len(x))
        head.x.x.copy_(x)
        head.ops.program.run()
        return head.out.x

    def pack(self, factors: Mapping[str, LowRank]) -> PackedBranches:
        """An adapter for steps. On any thread. Raises ValueError, naming the layer, for a factor that does not fit."""
        return PackedBranches(self.layers.library, self.layers.all, factors)

    def _adapt(self, trunk: _Trunk, adapters: Sequence[PackedBranches | None] | None) -> None:
        """Give the rows of a program their adapters; without any its bits are the model's own."""
        count = len(trunk.tokens.x)
        bound = self._bound.get(count)
        if adapters is None:
            if bound is not None:
                del self._bound[count]
                adapt(trunk.ops, None)
            return
        branches = RowBranches([[] if adapter is None else [(adapter, 1.0)] for adapter in adapters])
        if bound is None or bound[0].key != branches.key:
            self._bound[count] = branches, adapt(trunk.ops, branches)

    def release(self) -> None:
        """Drop the original weights of packed layers: the model's own forward cannot be used afterwards."""
        self.layers.release()

    @property
    def size_bytes(self) -> int:
        """Bytes of packed weights."""
        return self.layers.size_bytes

    def _trunk(self, count: int) -> _Trunk:
        ops = self._ops()
        tokens, rows = ops.input((count,)), ops.rows(count, self._feature_width)
        trunk = self._trunks[count] = _Trunk(ops, tokens, rows, self._walk(ops, tokens, rows))
        return trunk

    def _head(self, walk: Walk, count: int) -> _Head:
        ops = self._ops()
        x = ops.input((count, self._width))
        head = self._heads[walk, count] = _Head(ops, x, self._ends[walk](ops, x))
        return head
