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

from core.kernels.cpu.library import identity
from core.kernels.kv_cache import PAGE, KVCache, TokenBatch
from core.ops.branches import LowRank, PackedBranches, RowBranches
from core.ops.cpu import adapt
from core.ops.cpu_arrays import Array
from core.ops.cpu_tokens import CpuTokenOps, TokenRows
from core.ops.ops import Walk, bind
from core.ops.packed import PackedLayers
from llm.backends.backend import KERNELS, TextBackend
from llm.backends.forward import Forward
from llm.checkpoints.load import TextModel
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


class ProgramBackend(TextBackend):
    """A model on the CPU kernels, for any number of tokens.

    Weights are packed at once; programs are built on first use, in milliseconds, and kept. They share their memory.
    """

    kind = KERNELS

    def __init__(
        self, model: TextModel, cache: KVCache, library: ctypes.CDLL, *, features: tuple[int, ...] = ()
    ) -> None:
        """Raises ValueError for a model that the kernels do not support."""
        super().__init__(model, cache)
        network: Any = model.network
        family.check(network)
        if cache.keys.dtype == torch.float8_e4m3fn:
            raise ValueError("our CPU kernels read keys and values in floats or int8, not in E4M3")
        self.packed = self._layers = PackedLayers(library, network, half=model.precision != "fp32")
        decoder = Decoder.of(network, features)
        self._walk, self._cap = bind(trunk, decoder), decoder.cap
        self._ends = {walk: bind(walk, decoder) for walk in (logits, states)}
        self._width, self._vocabulary = int(network.config.hidden_size), int(network.config.vocab_size)
        angles = family.angles(network, cache.table.shape[1] * PAGE, cache.table.device)
        self._ops = partial(CpuTokenOps, library, self._layers, cache, angles)
        self._trunks: dict[int, _Trunk] = {}
        self._heads: dict[tuple[Walk, int], _Head] = {}
        self._bound: dict[int, tuple[RowBranches, list[Any]]] = {}  # adapters of programs, by their numbers of tokens
        self._feature_width = len(features) * self._width
        self._trunk(1)  # packs all layers, and finds any that are unsupported
        self._head(logits, 1)

    @property
    def kernels(self) -> str:
        return identity(self._layers.library).instructions

    @property
    def size_bytes(self) -> int:
        return super().size_bytes + self._layers.size_bytes

    @torch.inference_mode()
    def forward(self, batch: TokenBatch) -> Forward:
        self.cache.settle()
        batch = self.latest.filled(batch)
        trunk = self._trunks.get(len(batch.tokens)) or self._trunk(len(batch.tokens))
        trunk.tokens.x.copy_(batch.tokens)
        trunk.rows.positions.copy_(batch.positions)
        trunk.rows.sequences.copy_(batch.sequences)
        self._adapt(trunk, batch.adapters)
        trunk.ops.program.run()
        # Copies: programs share their memory.
        features = None if trunk.rows.features is None else trunk.rows.features.clone()
        x = torch.index_select(trunk.x.x, 0, batch.output_rows)
        pooled = None
        if batch.state_rows is not None:
            pooled = self._end(states, torch.index_select(trunk.x.x, 0, batch.state_rows)).clone()
        if not len(x):
            return Forward(torch.empty(0, self._vocabulary), None, pooled, features)
        out = self._end(logits, x)
        out = out.div_(self._cap).tanh_().mul_(self._cap) if self._cap else out
        return Forward(out, None, pooled, features)

    def _end(self, walk: Walk, x: Tensor) -> Tensor:
        """Run a walk on hidden states [L, C]; the next program that runs overwrites the result."""
        head = self._heads.get((walk, len(x))) or self._head(walk, len(x))
        head.x.x.copy_(x)
        head.ops.program.run()
        return head.out.x

    def pack(self, factors: Mapping[str, LowRank]) -> PackedBranches:
        return PackedBranches(self._layers.library, self._layers.all, factors)

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
        self._layers.release()

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
