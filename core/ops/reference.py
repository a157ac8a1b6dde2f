"""The torch lowering: each operation computed at once by the modules' own forwards, the reference of all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.ops.ops import Layer, Walk

_ACTS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu}


class TorchOps:
    """`core.ops.ops.Ops` on tensors. Modules are called, so that hooks on them see every input and output."""

    def linear(
        self, x: Tensor, *layers: Layer, act: str = "", residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        parts = [_on_map(layer, x) if _is_conv(layer) else layer(x) for layer in layers]
        y: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        y = y if residual is None else y + residual
        return _ACTS[act](y) if act else y

    def biases(self, x: Tensor, *layers: Layer) -> Tensor:
        return self.linear(x, *layers)

    def gated(self, x: Tensor, *layers: Layer, act: str, to: Layer) -> Tensor:
        hidden, gate = self.linear(x, *layers).chunk(2, dim=-1)
        return hidden * _ACTS[act](gate)

    def conv(
        self, x: Tensor, layer: Layer, *, bias: Tensor | None = None, residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not _padding(layer):
            x = F.pad(x, (0, 0, 0, 1, 0, 1))
        y = _on_map(layer, x)
        y = y if bias is None else y + bias[:, None, None]
        return y if residual is None else y + residual

    def upsample(self, x: Tensor, layer: Layer, *, like: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        size = (2 * x.shape[1], 2 * x.shape[2]) if like is None else like.shape[1:3]
        return _on_map(layer, F.interpolate(x.permute(0, 3, 1, 2), size=size, mode="nearest").permute(0, 2, 3, 1))

    def group_norm(self, x: Tensor, norm: Layer, *, silu: bool = False, to: Sequence[Layer] = ()) -> Tensor:
        y = _on_map(norm, x)
        return F.silu(y) if silu else y

    def layer_norm(self, x: Tensor, norm: Layer, *, to: Sequence[Layer] = ()) -> Tensor:
        y: Tensor = norm(x)
        return y

    def rms_norm(self, x: Tensor, norm: Layer, *, to: Sequence[Layer] = ()) -> Tensor:
        y: Tensor = norm(x)
        return y

    def rotate_heads(
        self, x: Tensor, angles: Tensor, *, heads: int, kv_heads: int, norms: Sequence[Layer] = (),
        interleaved: bool = False,
    ) -> Tensor:  # fmt: skip
        d = angles.shape[-1]
        q, k, rest = x.split([heads * d, kv_heads * d, x.shape[-1] - (heads + kv_heads) * d], dim=-1)
        parts = [part.unflatten(-1, (-1, d)) for part in (q, k)]
        if norms:
            parts = [norm(part) for norm, part in zip(norms, parts, strict=True)]
        turned = [rotated(part, angles, interleaved).flatten(-2) for part in parts]
        return torch.cat([*turned, rest], dim=-1)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, heads: int, causal: bool = False, lengths: Tensor | None = None,
        to: Sequence[Layer] = (),
    ) -> Tensor:  # fmt: skip
        width = q.shape[-1] // heads
        apart = [x.flatten(1, -2).unflatten(-1, (-1, width)) for x in (q, k, v)]  # [B, T, heads, d]
        return attended(*apart, causal=causal, lengths=lengths).reshape(q.shape)

    def columns(self, x: Tensor, start: int, count: int) -> Tensor:
        return x[..., start : start + count]

    def cat(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], dim=-1)

    def joint(self, like: Tensor, channels: tuple[int, int], halvings: int) -> tuple[Tensor | None, Tensor | None]:
        return None, None

    def place(self, x: Tensor, out: Tensor | None) -> Tensor:
        return x


def rotated(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [..., heads, d], each head turned by angles [..., d] in fp32, as x's type."""
    cosine, sine = angles[..., None, :].chunk(2, dim=-1)
    a, b = (part.float() for part in (x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)))
    turned = torch.stack([a * cosine - b * sine, b * cosine + a * sine], dim=-1 if interleaved else -2)
    return turned.flatten(-2).to(x.dtype)


def attended(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, lengths: Tensor | None = None) -> Tensor:
    """Attention of q [B, Sq, heads, d] to k, v [B, Sk, kv_heads, d] as in `Ops.attend`: [B, Sq, heads, d]."""
    seen = None
    if causal or lengths is not None:
        key = torch.arange(k.shape[1], device=q.device)
        seen = key < (key[-1] + 1 if lengths is None else lengths.view(-1, 1, 1, 1))
        seen = seen & (key <= key[:, None]) if causal else seen
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=seen, enable_gqa=k.shape[2] != q.shape[2])
    return y.transpose(1, 2)


def _is_conv(layer: Any) -> bool:
    return getattr(layer, "kernel_size", None) is not None or layer.weight.dim() == 4


def _padding(layer: Any) -> int:
    """Of a convolution, plain or quantized."""
    return int(layer.padding if isinstance(layer.padding, int) else layer.padding[0])


def _on_map(module: Any, x: Tensor) -> Tensor:
    """A module that wants channels first, on a map [B, H, W, C]."""
    y: Tensor = module(x.permute(0, 3, 1, 2))
    return y.permute(0, 2, 3, 1)


def converted(given: Sequence[Tensor | None], dtype: torch.dtype, exact: Sequence[int]) -> list[Tensor | None]:
    """A walk's inputs as this type, but for numbers and the `exact` ones."""
    return [
        x if x is None or index in exact or not x.is_floating_point() else x.to(dtype) for index, x in enumerate(given)
    ]


class TorchLowering:
    """Walks run by torch, in the type of their weights."""

    odd_sides = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._ops = TorchOps()

    def prepare(self, walk: Walk, *shapes: tuple[int, ...], bound: int | None = None) -> None:
        """Nothing: torch packs no weights."""

    def lower(
        self, walk: Walk, name: str, *, bound: int | None = None, exact: Sequence[int] = ()
    ) -> Callable[..., tuple[Tensor, ...]]:
        def run(*given: Tensor | None) -> tuple[Tensor, ...]:
            found = walk(self._ops, *converted(given, self.dtype, exact))
            return found if isinstance(found, tuple) else (found,)

        return run
