"""The torch lowering of decoders: rotation and attention on a KV cache, for what our kernels do not run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from core.kernels.kv_cache import KVCache, TokenBatch
from core.ops.ops import Layer
from core.ops.reference import TorchOps
from llm.backends.attention import PagedContext, paged_attention


class TorchTokenOps(TorchOps):
    """`core.ops.ops.TokenOps` on tensors [T, C]. Rows are a `TokenBatch`."""

    def __init__(self, cache: KVCache, angles: Sequence[Tensor]) -> None:
        """`angles` of each layer, fp32 [positions, d]: cosines, then sines."""
        self._cache, self._angles = cache, angles

    def embed(self, tokens: Tensor, embedding: Layer, *, scale: float = 1.0) -> Tensor:
        weight: Tensor = embedding.weight
        return weight[tokens.long()] * scale

    def rotate_paged(
        self, qkv: Tensor, rows: TokenBatch, layer: int, *, heads: int, norms: tuple[Layer, Layer] | None = None
    ) -> Tensor:
        angles = self._angles[layer][rows.positions.long()]
        turned = self.rotate(qkv[None], angles[None], heads=heads, norms=norms)[0].unflatten(-1, (-1, angles.shape[-1]))
        kv_heads = self._cache.kv_heads
        queries, keys, values = turned.split([heads, kv_heads, kv_heads], dim=1)
        self._cache.write(layer, keys, values, rows)
        flat: Tensor = queries.flatten(1)
        return flat

    def attend_paged(
        self, q: Tensor, rows: TokenBatch, layer: int, *, scale: float, to: Layer, window: int = 0, cap: float = 0.0
    ) -> Tensor:
        queries, context = q.unflatten(1, (-1, self._cache.head_dim)), PagedContext.of(self._cache, rows)
        return paged_attention(queries, context, layer, scale, window, cap).flatten(1)

    def head(self, x: Tensor, layer: Layer, out: Tensor | None = None) -> Tensor:
        return self.linear(x, layer).float()
