"""The GPU lowering of decoders: fused kernels on a KV cache, nine per layer in decode, and none of torch's.

Up to `MOST_ROWS` rows a product streams the weights and leaves sums over parts of the depth, which the next kernel sums
inline; beyond, the 8-bit kernel for many rows is used. Nothing here waits for the device or copies from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from core.kernels.cuda import decode_kernel, driver, int4_kernel, stream, stream_kernel, tiles
from core.kernels.cuda.chunk_kernel import chunks
from core.kernels.cuda.fused_kernels import SplitSums, add_norm, gate, rotate
from core.kernels.cuda.launching import LATE
from core.kernels.cuda.stream_kernel import MOST_ROWS
from core.kernels.cuda.tiles import Tile
from core.kernels.kv_cache import KVCache
from core.ops.fused import Linear, Reader, biases, joined
from core.ops.ops import Layer, rms_eps
from core.quant.int4 import Int4Linear
from core.quant.linear import ScaledWeights


@dataclass(frozen=True, eq=False)
class FusedBatch:
    """The tokens of one forward on the device, as in `TokenBatch`, and their grouping for attention."""

    tokens: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]; -1: a padding row
    sequences: Tensor  # int32 [T]
    output_rows: Tensor | None  # int32 [L]; None: all, in order
    singles: Tensor | None  # int32: rows alone of their sequence; None: all
    tiles: Tensor | None  # int32 [n, 3], see `core.kernels.cuda.chunk_kernel.tiles`; None: there are none
    parts: int  # at least `decode_kernel.part_count` of the longest sequence among the singles
    state_rows: Tensor | None = None  # int32 [S]: those whose hidden states are wanted
    features: Tensor | None = None  # [T, channels]: where hidden states are captured

    def capture(self, x: Residual, place: int) -> None:
        """Copy x [T, C] to the features' columns from `place` · C on."""
        assert self.features is not None
        width = x.x.shape[1]
        self.features[:, place * width : (place + 1) * width].copy_(x.x)

    def of(self, tokens: Tensor) -> FusedBatch:
        """The same rows with other tokens."""
        return replace(self, tokens=tokens)


