"""The GPU lowering of decoders: fused kernels on a KV cache, nine per layer in decode, and none of torch's.

Up to `MOST_ROWS` rows a product streams the weights and leaves sums over parts of the depth, which the next kernel sums
inline; beyond, the 8-bit kernel for many rows is used. Nothing here waits for the device or copies from the host.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from core.kernels.cuda import (
    decode_kernel,
    driver,
    grouped_kernel,
    int4_kernel,
    sparse_gemm,
    stream,
    stream_kernel,
    tiles,
)
from core.kernels.cuda.chunk_kernel import chunks
from core.kernels.cuda.exchange_kernel import RankSums
from core.kernels.cuda.fused_kernels import SplitSums, add_norm, gate, rotate
from core.kernels.cuda.launching import LATE
from core.kernels.cuda.low_rank import BranchShares, Window
from core.kernels.cuda.quantize import quantize_rows
from core.kernels.cuda.stream_kernel import MOST_ROWS
from core.kernels.cuda.tiles import Tile
from core.kernels.kv_cache import KVCache
from core.ops.branches import LowRank
from core.ops.collectives import Peers
from core.ops.cuda_branches import AdaptableLayers, CudaBranches, CudaRowBranches
from core.ops.fused import Linear, Reader, biases, joined
from core.ops.mixture import Mixture
from core.ops.ops import Layer, rms_eps
from core.quant.dynamic import Int8DynamicLinear
from core.quant.fp4 import Fp4Linear
from core.quant.int4 import FourBitLinear
from core.quant.linear import ScaledWeights
from core.quant.sparse import expanded
from core.quant.w4a8 import W4A8Linear

_PIXEL = Window(1, 1, (1, 1))  # to low-rank kernels a row is an image of one pixel


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
        if self.metadata is not None:
            parts = sparse_gemm.sums(x, self.sparse, early=bool(early))
        elif stream.unsupported_reason(x, self.weight) is None:
            parts = stream.stream(x, self.weight, early=bool(early))
        else:
            parts = stream_kernel.stream(x, self.weight, early=early)
        return SplitSums(parts, self.scale, self.bias)

    def few_gated(
        self, x: Tensor, inverse: Tensor | None, dtype: torch.dtype, early: int, *, gelu: bool = False,
        shares: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """silu(gate) · up, or GELU, times `inverse`, as `dtype`, of at most `MOST_ROWS` rows; the gate's weights come
        first. `shares` [T, 2N] are added to both.
        """
        if self.metadata is not None:
            if shares is not None or inverse is None or dtype != torch.int8 or gelu:
                y = self.many(x)
                return gate(y if shares is None else y + shares, inverse, dtype, gelu=gelu)
            assert self.scale is not None
            arguments = (x, self.sparse, self.scale, self.bias, inverse)
            return sparse_gemm.gated(*arguments, silu=True, gate_first=True, early=bool(early))
        if shares is not None:
            return stream_kernel.gated(
                x, self.weight, self.scale, self.bias, inverse, dtype, gelu=gelu, shares=shares, early=early
            )
        if self.scale is not None and stream.unsupported_reason(x, self.weight, gated=True) is None:
            return stream.gated(x, self.weight, self.scale, self.bias, inverse, dtype, gelu=gelu, early=bool(early))
        return stream_kernel.gated(x, self.weight, self.scale, self.bias, inverse, dtype, gelu=gelu, early=early)

    def logits(self, x: Tensor, out: Tensor, early: int) -> None:
        """Compute the product of at most `MOST_ROWS` rows in fp32."""
        sums = stream_kernel.stream(x, self.weight, out=out, early=early)
        if sums.data_ptr() != out.data_ptr() or self.scale is not None or self.bias is not None:
            out.copy_(SplitSums(sums, self.scale, self.bias).whole())

    def many(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, N] in the base type, which takes the place of `residual`."""
        tiled = self.kind is not None and self.metadata is None
        return self(x, residual, residual, _tile(x, len(self.weight)) if tiled else None)

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes if self.metadata is None else self.sparse.nbytes


