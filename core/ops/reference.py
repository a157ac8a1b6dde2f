"""The torch lowering: each operation computed at once by the modules' own forwards, the reference of all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.ops.mixture import Mixture, mixed, route
from core.ops.ops import Activation, Layer, Walk, doubled
from core.quant.linear import ScaledWeights

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_tanh": partial(F.gelu, approximate="tanh"), "tanh": torch.tanh, "relu": F.relu,
}  # fmt: skip


class TorchOps:
    """`core.ops.ops.Ops` on tensors. Modules are called, so that hooks on them see every input and output."""

    def linear(
        self,
        x: Tensor,
        *layers: Layer,
        act: Activation | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        within: Tensor | None = None,
    ) -> Tensor:
        if within is not None and isinstance(layers[0], ScaledWeights) and layers[0].STATIC:
            parts = [_within(layers[0], x, within)]
        else:
            parts = [_on_map(layer, x) if _is_conv(layer) else layer(x) for layer in layers]
        y: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        y = y if residual is None else y + residual
        return ACTIVATIONS[act](y) if act else y

    def biases(self, x: Tensor, *layers: Layer) -> Tensor:
        return self.linear(x, *layers)

    def gated(self, x: Tensor, *layers: Layer, act: Activation, to: Layer) -> Tensor:
        hidden, gate = self.linear(x, *layers).chunk(2, dim=-1)
        return hidden * ACTIVATIONS[act](gate)

    def mixture(self, x: Tensor, mixture: Mixture, *, act: Activation, residual: Tensor) -> Tensor:
        rows, m = x.flatten(0, -2), mixture
        y = mixed(rows, *route(rows, m), m.gate_up, m.down, m.experts, ACTIVATIONS[act])
        return residual + y.view(x.shape)

    def conv(
        self, x: Tensor, layer: Layer, *, bias: Tensor | None = None, act: Activation | None = None,
        residual: Tensor | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not _padding(layer):
            x = F.pad(x, (0, 0, 0, 1, 0, 1))
        y = _on_map(layer, x)
        y = y if bias is None else y + bias[:, None, None]
        y = y if residual is None else y + residual
        return ACTIVATIONS[act](y) if act else y

    def upsample(self, x: Tensor, layer: Layer, *, target: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        size = doubled(x.shape[1:3], None if target is None else target.shape[1:3])
        return _on_map(layer, F.interpolate(x.permute(0, 3, 1, 2), size=size, mode="nearest").permute(0, 2, 3, 1))

    def group_norm(self, x: Tensor, norm: Layer, *, silu: bool = False, to: Sequence[Layer] = ()) -> Tensor:
        y = _on_map(norm, x)
        return F.silu(y) if silu else y

    def layer_norm(self, x: Tensor, norm: Layer, *, scale: Tensor | None = None, to: Sequence[Layer] = ()) -> Tensor:
        y: Tensor = norm(x)
        return y if scale is None else y * scale[:, None].to(y.dtype)

    def rms_norm(
        self, x: Tensor, norm: Layer, *, scale: Tensor | None = None, residual: Tensor | None = None,
        to: Sequence[Layer] = (),
    ) -> Tensor:  # fmt: skip
        y = self.layer_norm(x, norm, scale=scale)
        return y if residual is None else residual + y

    def rotate(
        self, x: Tensor, angles: Tensor, *, heads: int, norms: tuple[Layer, Layer] | None = None,
        interleaved: bool = False,
    ) -> Tensor:  # fmt: skip
        d = angles.shape[-1]
        q, k, v = x.unflatten(-1, (-1, d)).tensor_split((heads, (heads + x.shape[-1] // d) // 2), dim=-2)
        if norms is not None:
            q, k = norms[0](q), norms[1](k)
        cosine, sine = angles[:, :, None].chunk(2, dim=-1)

        def turned(part: Tensor) -> Tensor:
            lo, hi = part.float().unflatten(-1, (-1, 2)).unbind(-1) if interleaved else part.float().chunk(2, dim=-1)
            pair = lo * cosine - hi * sine, hi * cosine + lo * sine
            return (torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)).to(x.dtype)

        return torch.cat([turned(q), turned(k), v], dim=-2).flatten(-2)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, heads: int, lengths: Tensor | None = None, causal: bool = False,
        to: Sequence[Layer] = (),
    ) -> Tensor:  # fmt: skip
        d = q.shape[-1] // heads

        def apart(x: Tensor) -> Tensor:  # [B, heads, T, d]
            return x.reshape(x.shape[0], -1, x.shape[-1] // d, d).transpose(1, 2)

        queries, keys = apart(q), apart(k)
        mask = None
        if lengths is not None:
            mask = (torch.arange(keys.shape[2], device=q.device) < lengths.clamp(min=1)[:, None])[:, None, None]
            if causal:
                mask = mask & torch.ones(keys.shape[2], keys.shape[2], dtype=torch.bool, device=q.device).tril()
        y = F.scaled_dot_product_attention(
            queries, keys, apart(v), attn_mask=mask, is_causal=causal and mask is None,
            enable_gqa=keys.shape[1] != heads,
        )  # fmt: skip
        return y.transpose(1, 2).reshape(q.shape)

    def columns(self, x: Tensor, start: int, count: int) -> Tensor:
        return x[..., start : start + count]

    def cat(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], dim=-1)

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], dim=1)

    def tokens(self, x: Tensor, count: int) -> Tensor:
        return x[:, :count]

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)

    def joint(self, target: Tensor, channels: tuple[int, int], halvings: int) -> tuple[Tensor | None, Tensor | None]:
        return None, None

    def place(self, x: Tensor, out: Tensor | None) -> Tensor:
        return x


def excess(x: Tensor, layer: ScaledWeights, within: Tensor) -> Tensor:
    """The factor by which each token of x [B, …, K] exceeds the range of a layer's static scales, [B, …, 1]; at least
    1.

    Also 1 for images that `within` [B] is 0 for.
    """
    beyond = (x.float() * layer.inverse).abs().amax(dim=-1, keepdim=True) / layer.TOP
    named = (within != 0).view(-1, *[1] * (x.dim() - 1))
    return torch.where(named, beyond.clamp(min=1), torch.ones_like(beyond))


def _within(layer: Any, x: Tensor, within: Tensor) -> Tensor:
    """The layer's result on tokens that are scaled into the range of its static scales, which it is linear in."""
    factor = excess(x, layer, within)
    y: Tensor = layer((x / factor).to(x.dtype))
    bias = 0 if layer.bias is None else layer.bias
    return torch.where(factor > 1, ((y.float() - bias) * factor + bias).to(y.dtype), y)


def _is_conv(layer: Any) -> bool:
    return getattr(layer, "kernel_size", None) is not None or layer.weight.dim() == 4


def _padding(layer: Any) -> int:
    """The padding of a convolution, plain or quantized."""
    return int(layer.padding if isinstance(layer.padding, int) else layer.padding[0])


def _on_map(module: Any, x: Tensor) -> Tensor:
    """A module that wants channels first, on a map [B, H, W, C]."""
    y: Tensor = module(x.permute(0, 3, 1, 2))
    return y.permute(0, 2, 3, 1)


class TorchLowering:
    """Walks run by torch, in the type of their weights."""

    head_multiple = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._ops = TorchOps()

    def prepare(self, walk: Walk, *shapes: tuple[int, ...], bound: int | None = None) -> None:
        """Do nothing: torch packs no weights."""

    def lower(self, walk: Walk, name: str, *, bound: int | None = None) -> Callable[..., tuple[Tensor, ...]]:
        def run(*tensors: Tensor | None) -> tuple[Tensor, ...]:
            outputs = walk(self._ops, *tensors)
            return outputs if isinstance(outputs, tuple) else (outputs,)

        return run
