"""Launches the 8-bit product of `gemm_source.py`: geometry, tensor maps and the choice of a tile.

A linear layer is a convolution of one tap over one long row of pixels; an upsampling convolution is four of 2×2 taps,
one for each parity of the output's rows and columns. Checks only what the hardware requires; `linear.py` and `conv.py`
check the rest.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from core.kernels.cuda import driver, tiles
from core.kernels.cuda.gemm_source import GemmVariant, share_bytes, source
from core.kernels.cuda.language import pixel_stride
from core.kernels.cuda.low_rank import BranchShares
from core.kernels.cuda.tiles import Tile

_SHARED_BYTES = 227 * 1024  # per block on Hopper


class GemmArguments(ctypes.Structure):
    """The kernel's argument, field by field as in `gemm_source.py`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "residual", "scale", "bias", "row_bias", "row_scale", "inverse")),
        *((name, ctypes.c_void_p) for name in ("adapters", "low")),
        *((name, ctypes.c_longlong) for name in ("out_stride", "residual_stride", "row_bias_stride")),
        *(
            (name, ctypes.c_int)
            for name in (
                *(
                    "columns",
                    "column_tiles",
                    "phases",
                    "images",
                    "tiles_h",
                    "tiles_w",
                    "log_tile_w",
                    "box_dh",
                    "box_dw",
                ),
                *("channels", "taps", "tap_w", "stride", "pad_h", "pad_w", "height", "width", "up"),
                "inverse_step",
                *("uses", "ranks", "low_stride", "layer", "tokens"),
            )
        ),
    )


@dataclass(frozen=True, slots=True)
class EpilogueInputs:
    """The epilogue's optional operands."""

    bias: Tensor | None = None  # fp32 [N]
    row_bias: Tensor | None = None  # fp32 [images, N]
    row_scale: Tensor | None = None  # fp32 [pixels]
    residual: Tensor | None = None  # as the output; of one that is gated bf16, to hidden and gate
    inverse: Tensor | None = None  # fp32 [1] or [N]: the output is gated, and quantized with it
    silu: bool = False  # it is gated with silu instead of gelu
    shares: BranchShares | None = None  # of adapters

    def arguments(self, *, linear: bool) -> dict[str, int | None]:
        """The operands as fields of `GemmArguments`; of a linear layer rows of images follow one another."""
        return {
            "residual": _pointer(self.residual),
            "bias": _pointer(self.bias),
            "row_bias": _pointer(self.row_bias),
            "row_scale": _pointer(self.row_scale),
            "inverse": _pointer(self.inverse),
            "residual_stride": 0 if self.residual is None else pixel_stride(self.residual),
            "row_bias_stride": 0 if self.row_bias is None else self.row_bias.stride(0),
            "inverse_step": int(self.inverse is not None and self.inverse.numel() > 1),
            **self._shares(linear),
        }

    def lacks(self) -> str | None:
        """Return why the Hopper kernel does not support them, or None."""
        if self.shares is not None and (self.shares.low is None or self.shares.dtype == torch.float32):
            return "what adapters add is fp32"
        if self.row_bias is not None and self.row_bias.stride(0) % 4:
            return "rows of row_bias are not a multiple of 16 bytes apart"
        return None

    def _shares(self, linear: bool) -> dict[str, int | None]:
        if self.shares is None or self.shares.low is None:
            return {}
        addresses, low = self.shares.rows.addresses, self.shares.low
        return {
            "adapters": addresses.data_ptr(), "low": low.data_ptr(), "uses": low.shape[1], "ranks": low.shape[2],
            "low_stride": low.stride(0), "layer": self.shares.layer, "tokens": self.shares.pixels if linear else 0,
        }  # fmt: skip


@functools.cache
def _kernel(variant: GemmVariant, device: int) -> driver.Kernel:
    with torch.cuda.device(device):
        return driver.Kernel(source(variant), variant.name, threads=384, shared_bytes=variant.shared_bytes)


