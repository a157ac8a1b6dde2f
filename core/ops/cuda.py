"""The GPU lowering: each operation launches a fused kernel, which ends in the type that the next layer reads.

Nothing here waits for the device or copies from the host, so that calls can be recorded as CUDA graphs. On a CPU the
kernels' references compute the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from core.kernels.cuda import rotary
from core.kernels.cuda.low_rank import Window
from core.ops.branches import LowRank
from core.ops.cuda_branches import AdaptableLayers, BranchShape, CudaBranches, CudaRowBranches, Uses
from core.ops.fused import (
    Conv,
    FusedLayer,
    FusedRmsNorm,
    Gated,
    Linear,
    Norm,
    Reader,
    UpConv,
    attend,
    attend_wide,
    cast_for_layer,
)
from core.ops.ops import Activation, Layer, Walk, doubled, rms_eps
from core.ops.reference import ACTIVATIONS, excess
from core.ops.trace import trace
from core.quant.linear import ScaledWeights

F_ = TypeVar("F_", bound=FusedLayer)
T = TypeVar("T")
HEAD_MULTIPLE = 16  # of the width of attention's heads
_WIDEST_HEAD = 256  # beyond it, attention's scores are materialized, one image at a time
_KINDS: dict[str, type[FusedLayer]] = {
    "linear": Linear, "biases": Linear, "gated": Gated, "conv": Conv, "upsample": UpConv,
}  # fmt: skip


class CudaOps:
    """`core.ops.ops.Ops` on tensors, channels last. Weights are joined and converted when a layer is first met."""

    def __init__(self, base: torch.dtype, rows: int) -> None:
        """`base` is the type of activations between layers; `rows` the most images of a call."""
        self._base, self._rows = base, rows
        self.layers: list[FusedLayer] = []
        self.branches = CudaRowBranches(rows)
        self.kept: dict[tuple[object, ...], Kept] = {}  # by what and whose
        self.fixed = False  # no further layer is met
        self._joints: dict[tuple[int, ...], Tensor] = {}
        self._joint = 0

    def begin(self) -> None:
        """Before each walk: joints are known by their order in it."""
        self._joint = 0

    def linear(
        self,
        x: Tensor,
        *layers: Layer,
        act: Activation | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        within: Tensor | None = None,
    ) -> Tensor:
        layer, scale = self._layer(Linear, *layers), None
        if within is not None and isinstance(layers[0], ScaledWeights):
            factor = excess(x, layers[0], within)
            x, scale = (x / factor).to(x.dtype), factor.flatten()
        rows = self._for(x, layer).flatten(0, -2)
        shares = self.branches.shares(layer, *_by_image(rows, len(x)), scale)
        y = layer(rows, _flat(residual), _flat(out), row_scale=scale, shares=shares)
        y = y.view(*x.shape[:-1], -1) if out is None else out
        if act is None:
            return y
        y = ACTIVATIONS[act](y)
        return y if out is None else out.copy_(y)

    def biases(self, x: Tensor, *layers: Layer) -> Tensor:
        return self.linear(x, *layers).float()

    def gated(self, x: Tensor, *layers: Layer, act: Activation, to: Layer) -> Tensor:
        layer = self._layer(Gated, *layers)
        rows = self._for(x, layer).flatten(0, -2)
        y = layer.gated_product(rows, self._reader((to,)), act, self.branches.shares(layer, *_by_image(rows, len(x))))
        return y.view(*x.shape[:-1], -1)

    def conv(
        self, x: Tensor, layer: Layer, *, bias: Tensor | None = None, act: Activation | None = None,
        residual: Tensor | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        conv = self._layer(Conv, layer)
        x, relu = self._for(x, conv), act == "relu" and not self.branches.has(conv)
        y = conv(x, bias, residual, out, relu=relu, shares=self.branches.shares(conv, x, conv.window(x)))
        return y if act is None or relu else y.copy_(ACTIVATIONS[act](y))

    def upsample(self, x: Tensor, layer: Layer, *, target: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        conv = self._layer(UpConv, layer)
        height, width = doubled(x.shape[1:3], None if target is None else target.shape[1:3])
        x = self._for(x, conv)
        window = Window(height, width, (height, width), conv.taps, padding=1, doubled=True)
        return conv.double(x, height, width, out, self.branches.shares(conv, x, window))

    def group_norm(self, x: Tensor, norm: Layer, *, silu: bool = False, to: Sequence[Layer] = ()) -> Tensor:
        return self._norm(norm, silu)(x, self._reader(to))

    def layer_norm(self, x: Tensor, norm: Layer, *, scale: Tensor | None = None, to: Sequence[Layer] = ()) -> Tensor:
        return self._norm(norm)(x.flatten(0, -2), self._reader(to), scale).view(x.shape)

    def rms_norm(
        self, x: Tensor, norm: Layer, *, scale: Tensor | None = None, residual: Tensor | None = None,
        to: Sequence[Layer] = (),
    ) -> Tensor:  # fmt: skip
        layer = self._made(lambda norm: FusedRmsNorm(norm, self._base), FusedRmsNorm, norm)
        y = layer(x.flatten(0, -2), self._reader(to), scale, _flat(residual))
        return y.view(x.shape)

    def rotate(
        self, x: Tensor, angles: Tensor, *, heads: int, norms: tuple[Layer, Layer] | None = None,
        interleaved: bool = False,
    ) -> Tensor:  # fmt: skip
        kv_heads = (x.shape[-1] // angles.shape[-1] - heads) // 2
        weights, eps = (None, 0.0) if norms is None else self._head_norms(norms)
        rows, turns = x.flatten(0, -2), angles.flatten(0, -2)
        if x.is_cuda:
            rotary.rotate_heads(rows, turns, heads, kv_heads, norms=weights, eps=eps, interleaved=interleaved)
            return x
        rotated = rotary.rotate_heads_reference(
            rows, turns, heads, kv_heads, norms=weights, eps=eps, interleaved=interleaved
        )
        return torch.cat([rotated, rows[:, rotated.shape[1] :]], dim=1).view(x.shape)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, heads: int, lengths: Tensor | None = None, causal: bool = False,
        to: Sequence[Layer] = (),
    ) -> Tensor:  # fmt: skip
        width = q.shape[-1] // heads
        q_, k_, v_ = (x.flatten(1, -2).unflatten(-1, (-1, width)) for x in (q, k, v))  # [B, T, heads, d]
        reader = self._reader(to)
        if heads == 1 and width > _WIDEST_HEAD:
            return cast_for_layer(attend_wide(q_, k_, v_).view(q.shape), reader)
        return attend(q_, k_, v_, reader, lengths, causal).view(q.shape)

    def columns(self, x: Tensor, start: int, count: int) -> Tensor:
        return x[..., start : start + count]

    def cat(self, x: Tensor, y: Tensor) -> Tensor:
        adjacent = x.data_ptr() + x.shape[-1] * x.itemsize == y.data_ptr() and x.stride() == y.stride()
        if adjacent and x.shape[-1] + y.shape[-1] == x.stride(-2):  # two slots of one joint
            return x.as_strided((*x.shape[:-1], x.stride(-2)), x.stride())
        return torch.cat([x, y], dim=-1)

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], dim=1)

    def tokens(self, x: Tensor, count: int) -> Tensor:
        return x[:, :count].contiguous()

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)

    def joint(self, target: Tensor, channels: tuple[int, int], halvings: int) -> tuple[Tensor | None, Tensor | None]:
        """Join both in memory that calls of all widths and of like sizes share, so that a shallow step copies no more
        than its features.

        Recorded graphs keep its address: it is never given back, and so made for the next power of two of pixels.
        """
        rows, (height, width) = target.shape[0], (-(-side >> halvings) for side in target.shape[1:3])
        if rows > self._rows:
            raise ValueError(f"{rows} rows, and there is room for {self._rows}")
        pixels = 1 << (height * width - 1).bit_length()
        key = (self._joint, pixels, *channels)
        self._joint += 1
        if key not in self._joints:
            shape = (self._rows * pixels, sum(channels))
            self._joints[key] = torch.empty(shape, dtype=self._base, device=target.device)
        joined = self._joints[key][: rows * height * width].view(rows, height, width, -1)
        return joined[..., : channels[0]], joined[..., channels[0] :]

    def place(self, x: Tensor, out: Tensor | None) -> Tensor:
        return x if out is None else out.copy_(x)

    def pack(self, operation: str, layers: Sequence[Layer]) -> None:
        """Join and convert the weights of an operation's layers, if it has any."""
        if operation in _KINDS:
            self._layer(_KINDS[operation], *layers)

    # -- layers ------------------------------------------------------------------------------------------------------

    def _for(self, x: Tensor, layer: FusedLayer) -> Tensor:
        """x in the type that the layer reads."""
        return x if layer.kind is None or x.dtype == layer.kind else cast_for_layer(x, layer.reads)

    def _reader(self, to: Sequence[Layer]) -> Reader:
        """Made once: it compares the layers' scales, for which the host waits."""
        return self._made(lambda *to: Reader.of(to), Reader, *to) if to else Reader(None, None)

    def _layer(self, kind: type[F_], *modules: Layer) -> F_:
        layer = self._made(lambda *modules: kind(modules, self._base), kind, *modules)
        if layer.number < 0:
            layer.number = len(self.layers)
            self.layers.append(layer)
        return layer

    def _norm(self, module: Layer, silu: bool = False) -> Norm:
        return self._made(lambda module: Norm(module, self._base, silu), (Norm, silu), module)

    def _head_norms(self, norms: tuple[Layer, Layer]) -> tuple[Tensor, float]:
        """Weights [2, d] of the norms of queries and keys, and their epsilon."""
        first, second = norms
        weights = self._made(lambda *norms: torch.stack([n.weight.detach() for n in norms]), "heads", first, second)
        return weights, rms_eps(first)

    def _made(self, make: Callable[..., T], kind: object, *modules: Layer) -> T:
        """Return what `make(*modules)` returned when these were first met."""
        key = (kind, *modules)
        if key not in self.kept:
            if self.fixed:
                raise RuntimeError("a network whose weights are swapped meets a new layer")
            self.kept[key] = Kept(make, modules, make(*modules))
        made: T = self.kept[key].made
        return made


