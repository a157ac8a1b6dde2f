"""Low-rank branches: out += scale · up(down(x)), with each row's own adapters (Punica; Chen et al., 2023).

An adapter lies in memory of its own, in its own ranks. Which rows get which is read from a table on the device, so that
one recorded graph runs every mixture. down(x) is a kernel of Triton; up is one, too, which does not write rows without
an adapter, or a part of the layer's own product (`share_source.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.branches import BranchPart, aligned
from core.kernels.cuda.language import evenly_spaced, pixel_stride, power, tl
from core.kernels.cuda.launching import kernel

ENTRY = 4  # int64 numbers of a layer in an adapter's table: addresses of `down`, `up` and `spans`, and the ranks
_TILE = 64  # columns that a program of `up` takes
_RANKS = 64  # that a program of `down` takes: for more, others read and convert its pixels again
_PADDED = 8  # ranks are multiples of it, with zeros, so that 16 bytes are loaded at a time
_MOST_LEVEL = 127 * 256 + 127  # of 16 bits in two halves
_ROWS, _DEPTH = 128, 128  # pixels, and bytes of one's channels, that are multiplied at a time
_STAGES = 3  # of these that are in flight


class Window(NamedTuple):
    """The pixels of the input that a layer's outputs [height, width] read: taps × taps of a map of `sides`, from
    -padding on. `doubled`: that map is the input, doubled by nearest neighbours.
    """

    height: int
    width: int
    sides: tuple[int, int]
    taps: int = 1
    stride: int = 1
    padding: int = 0
    doubled: bool = False


class RowAdapters(NamedTuple):
    """The adapters of each image: addresses of their tables, int64 [images, uses], 0 for none, and scales in fp32.

    `ranks`: at least as many as any of them has in one layer.
    """

    addresses: Tensor
    scales: Tensor
    ranks: int


class LayerFactors(NamedTuple):
    """One adapter's branches of one layer: `down` [ranks, taps · channels], and `up` by tiles of columns, of which
    `spans` int32 [tiles, 3] says which ranks they have, from the first to behind the last, and where they begin. Of a
    tile, a column's ranks are neighbours.

    Of a layer that reads INT8 `down` is `as_levels` of it.
    """

    down: Tensor
    up: Tensor
    spans: Tensor
    ranks: int


def as_levels(down: Tensor) -> Tensor:
    """`down` fp32 [ranks, K] as 16-bit integers with one step a rank, whose products with INT8 sum exactly in int32: as
    bytes, the steps fp32 [ranks], the high halves int8 [ranks, K], then the low ones, of step · (256 · high + low).
    """
    step = (down.abs().amax(1, keepdim=True) / _MOST_LEVEL).clamp(min=torch.finfo(torch.float32).tiny)
    levels = (down / step).round().clamp(-_MOST_LEVEL, _MOST_LEVEL).to(torch.int32)
    high = (levels + 128).div(256, rounding_mode="floor")
    halves = torch.stack((high, levels - 256 * high)).to(torch.int8)
    return torch.cat((step.flatten().view(torch.int8), halves.flatten()))


def pack(parts: Sequence[BranchPart], columns: int, dtype: torch.dtype, *, eight: bool = False) -> LayerFactors:
    """The branches `parts` of a layer with so many columns, in a type, on the CPU. `eight`: its input is INT8."""
    parts = [_padded(part) for part in parts]
    tiles = -(-columns // _TILE)
    spans = torch.zeros(tiles, 3, dtype=torch.int32)
    tables: list[Tensor] = []
    rank = at = 0
    down = torch.cat([part.down.flatten(1) for part in parts])
    for part in aligned(parts, columns, _TILE):
        shape, ranks = -(-part.up.shape[0] // _TILE), part.up.shape[1]
        padded = F.pad(part.up, (0, 0, 0, shape * _TILE - part.up.shape[0]))
        tables.append(padded.flatten())
        first = part.start // _TILE
        spans[first : first + shape, 0], spans[first : first + shape, 1] = rank, rank + ranks
        spans[first : first + shape, 2] = at + ranks * _TILE * torch.arange(shape)
        rank, at = rank + ranks, at + shape * ranks * _TILE
    packed = as_levels(down) if eight else down.to(dtype).contiguous()
    return LayerFactors(packed, torch.cat(tables).to(dtype), spans, len(down))


def _padded(part: BranchPart) -> BranchPart:
    more = -part.up.shape[1] % _PADDED
    return part._replace(down=F.pad(part.down, (0, 0, 0, 0, 0, more)), up=F.pad(part.up, (0, more)))


@kernel()
def _ranks(  # type: ignore[no-untyped-def]
    x, factors, low, scale, row_scale, m, image, use, first, rank, pixels, out_width, map_height, map_width, width,
    image_pixels, stride, uses, ranks, C: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DOUBLED: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BR ranks, from `first` on, of the pixels m [BM] of an image. INT8 is multiplied by both halves of levels."""
    EIGHT: tl.constexpr = x.dtype.element_ty == tl.int8
    r = first + tl.arange(0, BR)
    valid = m < pixels
    k = tl.arange(0, BK)
    if EIGHT:
        weight = tl.multiple_of(factors.to(tl.pointer_type(tl.int8)), 16) + 4 * rank  # behind the steps
        lower = rank * (TAPS * TAPS * C)
        acc = tl.zeros((m.shape[0], BR), tl.int32)
        rest = tl.zeros((m.shape[0], BR), tl.int32)
    else:
        weight = tl.multiple_of(factors.to(tl.pointer_type(low.dtype.element_ty)), 16)
        acc = tl.zeros((m.shape[0], BR), tl.float32)
    for tap in range(0, TAPS * TAPS):
        row, column = m // out_width * STRIDE + tap // TAPS - PADDING, m % out_width * STRIDE + tap % TAPS - PADDING
        visible = valid & (row >= 0) & (row < map_height) & (column >= 0) & (column < map_width)
        if DOUBLED:
            row, column = row >> 1, column >> 1
        pixel = image.to(tl.int64) * image_pixels + row * width + column
        a = x + pixel[:, None] * stride + k[None, :]
        b = weight + (r[None, :] * (TAPS * TAPS) + tap) * C + k[:, None]
        for at in range(0, C, BK):
            seen, masks = visible[:, None] & (k + at < C)[None, :], (r < rank)[None, :] & (k + at < C)[:, None]
            if EIGHT:
                left = tl.load(a + at, seen, other=0)
                acc = tl.dot(left, tl.load(b + at, masks, other=0), acc, out_dtype=tl.int32)
                rest = tl.dot(left, tl.load(b + lower + at, masks, other=0), rest, out_dtype=tl.int32)
            else:
                left = tl.load(a + at, seen, other=0.0).to(low.dtype.element_ty)
                acc = tl.dot(left, tl.load(b + at, masks, other=0.0), acc, input_precision="ieee")
    if EIGHT:
        steps = tl.load(factors.to(tl.pointer_type(tl.float32)) + r, r < rank, other=0.0)
        sums = (acc.to(tl.float32) * 256.0 + rest.to(tl.float32)) * (steps * scale)[None, :]
    else:
        sums = acc * scale
    place = image.to(tl.int64) * pixels + m
    if row_scale is not None:
        sums *= tl.load(row_scale + place, valid, other=0.0)[:, None]
    to = low + ((place * uses + use) * ranks)[:, None] + r[None, :]
    tl.store(to, sums.to(low.dtype.element_ty), valid[:, None] & (r < rank)[None, :])


