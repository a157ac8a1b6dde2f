"""The forwards of a drafter that reads the model's hidden states: by torch, as programs of CPU kernels, or as fused
ones, which `llm.drafts.draft_graphs` records.

A walk `walk(ops, x, tokens, rows, ends)` computes a tuple of arrays of R rows: of floats x [R, C], tokens [R], or both.
`rows` are the rows' positions and sequences, `ends` the same at the positions up to which each attends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from core.kernels.cpu.token_program import TokenPositions
from core.kernels.cuda.decode_kernel import part_count
from core.kernels.cuda.fused_kernels import SplitSums
from core.kernels.kv_cache import PAGE, KVCache, TokenBatch
from core.ops.cpu_arrays import Array as CpuArray
from core.ops.cpu_tokens import CpuTokenOps
from core.ops.cuda_tokens import CudaTokenOps, FusedBatch, Residual
from core.ops.ops import Layer
from core.ops.packed import PackedLayers
from core.ops.trace import TraceOps
from core.quant.dynamic import Int8DynamicLinear
from llm.backends.backend import FUSED, TextBackend
from llm.backends.step_graphs import rung
from llm.backends.torch_ops import TorchTokenOps
from llm.families import family

D = TypeVar("D")
Walk = Callable[..., tuple[Any, ...]]
Columns = Tensor | Sequence[Tensor]  # int32 [R] each: tokens, positions, sequences, and ends unless as the positions


def forwards(
    backend: TextBackend, network: nn.Module, cache: KVCache, make: Callable[[Callable[[Layer], Layer]], D]
) -> tuple[Forwards, D]:
    """Choose the kernels that run the model of `backend`; returns them and what `make` makes of the layers.

    `make` gets what replaces linear layers: CPU kernels read them in INT8, scaled by row. What a rounded drafter
    guesses is verified all the same, and other rows have no share in it.
    """
    rounded = nn.ModuleList()

    def in_int8(layer: nn.Linear | Int8DynamicLinear) -> nn.Module:  # a quantized model's head already is
        rounded.append(layer if isinstance(layer, Int8DynamicLinear) else Int8DynamicLinear.of(layer, None))
        return rounded[-1]

    if backend.packed is not None:
        decoder = make(in_int8)
        return ProgramForwards(network, cache, PackedLayers(backend.packed.library, rounded)), decoder
    kind = FusedForwards if backend.kind == FUSED else Forwards
    return kind(network, cache), make(lambda layer: layer)


class Forwards:
    """Runs walks by torch."""

    def __init__(self, network: nn.Module, cache: KVCache) -> None:
        self.cache, self.device = cache, cache.table.device
        self._angles = family.angles(network, cache.table.shape[1] * PAGE, self.device)
        self._bytes = sum(weight.nbytes for weight in network.parameters())
        self._ops: Any = TorchTokenOps(cache, self._angles)

    @property
    def size_bytes(self) -> int:
        """Bytes of the drafter's own weights."""
        return self._bytes

    def release(self) -> None:
        """Free duplicate weights."""

    def reach(self, tokens: int) -> None:
        """Set how long the longest sequence of the next walks is."""

    def pack(self, walk: Walk, channels: int | None) -> None:
        """Prepare the weights of a walk, whose x has so many channels. Raises ValueError for unsupported layers."""

    def __call__(self, walk: Walk, x: Tensor | None, columns: Columns = (), *, stream: bool = False) -> list[Tensor]:
        """The arrays of a walk, which the next call may overwrite. `stream`: x is the residual stream, which may be
        changed in place.
        """
        return [*walk(self._ops, x, *_rows(_torch_rows, columns))]


def _rows(make: Callable[[Tensor, Tensor, Tensor], Any], columns: Columns) -> tuple[Tensor | None, Any, Any]:
    """A walk's tokens, rows and ends."""
    if not len(columns):
        return None, None, None
    tokens, positions, sequences, *ends = columns
    rows = make(tokens, positions, sequences)
    return tokens, rows, make(tokens, ends[0], sequences) if ends else rows


def _torch_rows(tokens: Tensor, positions: Tensor, sequences: Tensor) -> TokenBatch:
    return TokenBatch(tokens, positions, sequences, tokens[:0])


class _Program(NamedTuple):
    ops: CpuTokenOps
    x: CpuArray | None
    columns: Tensor  # int32 [4, R]
    out: list[CpuArray]


class ProgramForwards(Forwards):
    """Runs walks as programs of CPU kernels, one for each number of rows."""

    def __init__(self, network: nn.Module, cache: KVCache, layers: PackedLayers) -> None:
        super().__init__(network, cache)
        self._layers = layers
        self._programs: dict[tuple[Walk, int], _Program] = {}

    @property
    def size_bytes(self) -> int:
        return self._layers.size_bytes

    def release(self) -> None:
        self._layers.release()

    def pack(self, walk: Walk, channels: int | None) -> None:
        self._program(walk, 1, channels)

    def __call__(self, walk: Walk, x: Tensor | None, columns: Columns = (), *, stream: bool = False) -> list[Tensor]:
        count, channels = (columns[0].shape[0], None) if x is None else x.shape
        program = self._programs.get((walk, count)) or self._program(walk, count, channels)
        if x is not None and program.x is not None:
            program.x.x.copy_(x)
        if isinstance(columns, Tensor):
            program.columns[: len(columns)].copy_(columns)
        program.ops.program.run()
        return [array.x for array in program.out]

    def _program(self, walk: Walk, count: int, channels: int | None) -> _Program:
        ops = CpuTokenOps(self._layers.library, self._layers, self.cache, self._angles)
        x = None if channels is None else ops.input((count, channels))
        columns = ops.program.buffer(4, count, dtype=torch.int32)
        tokens, positions, sequences, ends = columns
        rows = TokenPositions(positions, sequences, self.cache.table)
        out = walk(ops, x, CpuArray(tokens, (count,), None), rows, replace(rows, positions=ends))
        program = self._programs[walk, count] = _Program(ops, x, columns, [*out])
        return program


class FusedForwards(Forwards):
    """Runs walks as fused kernels. Rows at position -1 write, and see, nothing."""

    def __init__(self, network: nn.Module, cache: KVCache) -> None:
        super().__init__(network, cache)
        self._dtype = next(network.parameters()).dtype
        self._ops = CudaTokenOps(self._dtype, cache, self._angles)
        self.parts = 1

    def reach(self, tokens: int) -> None:
        self.parts = rung(part_count(tokens))

    def pack(self, walk: Walk, channels: int | None) -> None:
        followed = TraceOps()
        walk(followed, None if channels is None else (1, channels), (1,), None, None)
        for call in followed.calls:  # joined weights exist before anything is recorded
            self._ops.pack(call.operation, call.layers)

    def __call__(self, walk: Walk, x: Tensor | None, columns: Columns = (), *, stream: bool = False) -> list[Tensor]:
        given = Residual(x) if stream and x is not None else x
        return [self._whole(y) for y in walk(self._ops, given, *_rows(self._fused_rows, columns))]

    def _whole(self, y: Tensor | SplitSums | Residual) -> Tensor:
        if isinstance(y, SplitSums):
            return y.whole().to(self._dtype)
        return y.settle(None) if isinstance(y, Residual) else y

    def _fused_rows(self, tokens: Tensor, positions: Tensor, sequences: Tensor) -> FusedBatch:
        return FusedBatch(tokens, positions, sequences, None, None, None, self.parts)