class Int8Head:
    """A head in INT8 that reads tokens [T, K] in the base type, each scaled by its own largest magnitude."""

    def __init__(self, layer: Int8DynamicLinear) -> None:
        self._weight, self._scale, self._bias = layer.weight, layer.scale, layer.bias
        self.weight_bytes = layer.weight.nbytes

    def logits(self, x: Tensor, out: Tensor, early: int) -> None:
        """Compute the logits [T, V] of at most `MOST_ROWS` rows in fp32."""
        levels, scale = quantize_rows(x, early=early)
        if stream.unsupported_reason(levels, self._weight) is None:
            stream.scaled(levels, scale, self._weight, self._scale, self._bias, out, early=bool(early))
            return
        sums = stream_kernel.stream(levels, self._weight, early=early)
        y = SplitSums(sums).whole() * scale[:, None] * self._scale
        out.copy_(y if self._bias is None else y + self._bias)


class Int4TokenLinear:
    """A `TokenLinear` whose weights have 4 bits."""

    def __init__(self, modules: Sequence[Any], base: torch.dtype) -> None:
        """Raises ValueError for modules that cannot be one product."""
        Reader.of(modules)
        words, scale = joined(modules, "weight"), joined(modules, "scale")
        if isinstance(modules[0], W4A8Linear):
            self._weight = int4_kernel.packed_w4a8(words, joined(modules, "group"), scale)
        elif isinstance(modules[0], Fp4Linear):
            self._weight = int4_kernel.packed_fp4(words, scale, joined(modules, "total"))
        else:
            if any((module.zero is None) != (modules[0].zero is None) for module in modules):
                raise ValueError("layers that read one input are quantized in different ways")
            zero = None if modules[0].zero is None else joined(modules, "zero")
            self._weight = int4_kernel.packed(words, scale, zero)
        self._base, self._bias = base, biases(modules)

    def few(self, x: Tensor, early: int) -> SplitSums:
        return SplitSums(int4_kernel.stream(x, self._weight, early=early), self._weight.scale, self._bias)

    def few_gated(
        self, x: Tensor, inverse: Tensor | None, dtype: torch.dtype, early: int, *, gelu: bool = False
    ) -> Tensor:
        return int4_kernel.gated(x, self._weight, self._bias, inverse, dtype, gelu=gelu, early=early)

    def many(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return int4_kernel.product(x, self._weight, self._base, self._bias, residual, out=residual)

    @property
    def weight_bytes(self) -> int:
        return self._weight.nbytes


class TokenExperts:
    """A mixture of experts on tokens [T, C], few or many."""

    def __init__(self, mixture: Mixture, base: torch.dtype) -> None:
        """Raises ValueError for experts that the kernels do not support."""
        self._mixture, self._base = mixture, base
        self._router = mixture.router.weight.detach()
        self._gate_up, self._down = (Linear([expanded(layer)], base) for layer in (mixture.gate_up, mixture.down))
        if self._gate_up.kind != self._down.kind or self._gate_up.bias is not None or self._down.bias is not None:
            raise ValueError("experts with biases, or of which only some layers are quantized, are not known")

    def __call__(self, x: Tensor, early: int, *, gelu: bool) -> SplitSums:
        """x in the base type to the parts of the result, one from each of a row's experts."""
        m, dtype = self._mixture, self._gate_up.kind or self._base
        chosen, weights, x = grouped_kernel.route(
            x, self._router, m.top, normalized=m.normalized, inverse=self._gate_up.inverse, dtype=dtype, early=early
        )
        tiles = [
            grouped_kernel.choose(
                chosen.numel(),
                m.experts,
                layer.channels,
                dtype.itemsize,
                gated=gated,
                shared_bytes=grouped_kernel.shared_bytes(x.device),
            )
            for layer, gated in ((self._gate_up, True), (self._down, False))
        ]
        places = grouped_kernel.sort(chosen, m.experts, tiles[0].rows, early=early)
        hidden = grouped_kernel.gated(
            x, self._gate_up.weight, self._gate_up.scale, self._down.inverse, dtype, places, m.top, m.experts,
            tiles[0], gelu=gelu, early=early,
        )  # fmt: skip
        return SplitSums(
            grouped_kernel.down(
                hidden, self._down.weight, self._down.scale, weights, self._base, places, m.experts, tiles[1],
                early=early,
            )
        )  # fmt: skip

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a token's forward reads."""
        stacks = self._gate_up.weight.nbytes + self._down.weight.nbytes
        return int(self._router.nbytes) + stacks * self._mixture.top // self._mixture.experts


def _added(sums: SplitSums, shares: BranchShares) -> SplitSums:
    """The sums with shares. Rows without any keep their bits."""
    parts, added = sums.parts, shares.alone(sums.parts.shape[-1]).float()
    if parts.dtype == torch.int32:  # exact in any order
        parts = parts.sum(0, keepdim=True, dtype=torch.int32).float()
    parts[0] += added if sums.scale is None else added / sums.scale
    return SplitSums(parts, sums.scale, sums.bias)


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

    __slots__ = ("index", "output_rows", "slot", "sums", "x")

    def __init__(self, x: Tensor, index: Tensor | None = None) -> None:
        self.x, self.index = x, index
        self.sums: SplitSums | None = None
        self.output_rows: Tensor | None = None
        self.slot = 0  # of the next `Exchange`: a layer has two, and so does each forward begin with the first

    def settle(self, peers: Peers | None) -> Tensor:
        """Return the stream [T, C] with all that was added to it, in memory. `peers`: the ranks that share sums."""
        if self.index is not None:
            self.x, self.index = self.x[self.index.long()], None
        if isinstance(self.sums, RankSums):  # gathered: all ranks meet, so that the next forward may begin at any slot
            assert peers is not None
            self.sums = peers.gathered(self.sums, self.x.dtype)
        if self.sums is not None:
            self.x, self.sums = (self.x.float() + self.sums.whole()).to(self.x.dtype), None
        return self.x


class CudaTokenOps:
    """The operations of `core.ops.ops.TokenOps` that decoders use. Rows are a `FusedBatch`.

    Arrays are what the next operation takes: tensors in the type of the layer that reads them, a product's `SplitSums`,
    or the `Residual` stream, which is changed in place.
    """

    def __init__(
        self, base: torch.dtype, cache: KVCache, angles: Sequence[Tensor], peers: Peers | None = None
    ) -> None:  # fmt: skip
        """`base` is the type of activations between layers. `angles` of each layer, fp32 [positions, d]: cosines, then
        sines. `peers`: the ranks that share each layer; what is added to the stream is a sum over them.
        """
        device = cache.table.device
        # Programmatic dependent launch is available on Hopper and later.
        can_be_early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self.early = LATE if can_be_early else 0
        self._base, self._cache, self._angles = base, cache, angles
        self._peers = peers if peers is not None and peers.size > 1 else None
        # By modules, whose identity they go by; the walk asks for them before each launch.
        self._products: dict[tuple[Layer, ...], TokenLinear | Int4TokenLinear] = {}
        self._heads: dict[Layer, TokenLinear | Int8Head] = {}
        self._experts: dict[Mixture, TokenExperts] = {}
        self._readers: dict[tuple[Layer, ...], tuple[Tensor | None, torch.dtype]] = {}
        self._norms: dict[Layer, tuple[Tensor, float]] = {}
        self.branches: CudaRowBranches | None = None  # of rows, where adapters are used
        self._adaptable: AdaptableLayers | None = None
        self._lock = threading.Lock()  # adapters are packed on any thread

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
            whole = x.whole() if self._peers is None else self._peers.sum(x.whole())
            if residual is None:
                return add_norm(whole.to(self._base), weight, eps, *self._reader(tuple(to)))
            residual.x += add_norm(whole, weight, eps, None, self._base)
            return residual
        inverse, dtype = self._reader(tuple(to))
        if x.index is not None:
            out = torch.empty(len(x.index), x.x.shape[1], dtype=self._base, device=x.x.device)
            a = add_norm(x.x, weight, eps, inverse, dtype, index=x.index, sum_out=out, early=self.early)
            x.x, x.index = out, None
        elif isinstance(x.sums, RankSums):
            assert self._peers is not None and self._peers.exchange is not None
            a = self._peers.exchange.add_norm_(x.x, x.sums, weight, eps, inverse, dtype, slot=x.slot, early=self.early)
            x.sums, x.slot = None, 1 - x.slot
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
        shares = self._shares(product, x)
        if len(x) > MOST_ROWS:
            if residual is not None and self._peers is not None:
                residual.sums = SplitSums(self._peers.sum(product.many(x))[None])
                return residual
            y = product.many(x, None if residual is None else residual.x)
            y = y if shares is None else shares.add(y)
            return SplitSums(y[None]) if residual is None else residual
        sums = product.few(x, self.early)
        sums = sums if shares is None else _added(sums, shares)
        if residual is None:
            return sums
        residual.sums = sums if self._peers is None else self._peers.parts(sums, self._base)
        return residual

    def gated(self, x: Tensor, *layers: Layer, act: str, to: Layer) -> Tensor:
        assert act in ("silu", "gelu_tanh")
        product, gelu = self._product(layers[::-1]), act == "gelu_tanh"
        inverse, dtype = self._reader((to,))
        shares = self._shares(product, x)
        if len(x) > MOST_ROWS:
            y = product.many(x)
            return gate(y if shares is None else shares.add(y), inverse, dtype, gelu=gelu)
        if shares is None:
            return product.few_gated(x, inverse, dtype, self.early, gelu=gelu)
        assert isinstance(product, TokenLinear)
        added = shares.alone(len(product.weight))
        return product.few_gated(x, inverse, dtype, self.early, gelu=gelu, shares=added)

    def mixture(self, x: Tensor, mixture: Mixture, *, act: str, residual: Residual) -> Residual:
        assert act in ("silu", "gelu_tanh")
        residual.sums = self._mixture(mixture)(x, self.early, gelu=act == "gelu_tanh")
        return residual

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
        head = self._head(layer)
        logits = torch.empty(len(x), len(layer.weight), device=x.device) if out is None else out
        for start in range(0, len(x), MOST_ROWS):
            part = slice(start, start + MOST_ROWS)
            head.logits(x[part], logits[part], self.early)
        return logits

    # -- adapters ----------------------------------------------------------------------------------------------------

    def pack_branches(self, factors: Mapping[str, LowRank], model: nn.Module) -> CudaBranches:
        """An adapter of these layers of a model, whose walks have been packed. On any thread.

        Raises ValueError, naming the layer, for a factor that does not fit it.
        """
        with self._lock:
            if self._adaptable is None:
                layers = [product for product in self._products.values() if isinstance(product, TokenLinear)]
                for number, layer in enumerate(layers):
                    layer.number = number
                self._adaptable = AdaptableLayers(layers, model)
        return self._adaptable.pack(factors)

    def _shares(self, product: TokenLinear | Int4TokenLinear, x: Tensor) -> BranchShares | None:
        """What the adapters of rows x [T, K] add to a product; None if no row has any in it."""
        if self.branches is None or self.branches.shape is None or not isinstance(product, TokenLinear):
            return None
        return self.branches.shares(product, x[:, None, None], _PIXEL)

    # -- weights -----------------------------------------------------------------------------------------------------

    def pack(self, operation: str, layers: tuple[Layer, ...]) -> None:
        """Join the weights of an operation's layers, if it has any. Raises ValueError for layers that do not fit."""
        if operation == "mixture":
            self._mixture(layers[0])
        elif operation == "head":
            self._head(layers[0])
        elif operation in ("linear", "gated"):
            self._product(layers[::-1] if operation == "gated" else layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a token's forward reads: all products, without embeddings."""
        layers = (*self._products.values(), *self._heads.values(), *self._experts.values())
        return sum(layer.weight_bytes for layer in layers)

    def _mixture(self, mixture: Mixture) -> TokenExperts:
        experts = self._experts.get(mixture)
        if experts is None:
            experts = self._experts[mixture] = TokenExperts(mixture, self._base)
        return experts

    def _head(self, layer: Layer) -> TokenLinear | Int8Head:
        head = self._heads.get(layer)
        if head is None:
            if isinstance(layer, FourBitLinear):
                raise ValueError(f"a head of {type(layer).__name__} is not known")
            kind = Int8Head(layer) if isinstance(layer, Int8DynamicLinear) else TokenLinear([layer], self._base)
            head = self._heads[layer] = kind
        return head

    def _product(self, layers: tuple[Layer, ...]) -> TokenLinear | Int4TokenLinear:
        product = self._products.get(layers)
        if product is None:
            kind = Int4TokenLinear if isinstance(layers[0], FourBitLinear) else TokenLinear
            product = kind(layers, self._base)
            self._products[layers] = product
        return product

    def _reader(self, to: tuple[Layer, ...]) -> tuple[Tensor | None, torch.dtype]:
        reader = self._readers.get(to)
        if reader is None:
            # A head with dynamic scales rounds its rows itself; other such layers have been refused.
            by_row = not to or isinstance(to[0], Int8DynamicLinear)
            kind, inverse = (None, None) if by_row else Reader.of(to)
            reader = self._readers[to] = inverse, kind or self._base
        return reader

    def _norm(self, norm: Layer) -> tuple[Tensor, float]:
        entry = self._norms[norm] = norm.weight.detach(), rms_eps(norm)
        return entry