@kernel("layer")
def _down(  # type: ignore[no-untyped-def]
    x, addresses, scales, row_scale, low, layer, pixels, out_width, map_height, map_width, width, image_pixels,
    stride, uses, ranks, C: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DOUBLED: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program for some pixels of an image, some ranks of one of its adapters."""
    chunks = tl.cdiv(ranks, BR)
    first = tl.program_id(0) % chunks * BR
    m = tl.program_id(0) // chunks * BM + tl.arange(0, BM)
    image, use = tl.program_id(1), tl.program_id(2)
    adapter = tl.load(addresses + image * uses + use)
    if adapter == 0:
        return
    entry = adapter.to(tl.pointer_type(tl.int64)) + layer * 4
    rank = tl.multiple_of(tl.load(entry + 3).to(tl.int32), 8)
    if first >= rank:
        return
    factors = tl.load(entry)
    scale = tl.load(scales + image * uses + use)
    # As wide as the adapter's own ranks ask for, not as those beside it: bits must not depend on these.
    if rank - first <= BR // 4:
        _ranks(
            x, factors, low, scale, row_scale, m, image, use, first, rank, pixels, out_width, map_height, map_width,
            width, image_pixels, stride, uses, ranks, C, TAPS, STRIDE, PADDING, DOUBLED, BR // 4, BK,
        )  # fmt: skip
    elif rank - first <= BR // 2:
        _ranks(
            x, factors, low, scale, row_scale, m, image, use, first, rank, pixels, out_width, map_height, map_width,
            width, image_pixels, stride, uses, ranks, C, TAPS, STRIDE, PADDING, DOUBLED, BR // 2, BK,
        )  # fmt: skip
    else:
        _ranks(
            x, factors, low, scale, row_scale, m, image, use, first, rank, pixels, out_width, map_height, map_width,
            width, image_pixels, stride, uses, ranks, C, TAPS, STRIDE, PADDING, DOUBLED, BR, BK,
        )  # fmt: skip


@kernel("layer")
def _up(  # type: ignore[no-untyped-def]
    low, addresses, out, layer, pixels, columns, stride, uses, ranks, ADD: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One program for some pixels of an image and a tile of columns: adds the shares of all adapters of the image."""
    tiles = tl.cdiv(columns, BN)
    tile = tl.program_id(0) % tiles
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    image = tl.program_id(1)
    within = tl.arange(0, BN)
    valid = m < pixels
    place = image.to(tl.int64) * pixels + m
    acc = tl.zeros((BM, BN), tl.float32)
    matches = 0
    for use in range(0, uses):
        adapter = tl.load(addresses + image * uses + use)
        if adapter != 0:
            entry = adapter.to(tl.pointer_type(tl.int64)) + layer * 4
            if tl.load(entry + 3) > 0:
                span = tl.load(entry + 2).to(tl.pointer_type(tl.int32)) + tile * 3
                first, last = tl.multiple_of(tl.load(span), 8), tl.multiple_of(tl.load(span + 1), 8)
                weight = tl.load(entry + 1).to(tl.pointer_type(low.dtype.element_ty)) + tl.load(span + 2)
                weight = tl.multiple_of(weight, 16)
                for at in range(first, last, BR):
                    r = at + tl.arange(0, BR)
                    a = low + ((place * uses + use) * ranks)[:, None] + r[None, :]
                    left = tl.load(a, valid[:, None] & (r < last)[None, :], other=0.0)
                    b = weight + within[None, :] * (last - first) + (r - first)[:, None]
                    right = tl.load(b, (r < last)[:, None], other=0.0)
                    acc = tl.dot(left, right, acc, input_precision="ieee")
                matches += last - first
    n = tile * BN + within
    to = out + place[:, None] * stride + n[None, :]
    inside = valid[:, None] & (n < columns)[None, :]
    if ADD:
        inside = inside & (matches > 0)
        acc += tl.load(to, inside, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), inside)