def stages(rows: int, columns: int, used_bytes: int = 0) -> int:
    """The largest ring depth that fits beside so many bytes."""
    return min(8, (_SHARED_BYTES - 1024 - 16 * columns - used_bytes) // ((rows + columns) * 128 + 16))


def slots(tile: Tile) -> int:
    """Slots for adapters' shares, of 16 ranks each: more than two only where the ring is as deep as beside two."""

    def depth(count: int) -> int:
        return stages(tile.rows, tile.columns, share_bytes(tile.columns, count, bool(tile.turns)))

    return next(count for count in (4, 3, 2) if depth(count) == depth(2))


def _pixels(rows: int, cluster: int, height: int, width: int) -> tuple[int, int]:
    """Height and width of a tile of `rows` pixels, a power of two wide, so that few of them exceed the edges."""

    def cost(tile_width: int) -> tuple[int, int]:
        return math.ceil(width / tile_width) * math.ceil(height / (rows // tile_width)), -tile_width

    tile_width = min((1 << i for i in range(3, (rows // cluster).bit_length()) if 1 << i <= 128), key=cost)
    return rows // tile_width, tile_width


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    extras: EpilogueInputs,
    *,
    kernel: str,
    taps: tuple[int, int] = (1, 1),
    stride: int = 1,
    tile: Tile | None = None,
) -> None:
    """out = x ∗ weight, in 8 bits.

    x: [B, H, W, C] int8 or E4M3, contiguous; a linear layer passes [1, 1, M, K]. weight: [P·N, taps·C], of the same
    type, P = 4 for `kernel` "upsample". scale: fp32 [P·N]. out: [B, H', W', N] with contiguous channels and evenly
    spaced pixels, so it may be a slice of a wider tensor; int8 or E4M3 for "geglu" (then N is half the weight's rows).
    """
    images, _, _, channels = x.shape
    gated, phases = kernel == "geglu", 4 if kernel == "upsample" else 1
    columns = weight.shape[0] // phases  # per phase; half of them remain after gating
    device = x.device.index
    linear = kernel in ("linear", "geglu")
    height, width = (out.shape[1] // 2, out.shape[2] // 2) if phases > 1 else (out.shape[1], out.shape[2])
    if tile is None:
        name, count = torch.cuda.get_device_name(device), driver.multiprocessors(device)
        tile = tiles.choose(name, kernel, images * height * width * phases, columns, weight.shape[1], count)
    cluster = tile.cluster
    tile_h, tile_w = (1, tile.rows) if linear else _pixels(tile.rows, cluster, height, width)
    # The blocks of a cluster fetch a tile's pixels together, each a box of them.
    box_h, box_w = (1, tile_w // cluster) if linear else (tile_h // cluster, tile_w)
    column_tiles = math.ceil(columns / tile.columns)
    arguments = GemmArguments(
        out=out.data_ptr(),
        scale=scale.data_ptr(),
        **extras.arguments(linear=linear),
        out_stride=pixel_stride(out),
        columns=columns // 2 if gated else columns,
        column_tiles=column_tiles,
        phases=phases,
        images=images,
        tiles_h=math.ceil(height / tile_h),
        tiles_w=math.ceil(width / tile_w),
        log_tile_w=tile_w.bit_length() - 1,
        box_dh=0 if linear else box_h,
        box_dw=box_w if linear else 0,
        channels=channels,
        taps=taps[0] * taps[1],
        tap_w=taps[1],
        stride=stride,
        pad_h=0 if linear else 1,
        pad_w=0 if linear else 1,
        height=height,
        width=width,
        up=2 if phases > 1 else 1,
    )
    maps = _activation_map(x, box_h, box_w, stride), _weight_map(weight, columns, tile.columns, gated=gated)
    total = images * arguments.tiles_h * arguments.tiles_w * (phases * column_tiles // cluster)
    blocks = min(total, driver.multiprocessors(device) // cluster) * cluster
    _kernel(_variant(tile, x, out, extras, gated=gated), device).launch(blocks, *maps, arguments)


def _variant(tile: Tile, x: Tensor, out: Tensor, extras: EpilogueInputs, *, gated: bool) -> GemmVariant:
    low = None if extras.shares is None else extras.shares.low
    shares = 0 if low is None else slots(tile)
    return GemmVariant(
        tile.blocks,
        tile.columns,
        tile.cluster,
        stages(tile.rows, tile.columns, share_bytes(tile.columns, shares, bool(tile.turns))),
        fp8=x.dtype == torch.float8_e4m3fn,
        geglu=gated,
        half=torch.float16 in (out.dtype, None if low is None else low.dtype),
        turns=bool(tile.turns),
        silu=extras.silu,
        group=tile.group,
        added=gated and extras.residual is not None,
        shares=shares,
    )


def _activation_map(x: Tensor, height: int, width: int, stride: int) -> driver.TensorMap:
    """Fetch x [B, H, W, C] in boxes of so many pixels, `stride` apart, and 128 channels."""
    images, rows, columns, channels = x.shape
    return driver.tensor_map(
        x,
        (channels, columns, rows, images),
        (channels, columns * channels, rows * columns * channels),
        (128, width * stride, height * stride, 1),
        (1, stride, stride, 1),
    )


def _weight_map(weight: Tensor, columns: int, tile_columns: int, *, gated: bool) -> driver.TensorMap:
    """Fetch the rows of a tile's columns in the order in which the accumulators of one thread are neighbours.

    `columns` are those of one phase.
    """
    rows, depth = weight.shape
    if gated:  # hidden and gate of one output lie side by side, and eight neighbours with one thread
        half = columns // 2
        sizes, strides = (depth, 2, 4, 8, half // 32), (half * depth, 8 * depth, depth, 32 * depth)
        inner = (128, 2, 4, 8, tile_columns // 64)
    else:  # eight neighbouring columns with one thread
        sizes, strides = (depth, 2, 4, 4, rows // 32), (depth, 8 * depth, 2 * depth, 32 * depth)
        inner = (128, 2, 4, 4, tile_columns // 32)
    return driver.tensor_map(weight, sizes, strides, inner)


def unsupported_reason(x: Tensor, weight: Tensor, scale: Tensor, out: Tensor, extras: EpilogueInputs) -> str | None:
    """Return why the Hopper kernel does not support this product, or None: requirements of TMA and 16-byte stores."""
    if (reason := driver.unsupported_reason(x.device)) is not None:
        return reason
    if out.shape[-1] % 32 or x.shape[-1] % 16:
        return "columns must be a multiple of 32 and channels of 16"
    if out.dtype not in (torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn):
        return "the output is fp32"
    tensors = (x, weight, scale, out, *(t for t in (extras.residual, extras.bias, extras.row_bias) if t is not None))
    if any(t.data_ptr() % 16 for t in tensors):
        return "an address is not a multiple of 16"
    strides = [pixel_stride(t) * t.element_size() for t in (out, extras.residual) if t is not None]
    if any(step % (8 if out.element_size() == 1 else 16) for step in strides):
        return "pixels are not a multiple of 16 bytes apart"
    return extras.lacks()
