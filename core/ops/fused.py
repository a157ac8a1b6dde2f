"""The fused layers of the GPU lowering, built from a model's own modules, plain or quantized.

Channels last throughout. Between two products there is one kernel (a norm, attention, a gate), which writes the next
layer's input: 8-bit levels if that layer is quantized, else the base type. On a CPU the kernels' references compute the
same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.kernels.cuda import conv as convs
from core.kernels.cuda import group_norm as group_norms
from core.kernels.cuda import layer_norm as layer_norms
from core.kernels.cuda import linear as linears
from core.kernels.cuda import rms_norm as rms_norms
from core.kernels.cuda import sparse_gemm
from core.kernels.cuda.attention import attention
from core.kernels.cuda.low_rank import BranchShares, Window
from core.kernels.cuda.quantize import max_level, quantize, quantize_reference, to_levels
from core.kernels.cuda.sparse_gemm import SparseWeight
from core.kernels.cuda.tiles import Tile
from core.ops.ops import Activation, rms_eps
from core.ops.reference import ACTIVATIONS, TorchOps
from core.quant.linear import ScaledConv2d, ScaledWeights
from core.quant.sparse import SparseInt8Linear
from core.quant.w4a8 import in_int8


class Reader(NamedTuple):
    """A layer's input type, 8-bit or None for the base type, and the factor [K] applied before, if there is one."""

    kind: torch.dtype | None
    inverse: Tensor | None

    @classmethod
    def of(cls, modules: Sequence[Any]) -> Reader:
        """The reader of layers with one input. Raises ValueError for layers that cannot share it."""
        first = modules[0]
        quantized = isinstance(first, ScaledWeights)
        if quantized and not first.STATIC:
            raise ValueError(f"the GPU kernels do not support {type(first).__name__}: its inputs have no static scales")
        for other in modules[1:]:
            alike = type(other) is type(first)
            if not alike or (quantized and not _equal(other.inverse, first.inverse)):
                raise ValueError("layers that read one input are quantized in different ways")
        return cls(first.weight.dtype if first.ROUNDS else None, first.inverse) if quantized else cls(None, None)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


class FusedLayer:
    """Weights of one or several modules that read one input, concatenated by rows.

    `kind` is the 8-bit type of weights and input, or None for the base type. `inverse` [K] multiplies the input before
    it is rounded to levels. `number` is its place among a lowering's layers. Of a sparse weight that stays so, `weight`
    has the values.
    """

    taps = 1  # along a side
    number = -1
    metadata: Tensor | None = None  # of a sparse weight

    def __init__(self, modules: Sequence[Any], base: torch.dtype) -> None:
        """Raises ValueError for modules that cannot be one layer."""
        if any(isinstance(module, ScaledWeights) and not module.ROUNDS for module in modules):
            raise ValueError(f"the GPU kernels of this network do not support {type(modules[0]).__name__}")
        self.base, self.modules = base, tuple(modules)
        modules = [in_int8(module) for module in modules]
        self.reads = Reader.of(modules)
        self.kind, self.inverse = self.reads
        if isinstance(modules[0], SparseInt8Linear) and not _stays_sparse(modules, base):
            self.weight = torch.cat([module.levels for module in modules])
        else:
            self.weight = joined(modules, "weight")
            self.metadata = joined(modules, "metadata") if isinstance(modules[0], SparseInt8Linear) else None
        self.scale = None if self.kind is None else joined(modules, "scale")
        self.bias = biases(modules)

    @property
    def plain_bias(self) -> Tensor | None:
        """The bias in the base type, for torch's own products."""
        return None if self.bias is None else self.bias.to(self.base)

    @property
    def channels(self) -> int:
        """The number of channels of the input."""
        return int(self.weight.shape[1]) * (1 if self.metadata is None else 2)


def _stays_sparse(modules: Sequence[Any], base: torch.dtype) -> bool:
    """Return whether the sparse kernel multiplies these layers, whose weights are otherwise expanded."""
    columns, depth, device = (
        sum(module.out_features for module in modules),
        modules[0].in_features,
        modules[0].weight.device,
    )
    return base != torch.float32 and sparse_gemm.unsupported_reason(columns, depth, device) is None


