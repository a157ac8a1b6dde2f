"""A Llama on a GPU as a sequence of fused kernels: nine per layer in decode, and none of torch's.

The GPU counterpart of `llm.program`. Weights stay in transformers' modules, which become views of the concatenated
ones, so that they are stored once; linear layers may be plain, INT8 or FP8. Up to `MOST_ROWS` rows a product streams
the weights, and the next kernel sums its parts; beyond, the 8-bit kernel of `core.quant` is used. Supports
transformers' Llama layout, which Mistral and Qwen2 share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.kernels.cuda import decode_kernel, driver, stream_kernel, tiles
from core.kernels.cuda.chunk_kernel import chunks
from core.kernels.cuda.fused_kernels import SplitSums, add_norm, gate, rotate
from core.kernels.cuda.launching import LATE
from core.kernels.cuda.linear import linear_int8
from core.kernels.cuda.tiles import Tile
from core.kernels.kv_cache import KVCache
from core.quant.fp8 import Fp8Linear
from core.quant.linear import Int8Linear
from llm import family
from llm.pages import PAGE


@dataclass(frozen=True, eq=False)
class FusedBatch:
    """The tokens of one forward on the device, as in `Step`, and their grouping for attention."""

    tokens: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]; -1: a padding row
    sequences: Tensor  # int32 [T]
    picked: Tensor | None  # int32 [L]; None: all, in order
    singles: Tensor | None  # int32: rows alone of their sequence; None: all
    tiles: Tensor | None  # int32 [n, 3], see `core.kernels.cuda.chunk_kernel.tiles`; None: there are none
    parts: int  # at least `decode_kernel.reach` of the longest sequence among the singles


@dataclass(frozen=True, eq=False)
class FusedLinear:
    """One linear layer, or several with the same input, as one product. 8-bit ones have `scale` and `inverse`."""

    weight: Tensor  # [N, K], int8, E4M3 or floats
    scale: Tensor | None  # fp32 [N]
    bias: Tensor | None  # fp32 [N]
    inverse: Tensor | None  # fp32 [K]

    @classmethod
    def of(cls, *layers: nn.Module) -> FusedLinear:
        """Raises ValueError for layers that cannot be one product. They become views of its tensors."""
        _check_one_product(layers)
        found: list[Any] = list(layers)
        first = found[0]
        quantized = not isinstance(first, nn.Linear)
        weight = first.weight.detach()
        if len(found) > 1:
            weight = _beside([layer.weight.detach() for layer in found])
            for layer, view in zip(found, weight.split([len(layer.weight) for layer in found]), strict=True):
                layer.weight = view if quantized else nn.Parameter(view, requires_grad=False)
        bias = None if first.bias is None else torch.cat([layer.bias.detach().float() for layer in found])
        if not quantized:
            return cls(weight, None, bias, None)
        return cls(weight, torch.cat([layer.scale for layer in found]), bias, first.inverse)

    @property
    def input(self) -> torch.dtype:
        return self.weight.dtype

    def forward_few(self, x: Tensor, *, early: int = 0) -> SplitSums:
        """x [T, K] of the input's type, T at most `MOST_ROWS`."""
        return SplitSums(stream_kernel.stream(x, self.weight, early=early), self.scale, self.bias)

    def forward_many(self, x: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """x [T, K] to [T, N] as `dtype`, plus `residual`, which is then overwritten with it."""
        if self.scale is not None:
            tile = _tile(x, len(self.weight))
            return linear_int8(x, self.weight, self.scale, self.bias, None, residual, dtype, out=residual, tile=tile)
        y = F.linear(x, self.weight, None if self.bias is None else self.bias.to(dtype))
        return y if residual is None else residual.add_(y)


@dataclass(frozen=True, eq=False)
class _Layer:
    norm: Tensor
    qkv: FusedLinear
    out: FusedLinear
    second_norm: Tensor
    wide: FusedLinear  # gate, then up
    down: FusedLinear


def lacks(network: Any, cache: KVCache) -> str | None:
    """Why these kernels cannot run this model on this cache, or None."""
    if (why := decode_kernel.lacks(cache)) is not None:
        return why
    try:
        family.check(network)
        for layer in network.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                _known(getattr(layer.self_attn, name))
        _known(network.lm_head)
    except ValueError as error:
        return str(error)
    if cache.keys.dtype == torch.float8_e4m3fn and torch.cuda.is_available() and _capability() < (8, 9):
        return "keys and values in E4M3 want compute capability 8.9"
    return None


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def _known(layer: nn.Module) -> None:
    if not isinstance(layer, (nn.Linear, Int8Linear, Fp8Linear)):
        raise ValueError(f"layers of {type(layer).__name__} are not known")


class FusedLlama:
    """Runs a Llama on a cache, by one thread at a time, on the current stream."""

    def __init__(self, network: Any, cache: KVCache) -> None:
        """Raises ValueError for a model for which `lacks` gives a reason."""
        if (why := lacks(network, cache)) is not None:
            raise ValueError(why)
        config = network.config
        self.cache = cache
        self.heads = int(config.num_attention_heads)
        self.group = self.heads // cache.kv_heads
        self.early = LATE if self._can_be_early(cache.table.device) else 0
        self._eps = float(network.model.norm.variance_epsilon)
        self._scale = float(network.model.layers[0].self_attn.scaling)
        self._embeddings = network.model.embed_tokens.weight.detach()
        self.dtype = self._embeddings.dtype
        self._layers = [
            _Layer(
                layer.input_layernorm.weight.detach(),
                FusedLinear.of(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                FusedLinear.of(layer.self_attn.o_proj),
                layer.post_attention_layernorm.weight.detach(),
                FusedLinear.of(layer.mlp.gate_proj, layer.mlp.up_proj),
                FusedLinear.of(layer.mlp.down_proj),
            )
            for layer in network.model.layers
        ]
        self._last_norm = network.model.norm.weight.detach()
        self._head = FusedLinear.of(network.lm_head)
        self.vocabulary = len(self._head.weight)
        self._angles = family.angles(network, cache.table.shape[1] * PAGE, self._embeddings.device)

    @staticmethod
    def _can_be_early(device: torch.device) -> bool:
        """Whether programmatic dependent launch is available: Hopper and later."""
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a token's forward reads: all layers and the head, without embeddings."""
        held = [p.weight for layer in self._layers for p in (layer.qkv, layer.out, layer.wide, layer.down)]
        return sum(weight.nbytes for weight in (*held, self._head.weight))

    @torch.inference_mode()
    def __call__(self, rows: FusedBatch, out: Tensor | None = None) -> Tensor:
        """Logits [L, V] in fp32 of the picked rows. `out` may receive them."""
        early = self.early
        few = len(rows.tokens) <= stream_kernel.MOST_ROWS
        x = torch.empty(len(rows.tokens), self._embeddings.shape[1], dtype=self.dtype, device=rows.tokens.device)
        first = self._layers[0]
        a = add_norm(
            self._embeddings, first.norm, self._eps, first.qkv.inverse, first.qkv.input, index=rows.tokens, kept=x,
            early=early,
        )  # fmt: skip
        for number, layer in enumerate(self._layers):
            qkv = (
                layer.qkv.forward_few(a, early=early) if few else SplitSums(layer.qkv.forward_many(a, self.dtype)[None])
            )
            q = rotate(
                qkv, self._angles, rows.positions, rows.sequences, self.cache, number, self.heads, self.dtype,
                early=early,
            )  # fmt: skip
            b = self._attend(q, rows, number, layer.out)
            a = self._onwards(layer.out, b, x, layer.second_norm, layer.wide, few)
            b = self._gated(layer, a, few)
            last = number + 1 == len(self._layers)
            norm = self._last_norm if last else self._layers[number + 1].norm
            a = self._onwards(layer.down, b, x, norm, self._head if last else self._layers[number + 1].qkv, few)
        if rows.picked is not None:
            a = (
                a.view(torch.uint8)[rows.picked.long()].view(a.dtype)
                if a.element_size() == 1
                else a[rows.picked.long()]
            )
        return self._logits(a, out)

    def _onwards(
        self, product: FusedLinear, b: Tensor, x: Tensor, norm: Tensor, then: FusedLinear, few: bool
    ) -> Tensor:
        """Add the product of b to x in place; returns its norm for the following product."""
        if few:
            sums = product.forward_few(b, early=self.early)
            return add_norm(x, norm, self._eps, then.inverse, then.input, sums=sums, kept=x, early=self.early)
        product.forward_many(b, self.dtype, x)
        return add_norm(x, norm, self._eps, then.inverse, then.input)

    def _gated(self, layer: _Layer, a: Tensor, few: bool) -> Tensor:
        wide, then = layer.wide, layer.down
        if few:
            return stream_kernel.gated(
                a, wide.weight, wide.scale, wide.bias, then.inverse, then.input, early=self.early
            )
        return gate(wide.forward_many(a, self.dtype), then.inverse, then.input)

    def _attend(self, q: Tensor, rows: FusedBatch, number: int, then: FusedLinear) -> Tensor:
        cache = self.cache
        layer = (*cache.layer(number), cache.table)
        out = torch.empty(q.shape, dtype=then.input, device=q.device)
        if rows.singles is None or len(rows.singles):
            decode_kernel.decode(
                q, *layer, rows.positions, rows.sequences, self._scale, parts=rows.parts, index=rows.singles,
                inverse=then.inverse, out=out, early=self.early,
            )  # fmt: skip
        if rows.tiles is not None:
            chunks(q, *layer, rows.positions, rows.tiles, self._scale, out, inverse=then.inverse)
        return out.flatten(1)

    def _logits(self, a: Tensor, out: Tensor | None) -> Tensor:
        made = torch.empty(len(a), self.vocabulary, device=a.device) if out is None else out
        for start in range(0, len(a), stream_kernel.MOST_ROWS):
            part = a[start : start + stream_kernel.MOST_ROWS]
            to = made[start : start + len(part)]
            sums = stream_kernel.stream(part, self._head.weight, out=to, early=self.early)
            if sums.data_ptr() != to.data_ptr() or self._head.scale is not None or self._head.bias is not None:
                to.copy_(SplitSums(sums, self._head.scale, self._head.bias).whole())
        return made


def _tile(x: Tensor, columns: int) -> Tile | None:
    """The tile for the next power of two of rows: each distinct tile is another compiled kernel."""
    if driver.lacks(x.device) is not None:
        return None
    rows, depth = x.shape
    name, processors = torch.cuda.get_device_name(x.device), driver.multiprocessors(x.device.index)
    return tiles.choose(name, "linear", tiles.bucket(rows), columns, depth, processors)


def _check_one_product(layers: Sequence[Any]) -> None:
    kinds = {type(layer) for layer in layers}
    if len(kinds) != 1 or not kinds <= {nn.Linear, Int8Linear, Fp8Linear}:
        raise ValueError(f"layers of {', '.join(sorted(kind.__name__ for kind in kinds))} are not one product")
    if kinds != {nn.Linear} and not all(torch.equal(layers[0].inverse, layer.inverse) for layer in layers):
        raise ValueError("layers that read one input have different scales for it")
    if len({layer.bias is None for layer in layers}) != 1:
        raise ValueError("of layers that read one input some have a bias and some have none")


def _beside(weights: Sequence[Tensor]) -> Tensor:
    if weights[0].dtype == torch.float8_e4m3fn:  # torch does not concatenate it everywhere
        return torch.cat([weight.view(torch.uint8) for weight in weights]).view(torch.float8_e4m3fn)
    return torch.cat(list(weights))
