"""Packs low-rank branches for the matrix product, and says which rows of a batch get which."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.kernels.branches import BranchPart, aligned
from core.kernels.cpu import calls
from core.kernels.cpu.arguments import check, pointer
from core.kernels.cpu.program import INT8, Weights

_LANES = 16
_STATIC, _BY_ROW, _FLOATS = 0, 1, 2


@dataclass(frozen=True, eq=False)
class PackedBranch:
    """The branches of one adapter in one product, as the kernels read them."""

    arguments: calls.Branch
    tensors: tuple[Tensor, ...]  # which the arguments point into

    @property
    def address(self) -> int:
        return ctypes.addressof(self.arguments)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def pack_branch(
    library: ctypes.CDLL, weights: Weights, inverse: Tensor | None, parts: Sequence[BranchPart]
) -> PackedBranch:
    """The branches `parts` of a product with these weights, whose inputs `inverse` [channels] quantizes, if given.

    Releases the GIL for the most part, and uses one thread. Raises ValueError for shapes that do not fit the weights.
    """
    for part in parts:
        rank, columns = part.down.shape[0], part.up.shape[0]
        check("down", part.down, rank, weights.taps, weights.channels)
        check("up", part.up, columns, rank)
        if not rank or not columns or part.start + columns > weights.n:
            raise ValueError(f"a branch of rank {rank} for columns {part.start} to {part.start + columns}")
    check("inverse", inverse, weights.channels)
    kind = _FLOATS if weights.kind != INT8 else _BY_ROW if weights.by_row else _STATIC
    down = torch.cat([part.down for part in parts])
    ranks, row = down.shape[0], weights.taps * weights.channels
    groups = -(-ranks // _LANES)
    offset = scale = None
    if kind == _FLOATS:
        packed = torch.empty(groups * row * _LANES)
    else:
        packed = torch.empty(groups * row * 2 * _LANES, dtype=torch.int8)
        taps = weights.taps if kind == _BY_ROW else 1
        offset, scale = torch.empty(groups * taps * 2 * _LANES, dtype=torch.int32), torch.empty(groups * _LANES)
    library.diptych_pack_down(
        down.data_ptr(), pointer(inverse), packed.data_ptr(), pointer(offset), pointer(scale),
        ranks, weights.taps, weights.channels, kind,
    )  # fmt: skip
    up, spans = _packed_up(weights, parts)
    arguments = calls.Branch(
        down=packed.data_ptr(), offset=pointer(offset), scale=pointer(scale), up=up.data_ptr(), spans=spans.data_ptr(),
        groups=groups,
    )  # fmt: skip
    return PackedBranch(arguments, tuple(each for each in (packed, offset, scale, up, spans) if each is not None))


def _packed_up(weights: Weights, parts: Sequence[BranchPart]) -> tuple[Tensor, Tensor]:
    """`up` of all parts, [vectors, 16], and the spans int32 [vectors of columns, 3] that say where each lies."""
    vectors = -(-weights.n // _LANES)
    spans = torch.zeros(vectors, 3, dtype=torch.int32)
    blocks: list[Tensor] = []
    rank = at = 0
    for part in aligned(parts, weights.n, _LANES):
        shape, ranks = -(-part.up.shape[0] // _LANES), part.up.shape[1]
        padded = part.up
        if shape * _LANES > part.up.shape[0]:
            padded = torch.cat([part.up, part.up.new_zeros(shape * _LANES - part.up.shape[0], ranks)])
        blocks.append(padded.view(shape, _LANES, ranks).permute(0, 2, 1).reshape(-1, _LANES))
        numbers = torch.arange(part.start // _LANES, part.start // _LANES + shape)
        if weights.geglu:  # vectors of hidden and gate alternate
            half = vectors // 2
            numbers = torch.where(numbers < half, 2 * numbers, 2 * (numbers - half) + 1)
        starts = at + ranks * torch.arange(shape)
        spans[numbers] = torch.stack(
            [torch.full((shape,), rank), torch.full((shape,), rank + ranks), starts], dim=1
        ).int()  # fmt: skip
        rank, at = rank + ranks, at + shape * ranks
    return torch.cat(blocks), spans


class BranchTable:
    """The adapters, by number, and their scales for the rows of each image of a batch."""

    def __init__(self, rows: Sequence[Sequence[tuple[int, float]]]) -> None:
        self.images = len(rows)
        uses = [calls.BranchUse(branch, scale) for row in rows for branch, scale in row]
        self._uses = (calls.BranchUse * max(1, len(uses)))(*uses)
        first = [sum(len(row) for row in rows[:number]) for number in range(self.images + 1)]
        self._first = (ctypes.c_int32 * len(first))(*first)
        self._arguments = calls.BranchRows(
            uses=ctypes.addressof(self._uses), first=ctypes.addressof(self._first), images=self.images
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._arguments)
