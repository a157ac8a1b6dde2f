"""The CPU lowering of decoders: rotation and attention on a KV cache, as calls of a program."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.kernels.cpu.token_program import PagedLayer, TokenPositions, TokenProgram
from core.kernels.kv_cache import KVCache
from core.ops.cpu import CpuOps, head_norms
from core.ops.cpu_arrays import Array
from core.ops.mixture import Mixture
from core.ops.ops import Activation, Layer
from core.ops.packed import PackedLayers


@dataclass(frozen=True, eq=False)
class TokenRows(TokenPositions):
    """Positions of a program's rows, and `features` [rows, channels], where hidden states are captured."""

    program: TokenProgram
    features: Tensor | None = None

    def capture(self, x: Array, place: int) -> None:
        """Copy x [T, C] to the features' columns from `place` · C on."""
        assert self.features is not None
        width = x.x.shape[1]
        self.program.place(x.x, self.features[:, place * width : (place + 1) * width], images=1)


class CpuTokenOps(CpuOps):
    """`core.ops.ops.TokenOps` on arrays of one program. Rows are `TokenPositions`."""

    def __init__(self, library: ctypes.CDLL, layers: PackedLayers, cache: KVCache, angles: Sequence[Tensor]) -> None:
        """`angles` of each layer, fp32 [positions, d]: cosines, then sines."""
        super().__init__(library, layers)
        self._cache, self._angles = cache, angles

    def rows(self, count: int, features: int = 0) -> TokenRows:
        """Buffers of positions and sequences, to be filled before each run, and of so many channels of features."""
        positions, sequences = (self.program.buffer(count, dtype=torch.int32) for _ in range(2))
        captured = self.program.buffer(count, features) if features else None
        return TokenRows(positions, sequences, self._cache.table, self.program, captured)

    def embed(self, tokens: Array, embedding: Layer, *, scale: float = 1.0) -> Array:
        return self._own(self.program.embed(self._layers.embedding(embedding), tokens.x, scale=scale), tokens.shape)

    def rotate_paged(
        self, qkv: Array, rows: TokenPositions, layer: int, *, heads: int, norms: tuple[Layer, Layer] | None = None
    ) -> Array:
        pages = PagedLayer(*self._cache.layer(layer))
        q = self.program.rotate(qkv.x, self._angles[layer], rows, pages, heads=heads, **head_norms(norms))
        return Array(q, (*qkv.shape[:-1], q.shape[-1]), None, qkv)

    def attend_paged(
        self, q: Array, rows: TokenPositions, layer: int, *, scale: float, to: Layer, window: int = 0, cap: float = 0.0
    ) -> Array:
        pages, heads = PagedLayer(*self._cache.layer(layer)), q.shape[-1] // self._cache.head_dim
        inverse = self._layers.inverse(to)
        out = self.program.paged_attention(
            q.x, rows, pages, heads=heads, scale=scale, inverse=inverse, window=window, cap=cap
        )
        return self._own(out, q.shape[:-1])

    def mixture(self, x: Array, mixture: Mixture, *, act: Activation, residual: Array) -> Array:
        rows, count = x.x.shape[0], mixture.experts
        scores = self._own(
            self.program.product(x.x, self._layers.router(mixture.router), grid=(1, 1, rows)), x.shape[:-1]
        )
        gate_up = self._layers.stack(mixture.gate_up, count, geglu=True)
        down = self._layers.stack(mixture.down, count)
        if (inverse := gate_up[0].inverse) is not None:
            x = self._own(self.program.quantize(x.x, inverse), x.shape[:-1])
        out = self.program.mixture(
            x.x, scores.x, [(a.weights, b.weights) for a, b in zip(gate_up, down, strict=True)], top=mixture.top,
            normalized=mixture.normalized, inverse=down[0].inverse, residual=residual.x, act=act,
        )  # fmt: skip
        return self._own(out, residual.shape[:-1])

    def cat(self, x: Array, y: Array) -> Array:  # type: ignore[override]  # of tokens, read by products
        width = x.x.shape[1]
        out = self.program.buffer(x.x.shape[0], width + y.x.shape[1], dtype=x.x.dtype)
        self.program.place(x.x, out[:, :width], images=1)
        self.program.place(y.x, out[:, width:], images=1)
        return self._own(out, x.shape[:-1])

    def head(self, x: Array, layer: Layer, out: None = None) -> Array:
        return self.linear(x, layer)