class BranchShares(NamedTuple):
    """The sum that a batch's adapters add to a layer's result: scale · row_scale · up(down(x)) of each image's own.

    x [B, H, W, C] in the type of `up` or in 8 bits; `layer` is its number in the adapters' tables; row_scale
    [B · height · width]: fp32. `dtype`: that of `up` and the result. `folds`: a product that can adds them itself.
    `low` [B · height · width, uses, ranks]: scale · row_scale · down(x), on a GPU. Bits of a row depend on it alone.
    """

    x: Tensor
    rows: RowAdapters
    layer: int
    window: Window
    row_scale: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16
    folds: bool = False
    low: Tensor | None = None

    @property
    def pixels(self) -> int:
        """The number of pixels of an image."""
        return self.window.height * self.window.width

    def computed(self) -> BranchShares:
        """The shares with `low` computed, if it is on a GPU."""
        return self._replace(low=down(self)) if self.x.is_cuda else self

    def add(self, out: Tensor, *, alone: bool = False) -> Tensor:
        """Add them to `out` [M, N] or [B, height, width, N], of the type of the factors; rows may be apart.

        Rows of images without a share in the layer are not written. `alone`: `out` gets what would be added.
        """
        step = pixel_stride(out) if out.dim() == 4 else out.stride(-2)
        flat = out.as_strided((out.numel() // out.shape[-1], out.shape[-1]), (step, 1))
        if self.low is not None:
            up(self, self.low, flat, alone=alone)
        else:
            reads = [*self.window[:2], *self.window.sides, *self.window[3:6]]
            tables = self.rows.addresses, self.rows.scales
            _opaque(self.x, flat, *tables, self.layer, reads, self.window.doubled, self.row_scale, alone)
        return out

    def alone(self, columns: int) -> Tensor:
        """[M, N], zeros in rows without."""
        out = torch.empty(len(self.x) * self.pixels, columns, dtype=self.dtype, device=self.x.device)
        return self.add(out, alone=True)


def folded(shares: BranchShares | None) -> BranchShares | None:
    """The shares that a product is to add itself."""
    return shares if shares is not None and shares.folds else None


def add_rest(shares: BranchShares | None, out: Tensor, *, able: bool) -> Tensor:
    """`out` with the shares that its product did not add; `able`: it adds those that fold."""
    return out if shares is None or (able and shares.folds) else shares.add(out)


def _together(pixels: int) -> int:
    """Pixels of a program: not by the number of images, as ranks not by the adapters, since bits must not depend on
    these.
    """
    return max(16, min(_ROWS, power(pixels)))


def down(shares: BranchShares) -> Tensor:
    """`BranchShares.low`, undefined in ranks that an adapter does not have in the layer."""
    x, (addresses, scales, ranks), layer, window, row_scale = shares[:5]
    images, _, width, channels = x.shape
    x = x if evenly_spaced(x) else x.contiguous()
    pixels, uses, together = shares.pixels, addresses.shape[1], _together(shares.pixels)
    low = torch.empty(images * pixels, uses, ranks, dtype=shares.dtype, device=x.device)
    _down[(-(-pixels // together) * -(-ranks // _RANKS), images, uses)](
        x, addresses, scales, row_scale, low, layer, pixels, window.width, *window.sides, width, x.shape[1] * width,
        pixel_stride(x), uses, ranks, channels, window.taps, window.stride, window.padding, window.doubled, together,
        _RANKS, _DEPTH // x.itemsize, num_warps=8 if together == _ROWS else 4, num_stages=_STAGES,
    )  # fmt: skip
    return low


def up(shares: BranchShares, low: Tensor, out: Tensor, *, alone: bool = False) -> None:
    """out += up(low), or instead of what `out` [M, N] holds; its rows may be apart."""
    pixels, uses, together = shares.pixels, shares.rows.addresses.shape[1], _together(shares.pixels)
    columns = out.shape[1]
    _up[(-(-pixels // together) * -(-columns // _TILE), len(shares.x))](
        low, shares.rows.addresses, out, shares.layer, pixels, columns, out.stride(0), uses, shares.rows.ranks,
        not alone, together, _TILE, 16, num_warps=4,
    )  # fmt: skip


def add_reference(
    x: Tensor, out: Tensor, rows: RowAdapters, layer: int, window: Window, row_scale: Tensor | None = None, *,
    alone: bool = False,
) -> None:  # fmt: skip
    """`BranchShares.add` on a CPU, by the adapters' own tables."""
    maps, height, width = x.float().permute(0, 3, 1, 2), window.height, window.width
    if window.doubled:
        maps = F.interpolate(maps, size=window.sides, mode="nearest")
    maps = F.pad(maps, (window.padding, window.taps, window.padding, window.taps))
    if alone:
        out.zero_()
    pixels = height * width
    for image, (addresses, scales) in enumerate(zip(rows.addresses.tolist(), rows.scales.tolist(), strict=False)):
        if image == len(x):
            break
        added = torch.zeros(pixels, out.shape[1])
        matched = False
        for address, scale in zip(addresses, scales, strict=True):
            factors = _factors(address, layer, window.taps, x, out) if address else None
            if factors is not None:
                matched = True
                low = F.conv2d(maps[image : image + 1], factors[0], stride=window.stride)[0, :, :height, :width]
                added += (low.flatten(1).t() * scale) @ factors[1]
        if matched:
            span = slice(image * pixels, (image + 1) * pixels)
            added = added if row_scale is None else added * row_scale[span, None]
            out[span] = (out[span].float() + added).to(out.dtype)


def _factors(address: int, layer: int, taps: int, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor] | None:
    """`down` [ranks, channels, taps, taps] and `up` [ranks, columns] of a layer in an adapter's table; None without."""
    down, up, spans, ranks = _at(address + 8 * ENTRY * layer, ENTRY, torch.int64).tolist()
    if not ranks:
        return None
    columns = out.shape[1]
    depth = taps * taps * x.shape[3]
    if x.dtype == torch.int8:
        high, rest = _at(down + 4 * ranks, 2 * ranks * depth, torch.int8).float().view(2, ranks, depth)
        weight = (256 * high + rest) * _at(down, ranks, torch.float32)[:, None]
    else:
        weight = _at(down, ranks * depth, out.dtype).float()
    weight = weight.view(ranks, taps, taps, x.shape[3])
    padded = torch.zeros(ranks, -(-columns // _TILE) * _TILE)
    tiles = _at(spans, padded.shape[1] // _TILE * 3, torch.int32).view(-1, 3)
    for tile, (first, last, start) in enumerate(tiles.tolist()):
        if first < last:
            block = _at(up + start * out.itemsize, (last - first) * _TILE, out.dtype).view(_TILE, -1)
            padded[first:last, tile * _TILE : (tile + 1) * _TILE] = block.t()
    return weight.permute(0, 3, 1, 2), padded[:, :columns]


def _at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """A view of so many numbers at an address of this process."""
    memory: Any = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


# Opaque to torch, as a launched kernel is: what it reads by address is decided when it runs, not when it is recorded.
@torch.library.custom_op("diptych::add_low_rank", mutates_args=("out",), device_types="cpu")
def _opaque(
    x: Tensor, out: Tensor, addresses: Tensor, scales: Tensor, layer: int, window: Sequence[int], doubled: bool,
    row_scale: Tensor | None, alone: bool,
) -> None:  # fmt: skip
    height, width, high, columns, taps, stride, padding = window
    reads = Window(height, width, (high, columns), taps, stride, padding, doubled)
    add_reference(x, out, RowAdapters(addresses, scales, 0), layer, reads, row_scale, alone=alone)