def biases(modules: Sequence[Any]) -> Tensor | None:
    """Concatenated, in fp32, zeros for a layer without; None if none has any."""
    if all(module.bias is None for module in modules):
        return None
    return torch.cat([
        torch.zeros(len(module.weight), device=module.weight.device) if module.bias is None
        else module.bias.detach().float()
        for module in modules
    ])  # fmt: skip


def joined(modules: Sequence[Any], name: str) -> Tensor:
    """The modules' tensors concatenated; the modules become views of it, so that no weight is stored twice.

    Raises ValueError for tensors of different types.
    """
    tensors: list[Tensor] = [getattr(module, name).detach() for module in modules]
    if len(tensors) == 1:
        return tensors[0]
    if len({tensor.dtype for tensor in tensors}) > 1:  # as scales of a published model in 4 bits may be
        raise ValueError(f"layers that read one input have a {name} of different types")
    # E4M3 as bytes: torch does not concatenate it everywhere.
    plain = torch.uint8 if tensors[0].dtype == torch.float8_e4m3fn else tensors[0].dtype
    joined = torch.cat([tensor.view(plain) for tensor in tensors]).view(tensors[0].dtype)
    at = 0
    for module, tensor in zip(modules, tensors, strict=True):
        part = joined[at : at + len(tensor)]
        at += len(tensor)
        if name in module._parameters:
            getattr(module, name).data = part
        else:
            module._buffers[name] = part
    return joined


class Linear(FusedLayer):
    """y = x · Wᵀ + b + residual over tokens [M, K], in the base type."""

    def __init__(self, modules: Sequence[Any], base: torch.dtype) -> None:
        super().__init__(modules, base)
        self.weight = self.weight.flatten(1)  # of a 1×1 convolution
        self._plain_bias = self.plain_bias

    @property
    def sparse(self) -> SparseWeight:
        """The weight of a layer with metadata."""
        assert self.metadata is not None
        return SparseWeight(self.weight, self.metadata)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None, tile: Tile | None = None, *,
        row_scale: Tensor | None = None, shares: BranchShares | None = None,
    ) -> Tensor:  # fmt: skip
        """`out` [M, N], whose rows may be strided, receives the result; it may be `residual`. `row_scale` [M]
        multiplies the products of 8-bit rows. `shares` of adapters are added.
        """
        if self.kind is None:
            y = F.linear(x, self.weight, self._plain_bias)
            if residual is not None:
                y = residual.add_(y) if out is residual else y.add_(residual)
            y = y if out is None or out is residual else out.copy_(y)
            return y if shares is None else shares.add(y)
        assert self.scale is not None
        if self.metadata is not None:
            y = sparse_gemm.product(x, self.sparse, self.scale, self.bias, row_scale, residual, self.base, out=out)
            return y if shares is None else shares.add(y)
        arguments = (x, self.weight, self.scale, self.bias, row_scale, residual, self.base)
        if x.is_cuda:
            return linears.linear_int8(*arguments, out=out, tile=tile, shares=shares)
        y = linears.linear_int8_reference(*arguments)
        y = y if out is None else out.copy_(y)
        return y if shares is None else shares.add(y)


class Gated(Linear):
    """hidden · act(gate), in the type that the next layer reads; hidden's rows of weights come first."""

    def gated_product(self, x: Tensor, then: Reader, act: Activation, shares: BranchShares | None = None) -> Tensor:
        """`shares` of adapters are added to hidden and gate."""
        folds = self.metadata is None or shares is None
        if self.kind is None or then.kind is not self.kind or act not in ("gelu", "silu") or not folds:
            hidden, gate = self(x, shares=shares).chunk(2, dim=-1)
            return cast_for_layer(hidden * ACTIVATIONS[act](gate), then)
        assert self.scale is not None and then.inverse is not None
        if self.metadata is not None:
            return sparse_gemm.gated(x, self.sparse, self.scale, self.bias, then.inverse, silu=act == "silu")
        arguments = (x, self.weight, self.scale, self.bias, then.inverse)
        if x.is_cuda:
            return linears.linear_geglu_int8(*arguments, act=act, shares=shares)
        added = None if shares is None else shares.alone(len(self.weight))
        return linears.linear_geglu_int8_reference(*arguments, act=act, added=added)


