"""The GPU lowering: each operation launches a fused kernel, which ends in the type that the next layer reads.

Nothing here waits for the device or copies from the host, so that calls can be recorded as CUDA graphs. On a CPU the
kernels' references compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.cuda.linear import Activation
from core.kernels.cuda.rotary import rotate_heads, rotate_heads_reference
from core.ops.fused import (
    GEGLU,
    Conv,
    FusedLayer,
    Linear,
    Norm,
    Reader,
    RMSNorm,
    UpConv,
    attend,
    attend_wide,
    for_layer,
)
from core.ops.ops import Layer, Walk, norm_eps
from core.ops.reference import attended, converted
from core.ops.trace import trace

F_ = TypeVar("F_", bound=FusedLayer)
M_ = TypeVar("M_")
_WIDEST_HEAD = 256  # beyond it, attention's scores are materialized, one image at a time
_KINDS: dict[str, type[FusedLayer]] = {
    "linear": Linear, "biases": Linear, "gated": GEGLU, "conv": Conv, "upsample": UpConv,
}  # fmt: skip


class CudaOps:
    """`core.ops.ops.Ops` on tensors, channels last. Weights are joined and converted when a layer is first met."""

    def __init__(self, base: torch.dtype, rows: int) -> None:
        """`base` is the type of activations between layers; `rows` the most images of a call."""
        self._base, self._rows = base, rows
        self._made: dict[tuple[object, ...], Any] = {}  # of modules, by their identity
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
        return F.silu(y) if act == "silu" else y

    def biases(self, x: Tensor, *layers: Layer) -> Tensor:
        return self.linear(x, *layers).float()

    def gated(self, x: Tensor, *layers: Layer, act: str, to: Layer) -> Tensor:
        if act not in ("gelu", "silu"):
            raise ValueError(f"the fused kernels do not gate with {act}")
        y = self._layer(GEGLU, *layers).gate(x.flatten(0, -2), cast(Activation, act), self._reader((to,)))
        return y.view(*x.shape[:-1], -1)

    def conv(
        self, x: Tensor, layer: Layer, *, bias: Tensor | None = None, residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        conv = self._layer(Conv, layer)
        return conv(self._for(x, conv), bias, residual, out)

    def upsample(self, x: Tensor, layer: Layer, *, like: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        conv = self._layer(UpConv, layer)
        return conv(self._for(x, conv), out=out)

    def group_norm(self, x: Tensor, norm: Layer, *, silu: bool = False, to: Sequence[Layer] = ()) -> Tensor:
        return self._norm(norm, silu)(x, self._reader(to))

    def layer_norm(self, x: Tensor, norm: Layer, *, to: Sequence[Layer] = ()) -> Tensor:
        return self._norm(norm)(x.flatten(0, -2), self._reader(to)).view(x.shape)

    def rms_norm(self, x: Tensor, norm: Layer, *, to: Sequence[Layer] = ()) -> Tensor:
        return self._once((RMSNorm, norm), lambda: RMSNorm(norm, self._base))(x.flatten(0, -2), self._reader(to)).view(
            x.shape
        )

    def rotate_heads(
        self, x: Tensor, angles: Tensor, *, heads: int, kv_heads: int, norms: Sequence[Layer] = (),
        interleaved: bool = False,
    ) -> Tensor:  # fmt: skip
        """In place."""
        rows, columns = x.flatten(0, -2), (heads + kv_heads) * angles.shape[-1]
        given = (rows, angles.flatten(0, -2), heads, kv_heads)
        options: dict[str, Any] = {"interleaved": interleaved}
        if norms:
            weights = self._once((*norms,), lambda: torch.stack([norm.weight.detach() for norm in norms]))
            options |= {"norms": weights, "eps": norm_eps(norms[0])}
        if x.is_cuda:
            rotate_heads(*given, **options)
        else:
            rows[:, :columns] = rotate_heads_reference(*given, **options)
        return x

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, heads: int, causal: bool = False, lengths: Tensor | None = None,
        to: Sequence[Layer] = (),
    ) -> Tensor:  # fmt: skip
        width = q.shape[-1] // heads
        q_, k_, v_ = (x.flatten(1, -2).unflatten(-1, (-1, width)) for x in (q, k, v))  # [B, T, heads, d]
        reader = self._reader(to)
        if causal or lengths is not None:
            return for_layer(attended(q_, k_, v_, causal=causal, lengths=lengths).reshape(q.shape), reader)
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
        # Once: it compares tensors, for which the host waits.
        return self._once((Reader, *to), lambda: Reader.of(to) if to else Reader(None, None))

    def _layer(self, kind: type[F_], *modules: Layer) -> F_:
        return self._once((kind, *modules), lambda: kind(modules, self._base))

    def _norm(self, module: Layer, silu: bool = False) -> Norm:
        return self._once((Norm, module, silu), lambda: Norm(module, self._base, silu))

    def _once(self, key: tuple[object, ...], make: Callable[[], M_]) -> M_:
        if key not in self._made:
            self._made[key] = make()
        made: M_ = self._made[key]
        return made


def _flat(x: Tensor | None) -> Tensor | None:
    """Tokens [M, C], whose rows may be strided."""
    return None if x is None else x.flatten(0, -2)


class CudaLowering:
    """Walks as calls of fused kernels, by one thread at a time; calls may be recorded as CUDA graphs."""

    odd_sides = False

    def __init__(self, dtype: torch.dtype, rows: int) -> None:
        """`rows` is the most images that one call may have."""
        self.dtype = dtype
        self._ops = CudaOps(dtype, rows)

    def prepare(self, walk: Walk, *shapes: tuple[int, ...], bound: int | None = None) -> None:
        """As `core.ops.ops.Lowering`: joined weights exist before anything is recorded."""
        for call in trace(walk, *shapes).calls:
            self._ops.pack(call.operation, call.layers)

    def lower(
        self, walk: Walk, name: str, *, bound: int | None = None, exact: Sequence[int] = ()
    ) -> Callable[..., tuple[Tensor, ...]]:
        def run(*given: Tensor) -> tuple[Tensor, ...]:
            self._ops.begin()
            found = walk(self._ops, *(x if x is None else x.contiguous() for x in converted(given, self.dtype, exact)))
            return found if isinstance(found, tuple) else (found,)

        return run