class TokenLinear(Linear):
    """y = x · Wᵀ + b + residual of tokens [T, K], few or many."""

    def __init__(self, modules: Sequence[Any], base: torch.dtype) -> None:
        """Raises ValueError for modules that cannot be one product."""
        for module in modules:
            if type(module) is not nn.Linear and not isinstance(module, ScaledWeights):
                raise ValueError(f"layers of {type(module).__name__} are not known")
        super().__init__(modules, base)

    def few(self, x: Tensor, early: int) -> SplitSums:
        """x of the input's type, at most `MOST_ROWS` rows."""
        if stream.unsupported_reason(x, self.weight) is None:
            parts = stream.stream(x, self.weight, early=bool(early))[None]
        else:
            parts = stream_kernel.stream(x, self.weight, early=early)
        return SplitSums(parts, self.scale, self.bias)

    def few_gated(
        self, x: Tensor, inverse: Tensor | None, dtype: torch.dtype, early: int, *, gelu: bool = False
    ) -> Tensor:
        """silu(gate) · up, or GELU, times `inverse`, as `dtype`, of at most `MOST_ROWS` rows; the gate's weights come
        first.
        """
        if self.scale is not None and stream.unsupported_reason(x, self.weight, gated=True) is None:
            return stream.gated(x, self.weight, self.scale, self.bias, inverse, dtype, gelu=gelu, early=bool(early))
        return stream_kernel.gated(x, self.weight, self.scale, self.bias, inverse, dtype, gelu=gelu, early=early)

    def many(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, N] in the base type, which takes the place of `residual`."""
        return self(x, residual, residual, None if self.kind is None else _tile(x, len(self.weight)))

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes


class Int4TokenLinear:
    """A `TokenLinear` whose weights have 4 bits."""

    def __init__(self, modules: Sequence[Any]) -> None:
        """Raises ValueError for modules that cannot be one product."""
        Reader.of(modules)
        if any((module.zero is None) != (modules[0].zero is None) for module in modules):
            raise ValueError("layers that read one input are quantized in different ways")
        zero = None if modules[0].zero is None else joined(modules, "zero")
        self._weight = int4_kernel.packed(joined(modules, "weight"), joined(modules, "scale"), zero)
        self._bias = biases(modules)

    def few(self, x: Tensor, early: int) -> SplitSums:
        return SplitSums(int4_kernel.stream(x, self._weight, early=early), None, self._bias)

    def few_gated(
        self, x: Tensor, inverse: Tensor | None, dtype: torch.dtype, early: int, *, gelu: bool = False
    ) -> Tensor:
        return int4_kernel.gated(x, self._weight, self._bias, inverse, dtype, gelu=gelu, early=early)

    def many(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return int4_kernel.product(x, self._weight, self._bias, residual, out=residual)

    @property
    def weight_bytes(self) -> int:
        return self._weight.nbytes


def _tile(x: Tensor, columns: int) -> Tile | None:
    """The tile for the next power of two of rows: each distinct tile is another compiled kernel."""
    if driver.unsupported_reason(x.device) is not None:
        return None
    rows, depth = x.shape
    name, processors = torch.cuda.get_device_name(x.device), driver.multiprocessors(x.device.index)
    return tiles.choose(name, "linear", tiles.bucket(rows), columns, depth, processors)


class Residual:
    """The residual stream [T, C]: `x` in memory, and what the next norm brings into it.

    That is rows `index` of x, or plus `sums`. If `output_rows` is given, a norm returns only these rows.
    """

    __slots__ = ("index", "output_rows", "sums", "x")

    def __init__(self, x: Tensor, index: Tensor | None = None) -> None:
        self.x, self.index = x, index
        self.sums: SplitSums | None = None
        self.output_rows: Tensor | None = None


class CudaTokenOps:
    """The operations of `core.ops.ops.TokenOps` that decoders use. Rows are a `FusedBatch`.

    Arrays are what the next operation takes: tensors in the type of the layer that reads them, a product's `SplitSums`,
    or the `Residual` stream, which is changed in place.
    """

    def __init__(self, base: torch.dtype, cache: KVCache, angles: Sequence[Tensor]) -> None:
        """`base` is the type of activations between layers. `angles` of each layer, fp32 [positions, d]: cosines, then
        sines.
        """
        device = cache.table.device
        # Programmatic dependent launch is available on Hopper and later.
        can_be_early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self.early = LATE if can_be_early else 0
        self._base, self._cache, self._angles = base, cache, angles
        # By modules, whose identity they go by; the walk asks for them before each launch.
        self._products: dict[tuple[Layer, ...], TokenLinear | Int4TokenLinear] = {}
        self._readers: dict[tuple[Layer, ...], tuple[Tensor | None, torch.dtype]] = {}
        self._norms: dict[Layer, tuple[Tensor, float]] = {}

    def embed(self, tokens: Tensor, embedding: Layer, *, scale: float = 1.0) -> Residual:
        if scale != 1:
            return Residual(embedding.weight.detach()[tokens.long()] * scale)
        return Residual(embedding.weight.detach(), tokens)

    def rms_norm(
        self, x: Residual | SplitSums, norm: Layer, *, residual: Residual | None = None, to: Sequence[Layer] = ()
    ) -> Tensor | Residual:
        """RMSNorm of the stream for the layers `to`; or of a product's sums, added to `residual` if that is given."""
        weight, eps = self._norms.get(norm) or self._norm(norm)
        if isinstance(x, SplitSums):
            if residual is None:
                return add_norm(x.whole().to(self._base), weight, eps, *self._reader(tuple(to)))
            residual.x += add_norm(x.whole(), weight, eps, None, self._base)
            return residual
        inverse, dtype = self._reader(tuple(to))
        if x.index is not None:
            out = torch.empty(len(x.index), x.x.shape[1], dtype=self._base, device=x.x.device)
            a = add_norm(x.x, weight, eps, inverse, dtype, index=x.index, sum_out=out, early=self.early)
            x.x, x.index = out, None
        elif x.sums is not None:
            a = add_norm(x.x, weight, eps, inverse, dtype, sums=x.sums, sum_out=x.x, early=self.early)
            x.sums = None
        else:
            a = add_norm(x.x, weight, eps, inverse, dtype)
        if x.output_rows is None:
            return a
        rows = x.output_rows.long()
        return a.view(torch.uint8)[rows].view(a.dtype) if a.element_size() == 1 else a[rows]

    def linear(self, x: Tensor, *layers: Layer, residual: Residual | None = None) -> SplitSums | Residual:
        product = self._product(layers)
        if len(x) > MOST_ROWS:
            if residual is None:
                return SplitSums(product.many(x)[None])
            product.many(x, residual.x)
            return residual
        sums = product.few(x, self.early)
        if residual is None:
            return sums
        residual.sums = sums
        return residual

    def gated(self, x: Tensor, *layers: Layer, act: str, to: Layer) -> Tensor:
        assert act in ("silu", "gelu_tanh")
        product, gelu = self._product(layers[::-1]), act == "gelu_tanh"
        inverse, dtype = self._reader((to,))
        if len(x) > MOST_ROWS:
            return gate(product.many(x), inverse, dtype, gelu=gelu)
        return product.few_gated(x, inverse, dtype, self.early, gelu=gelu)

    def rotate_paged(
        self, qkv: SplitSums, rows: FusedBatch, layer: int, *, heads: int, norms: tuple[Layer, Layer] | None = None
    ) -> Tensor:
        """[T, heads, d]."""
        arguments = (qkv, self._angles[layer], rows.positions, rows.sequences, self._cache, layer, heads, self._base)
        if norms is None:
            return rotate(*arguments, early=self.early)
        (q_norm, eps), (k_norm, _) = (self._norms.get(norm) or self._norm(norm) for norm in norms)
        return rotate(*arguments, q_norm=q_norm, k_norm=k_norm, eps=eps, early=self.early)

    def attend_paged(
        self, q: Tensor, rows: FusedBatch, layer: int, *, scale: float, to: Layer, window: int = 0, cap: float = 0.0
    ) -> Tensor:
        inverse, dtype = self._reader((to,))
        pages = (*self._cache.layer(layer), self._cache.table)
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        if rows.singles is None or len(rows.singles):
            decode_kernel.decode(
                q, *pages, rows.positions, rows.sequences, scale, parts=rows.parts, index=rows.singles,
                inverse=inverse, out=out, window=window, cap=cap, early=self.early,
            )  # fmt: skip
        if rows.tiles is not None:
            chunks(q, *pages, rows.positions, rows.tiles, scale, out, inverse=inverse, window=window, cap=cap)
        return out.flatten(1)

    def cat(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], -1)

    def head(self, x: Tensor, layer: Layer, out: Tensor | None = None) -> Tensor:
        product = self._product((layer,))
        assert isinstance(product, TokenLinear)  # `pack` refuses others
        logits = torch.empty(len(x), len(product.weight), device=x.device) if out is None else out
        for start in range(0, len(x), MOST_ROWS):
            part = x[start : start + MOST_ROWS]
            to = logits[start : start + len(part)]
            sums = stream_kernel.stream(part, product.weight, out=to, early=self.early)
            if sums.data_ptr() != to.data_ptr() or product.scale is not None or product.bias is not None:
                to.copy_(SplitSums(sums, product.scale, product.bias).whole())
        return logits

    # -- weights -----------------------------------------------------------------------------------------------------

    def pack(self, operation: str, layers: tuple[Layer, ...]) -> None:
        """Join the weights of an operation's layers, if it has any. Raises ValueError for layers that do not fit."""
        if operation in ("linear", "head", "gated"):
            product = self._product(layers[::-1] if operation == "gated" else layers)
            if operation == "head" and not isinstance(product, TokenLinear):
                raise ValueError(f"a head of {type(layers[0]).__name__} is not known")

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a token's forward reads: all products, without embeddings."""
        return sum(product.weight_bytes for product in self._products.values())

    def _product(self, layers: tuple[Layer, ...]) -> TokenLinear | Int4TokenLinear:
        product = self._products.get(layers)
        if product is None:
            in_4_bits = isinstance(layers[0], Int4Linear)
            product = Int4TokenLinear(layers) if in_4_bits else TokenLinear(layers, self._base)
            self._products[layers] = product
        return product

    def _reader(self, to: tuple[Layer, ...]) -> tuple[Tensor | None, torch.dtype]:
        reader = self._readers.get(to)
        if reader is None:
            kind, inverse = Reader.of(to) if to else (None, None)
            reader = self._readers[to] = inverse, kind or self._base
        return reader

    def _norm(self, norm: Layer) -> tuple[Tensor, float]:
        entry = self._norms[norm] = norm.weight.detach(), rms_eps(norm)
        return entry