class Conv(FusedLayer):
    """A 3×3 convolution over NHWC as `core.ops.ops.Ops.conv`, in the base type."""

    taps = 3

    def __init__(self, modules: Sequence[Any], base: torch.dtype) -> None:
        super().__init__(modules, base)
        (module,) = modules
        stride = module.stride if isinstance(module, ScaledConv2d) else module.stride[0]
        self.stride, self.out_channels = int(stride), int(self.weight.shape[0])
        self.padding = int(module.padding if isinstance(module, ScaledConv2d) else module.padding[0])
        if self.kind is not None and self.padding != 1:
            raise ValueError("the 8-bit kernels pad convolutions on all sides")
        self._plain_bias = self.plain_bias
        if self.kind is None:
            module.weight.data = self.weight.contiguous(memory_format=torch.channels_last)
            self.weight = module.weight.detach()

    @property
    def channels(self) -> int:
        return int(self.weight.shape[1 if self.kind is None else 3])

    def window(self, x: Tensor) -> Window:
        """The window of x [B, H, W, C] that the result's pixels read."""
        ends = 2 * self.padding if self.padding else 1
        height, width = ((side + ends - self.taps) // self.stride + 1 for side in x.shape[1:3])
        return Window(height, width, (x.shape[1], x.shape[2]), self.taps, self.stride, self.padding)

    def __call__(
        self, x: Tensor, row_bias: Tensor | None = None, residual: Tensor | None = None, out: Tensor | None = None, *,
        relu: bool = False, shares: BranchShares | None = None,
    ) -> Tensor:  # fmt: skip
        """x [B, H, W, C] → [B, H', W', N]. `row_bias` fp32 [B, N]: one per image. `relu` acts last, and not together
        with `shares`, which are added.
        """
        if self.kind is None:
            x = x if self.padding else F.pad(x, (0, 0, 0, 1, 0, 1))
            y = F.conv2d(x.permute(0, 3, 1, 2), self.weight, self._plain_bias, self.stride, self.padding)
            y = y.permute(0, 2, 3, 1)
            y = y if row_bias is None else y.add_(row_bias[:, None, None].to(y.dtype))
            y = y if residual is None else y.add_(residual)
            y = y.relu_() if relu else y
            y = y if out is None else out.copy_(y)
            return y if shares is None else shares.add(y)
        assert self.scale is not None
        arguments = (x, self.weight, self.scale, self.bias, row_bias, residual, self.stride, self.base)
        if x.is_cuda:
            return convs.conv3x3_int8(*arguments, relu=relu, out=out, shares=shares)
        y = convs.conv3x3_int8_reference(*arguments, relu=relu)
        y = y if out is None else out.copy_(y)
        return y if shares is None else shares.add(y)


class UpConv(Conv):
    """A convolution after a nearest-neighbour upsampling by two; in 8 bits the larger image is never materialized.

    Taps that read the same pixel are summed, and the sums are quantized again.
    """

    def __init__(self, modules: Sequence[Any], base: torch.dtype) -> None:
        super().__init__(modules, base)
        if self.kind is not None:
            assert self.scale is not None
            limit = max_level(self.kind)
            sums = convs.upsample_weight(self.weight.float() * self.scale.view(-1, 1, 1, 1))  # [4, N, 2, 2, C]
            step = sums.flatten(2).abs().amax(dim=-1) / limit
            step = torch.where(step > 0, step, torch.ones_like(step))
            self.summed = to_levels(sums / step[..., None, None, None], self.kind).contiguous()
            self.steps = step.contiguous()

    def double(
        self, x: Tensor, height: int, width: int, out: Tensor | None = None, shares: BranchShares | None = None
    ) -> Tensor:
        """x [B, H, W, C] → [B, height, width, N]: twice H and W, or one less.

        Less is not a part of the doubled map's result, whose last pixels read what is cut: the larger image is made.
        """
        if self.kind is None:
            up = F.interpolate(x.permute(0, 3, 1, 2), size=(height, width), mode="nearest").permute(0, 2, 3, 1)
            return self(up, out=out, shares=shares)
        if (height, width) != (2 * x.shape[1], 2 * x.shape[2]):
            levels = x.view(torch.int8)  # E4M3 is not repeated by torch
            up = levels.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)[:, :height, :width]
            return self(up.contiguous().view(x.dtype), out=out, shares=shares)
        if x.is_cuda:
            return convs.upsample_conv3x3_int8(x, self.summed, self.steps, self.bias, self.base, out=out, shares=shares)
        y = convs.upsample_conv3x3_int8_reference(x, self.summed, self.steps, self.bias, self.base)
        y = y if out is None else out.copy_(y)
        return y if shares is None else shares.add(y)