class Kept(NamedTuple):
    """What was made of modules, and how."""

    make: Callable[..., Any]
    modules: tuple[Layer, ...]
    made: Any


class Counterparts(NamedTuple):
    """What calls of a lowering read, of another model.

    pairs: each tensor that they read and its counterpart, both of one shape, type and layout: where the latter are
        copied into the former, calls and their graphs compute the other model.
    adaptable: packs that model's adapters.
    """

    pairs: list[tuple[Tensor, Tensor]]
    adaptable: AdaptableLayers


def _paired(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pair them. Raises ValueError for tensors of other shapes, types or layouts."""
    forms, other_forms = ([(t.shape, t.dtype, t.stride()) for t in each] for each in (tensors, others))
    if forms != other_forms:
        raise ValueError("the networks have weights of other shapes")
    return list(zip(tensors, others, strict=True))


def _tensors(made: Any) -> list[Tensor]:
    """The tensors that kernels read of a fused layer, a norm or a reader, in one order for all of a kind."""
    if isinstance(made, Tensor):
        return [made]
    values = made if isinstance(made, tuple) else vars(made).values()
    return [value for value in values if isinstance(value, Tensor)]


def _flat(x: Tensor | None) -> Tensor | None:
    """Tokens [M, C], whose rows may be strided."""
    return None if x is None else x.flatten(0, -2)


def _by_image(rows: Tensor, images: int) -> tuple[Tensor, Window]:
    """Tokens [M, K] as maps of one row of pixels [B, 1, T, K], and how a linear layer reads these."""
    count = len(rows) // images
    return rows.unflatten(0, (images, 1, count)), Window(1, count, (1, count))


class CudaLowering:
    """Walks as calls of fused kernels, by one thread at a time; calls may be recorded as CUDA graphs."""

    head_multiple = HEAD_MULTIPLE

    def __init__(self, dtype: torch.dtype, rows: int, model: nn.Module | None = None) -> None:
        """`rows` is the most images that one call may have. `model` has the names that `pack_branches` takes."""
        self.dtype = dtype
        self._ops = CudaOps(dtype, rows)
        self._model = model
        self._adaptable: AdaptableLayers | None = None
        self._lock = threading.Lock()  # adapters are packed on any thread

    def prepare(self, walk: Walk, *shapes: tuple[int, ...], bound: int | None = None) -> None:
        """Join weights before anything is recorded; see `core.ops.ops.Lowering`."""
        for call in trace(walk, *shapes).calls:
            self._ops.pack(call.operation, call.layers)

    def lower(self, walk: Walk, name: str, *, bound: int | None = None) -> Callable[..., tuple[Tensor, ...]]:
        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            self._ops.begin()
            outputs = walk(self._ops, *tensors)
            return outputs if isinstance(outputs, tuple) else (outputs,)

        return run

    def pack_branches(self, factors: Mapping[str, LowRank]) -> CudaBranches:
        """An adapter for `adapted`, by names of layers that prepared walks read. On any thread.

        Raises ValueError, naming the layer, for a factor that does not fit it.
        """
        return self.adaptable().pack(factors)

    def adaptable(self) -> AdaptableLayers:
        """Return the layers of prepared walks, with the scales that they had at the first call. On any thread."""
        with self._lock:
            if self._adaptable is None:
                assert self._model is not None
                self._adaptable = AdaptableLayers(self._ops.layers, self._model)
        return self._adaptable

    def counterparts(self, model: nn.Module, without: tuple[str, ...] = ()) -> Counterparts:
        """Return what calls read of a model of the same architecture. All walks must have run once.

        `without`: the names that parameters begin with which no call reads. The model's own modules become views of
        the counterparts. Raises ValueError for a model that differs in more than its weights.
        """
        assert self._model is not None
        own, other = dict(self._model.named_modules()), dict(model.named_modules())
        if own.keys() != other.keys() or any(type(own[name]) is not type(other[name]) for name in own):
            raise ValueError("the networks have different layers")
        names = {each: name for name, each in own.items()}
        pairs: list[tuple[Tensor, Tensor]] = []
        layers: dict[int, FusedLayer] = {}
        met: set[Layer] = set()
        for kept in self._ops.kept.values():
            made = kept.make(*(other[names[module]] for module in kept.modules))
            pairs += _paired(_tensors(kept.made), _tensors(made))
            met.update(kept.modules)
            if isinstance(kept.made, FusedLayer):
                layers[kept.made.number] = made
        # What walks are fed with, such as a guidance scale's embedding, or a token for padding.
        for name, module in own.items():
            if module not in met and not name.startswith(without):
                sides = (
                    [*each.parameters(recurse=False), *each.buffers(recurse=False)] for each in (module, other[name])
                )
                pairs += _paired(*([tensor.detach() for tensor in side] for side in sides))
        # Readers have the scales of the layers that they are of.
        unique = {(read.data_ptr(), read.numel()): (read, its) for read, its in pairs}
        adaptable = AdaptableLayers(self._ops.layers, self._model, [layers[at] for at in range(len(self._ops.layers))])
        return Counterparts([*unique.values()], adaptable)

    def fix_layers(self) -> None:
        """Let a call that meets a new layer raise RuntimeError from now on: counterparts have none."""
        self._ops.fixed = True

    def adapted(self, rows: Uses) -> AbstractContextManager[None]:
        """Context: row i of every call's batch gets these adapters, each with its scale, in this order."""
        return self._ops.branches.adapted(rows, self._device)

    def adapted_like(self, shape: BranchShape) -> AbstractContextManager[None]:
        """Context: calls are launched as for adapters of this shape, and no row has any: for recording."""
        return self._ops.branches.like(shape, self._device)

    def clear_branches(self) -> None:
        """Let go of the last adapters. Thread-safe."""
        self._ops.branches.clear()

    @property
    def folds(self) -> bool:
        """Return whether products that can add adapters' shares themselves, instead of a kernel behind them."""
        return self._ops.branches.folds

    @folds.setter
    def folds(self, folds: bool) -> None:
        self._ops.branches.folds = folds

    @property
    def branch_shape(self) -> BranchShape | None:
        """The key that, beside their own shapes, fixes the launches of calls now; None for rows without adapters."""
        return self._ops.branches.shape

    @property
    def _device(self) -> torch.device:
        return self._ops.layers[0].weight.device
