"""The GPU lowering: each operation launches a fused kernel, which ends in the type that the next layer reads.

Nothing here waits for the device or copies from the host, so that calls can be recorded as CUDA graphs. On a CPU the
kernels' references compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from core.ops.fused import GEGLU, Conv, FusedLayer, Linear, Norm, Reader, UpConv, attend, attend_wide, for_layer
from core.ops.ops import Layer, Walk
from core.ops.trace import trace

F_ = TypeVar("F_", bound=FusedLayer)
HEAD_MULTIPLE = 16  # of the width of attention's heads
_WIDEST_HEAD = 256  # beyond it, attention's scores are materialized, one image at a time
_KINDS: dict[str, type[FusedLayer]] = {
    "linear": Linear, "biases": Linear, "gated": GEGLU, "conv": Conv, "upsample": UpConv,
}  # fmt: skip


class CudaOps:
    """`core.ops.ops.Ops` on tensors, channels last. Weights are joined and converted when a layer is first met."""

    def __init__(self, base: torch.dtype, rows: int) -> None:
        """`base` is the type of activations between layers; `rows` the most images of a call."""
        self._base, self._rows = base, rows
        # The modules are kept with the result, so that no other object can take over their identity.
        self._layers: dict[tuple[object, ...], tuple[Sequence[Layer], Any]] = {}
        self._joints: dict[tuple[int, ...], Tensor] = {}
        self._joint = 0

    def begin(self) -> None:
        """Before each walk: joints are known by their order in it."""
        self._joint = 0

    def linear(
        self, x: Tensor, *layers: Layer, act: str = "", residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        layer = self._layer(Linear, *layers)
        rows = self._for(x, layer).flatten(0, -2)
        y = layer(rows, _flat(residual), _flat(out))
        y = y.view(*x.shape[:-1], -1) if out is None else out
        if act != "silu":
            return y
        y = F.silu(y)
        return y if out is None else out.copy_(y)

    def biases(self, x: Tensor, *layers: Layer) -> Tensor:
        return self.linear(x, *layers).float()

    def gated(self, x: Tensor, *layers: Layer, act: str, to: Layer) -> Tensor:
        layer = self._layer(GEGLU, *layers)
        y = layer.gate(self._for(x, layer).flatten(0, -2), Reader.of((to,)))
        return y.view(*x.shape[:-1], -1)

    def conv(
        self, x: Tensor, layer: Layer, *, bias: Tensor | None = None, residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        conv = self._layer(Conv, layer)
        return conv(self._for(x, conv), bias, residual, out)

    def upsample(self, x: Tensor, layer: Layer, *, like: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        (height, width), conv = x.shape[1:3], self._layer(UpConv, layer)
        if like is not None and like.shape[1:3] != (2 * height, 2 * width):
            raise ValueError(f"a map of {height}×{width} does not double to {like.shape[1]}×{like.shape[2]}")
        return conv(self._for(x, conv), out=out)

    def group_norm(self, x: Tensor, norm: Layer, *, silu: bool = False, to: Sequence[Layer] = ()) -> Tensor:
        return self._norm(norm, silu)(x, self._reader(to))

    def layer_norm(self, x: Tensor, norm: Layer, *, to: Sequence[Layer] = ()) -> Tensor:
        return self._norm(norm)(x.flatten(0, -2), self._reader(to)).view(x.shape)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, heads: int, to: Sequence[Layer] = ()) -> Tensor:
        width = q.shape[-1] // heads
        q_, k_, v_ = (x.flatten(1, -2).unflatten(-1, (heads, width)) for x in (q, k, v))  # [B, T, heads, d]
        reader = self._reader(to)
        if heads == 1 and width > _WIDEST_HEAD:
            return for_layer(attend_wide(q_, k_, v_).view(q.shape), reader)
        return attend(q_, k_, v_, reader).view(q.shape)

    def columns(self, x: Tensor, start: int, count: int) -> Tensor:
        return x[..., start : start + count]

    def cat(self, x: Tensor, y: Tensor) -> Tensor:
        beside = x.data_ptr() + x.shape[-1] * x.itemsize == y.data_ptr() and x.stride() == y.stride()
        if beside and x.shape[-1] + y.shape[-1] == x.stride(-2):  # two slots of one joint
            return x.as_strided((*x.shape[:-1], x.stride(-2)), x.stride())
        return torch.cat([x, y], dim=-1)

    def joint(self, like: Tensor, channels: tuple[int, int], halvings: int) -> tuple[Tensor | None, Tensor | None]:
        """In memory that calls of all widths share, so that a shallow step finds no more to copy than its features."""
        rows, (height, width) = like.shape[0], (side >> halvings for side in like.shape[1:3])
        if rows > self._rows:
            raise ValueError(f"{rows} rows, and there is room for {self._rows}")
        key = (self._joint, height, width, *channels)
        self._joint += 1
        if key not in self._joints:
            shape = (self._rows, height, width, sum(channels))
            self._joints[key] = torch.empty(shape, dtype=self._base, device=like.device)
        whole = self._joints[key][:rows]
        return whole[..., : channels[0]], whole[..., channels[0] :]

    def place(self, x: Tensor, out: Tensor | None) -> Tensor:
        return x if out is None else out.copy_(x)

    def pack(self, operation: str, layers: Sequence[Layer]) -> None:
        """Join and convert the weights of an operation's layers, if it has any."""
        if operation in _KINDS:
            self._layer(_KINDS[operation], *layers)

    # -- layers ------------------------------------------------------------------------------------------------------

    def _for(self, x: Tensor, layer: FusedLayer) -> Tensor:
        """x in the type that the layer reads."""
        return x if layer.kind is None or x.dtype == layer.kind else for_layer(x, layer.reads)

    def _reader(self, to: Sequence[Layer]) -> Reader:
        return Reader.of(to) if to else Reader(None, None)

    def _layer(self, kind: type[F_], *modules: Layer) -> F_:
        key = (kind.__name__, *(id(module) for module in modules))
        if key not in self._layers:
            self._layers[key] = (modules, kind(modules, self._base))
        made: F_ = self._layers[key][1]
        return made

    def _norm(self, module: Layer, silu: bool = False) -> Norm:
        key = (id(module), silu)
        if key not in self._layers:
            self._layers[key] = ((module,), Norm(module, self._base, silu))
        made: Norm = self._layers[key][1]
        return made


def _flat(x: Tensor | None) -> Tensor | None:
    """Tokens [M, C], whose rows may be strided."""
    return None if x is None else x.flatten(0, -2)


class CudaLowering:
    """Walks as calls of fused kernels, by one thread at a time; calls may be recorded as CUDA graphs."""

    odd_sides = False
    head_multiple = HEAD_MULTIPLE

    def __init__(self, dtype: torch.dtype, rows: int) -> None:
        """`rows` is the most images that one call may have."""
        self.dtype = dtype
        self._ops = CudaOps(dtype, rows)

    def prepare(self, walk: Walk, *shapes: tuple[int, ...], bound: int | None = None) -> None:
        """As `core.ops.ops.Lowering`: joined weights exist before anything is recorded."""
        for call in trace(walk, *shapes).calls:
            self._ops.pack(call.operation, call.layers)

    def lower(self, walk: Walk, name: str, *, bound: int | None = None) -> Callable[..., tuple[Tensor, ...]]:
        def run(*given: Tensor) -> tuple[Tensor, ...]:
            self._ops.begin()
            found = walk(self._ops, *(x.to(self.dtype).contiguous() for x in given))
            return found if isinstance(found, tuple) else (found,)

        return run