class Norm:
    """LayerNorm or GroupNorm (and SiLU), in the type that the next layer reads."""

    def __init__(self, norm: nn.Module, base: torch.dtype, silu: bool = False) -> None:
        assert isinstance(norm, nn.LayerNorm | nn.GroupNorm)
        self.base, self.eps, self.silu = base, norm.eps, silu
        self.groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else 0
        self.weight, self.bias = (None if t is None else t.detach().to(base) for t in (norm.weight, norm.bias))

    def __call__(self, x: Tensor, then: Reader, scale: Tensor | None = None) -> Tensor:
        """x [M, C] or [B, H, W, C]; `scale` [B, C] multiplies each image's rows."""
        kind, inverse = then
        if self.groups:
            assert self.weight is not None and self.bias is not None
            norm = group_norms.group_norm_int8 if x.is_cuda else group_norms.group_norm_int8_reference
            return norm(x, self.groups, self.weight, self.bias, self.eps, inverse, self.silu, kind or self.base)
        if kind is None and scale is None:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        layer_norm = layer_norms.layer_norm_int8 if x.is_cuda else layer_norms.layer_norm_int8_reference
        return layer_norm(x, self.weight, self.bias, self.eps, inverse, kind or self.base, row_scale=scale)


class FusedRmsNorm:
    """RMSNorm, in the type that the next layer reads."""

    def __init__(self, norm: Any, base: torch.dtype) -> None:
        self.base, self.weight, self.eps = base, norm.weight.detach().to(base), rms_eps(norm)

    def __call__(self, x: Tensor, then: Reader, scale: Tensor | None, residual: Tensor | None) -> Tensor:
        """residual + RMSNorm(x) · scale of x [M, C]; `scale` [B, C] multiplies each image's rows."""
        kind, inverse = then
        norm = rms_norms.rms_norm if x.is_cuda else rms_norms.rms_norm_reference
        return norm(x, self.weight, self.eps, inverse, kind or self.base, row_scale=scale, residual=residual)


def attend_wide(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute `attend` for one head of hundreds of channels: one image at a time, since scores take 2·T² bytes."""
    scale = 1.0 / math.sqrt(q.shape[-1])
    images = zip(q.squeeze(2), k.squeeze(2), v.squeeze(2), strict=True)
    return torch.stack([((a * scale) @ b.t()).softmax(-1) @ c for a, b, c in images])


def attend(
    q: Tensor, k: Tensor, v: Tensor, then: Reader, lengths: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Attention of q [B, Sq, H, d] to k, v [B, Sk, K, d] for the next layer: [B·Sq, H·d].

    By torch where `lengths` are of other tokens than the queries: the kernels have them for self-attention only.
    """
    crossed = lengths is not None and q.shape[1] != k.shape[1]
    if q.is_cuda and q.dtype == torch.bfloat16 and not crossed:
        out = attention(q, k, v, then.inverse, then.kind or q.dtype, lengths=lengths, causal=causal)
        return out.flatten(0, 1)
    y = TorchOps().attend(*(x.flatten(2) for x in (q, k, v)), heads=q.shape[2], lengths=lengths, causal=causal)
    return cast_for_layer(y.flatten(0, 1), then)


def cast_for_layer(x: Tensor, then: Reader) -> Tensor:
    """x [..., C] in the type that the next layer reads."""
    if then.kind is None or then.inverse is None:
        return x
    return (quantize if x.is_cuda else quantize_reference)(x, then.inverse, then.kind)
