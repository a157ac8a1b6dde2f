"""Sums over the GPUs of a host in symmetric memory, fused with what follows: residual, RMSNorm, and quantization.

Each rank writes its part of a row where the others can read it, tells them, waits until they have told it, and reads
all parts in the order of ranks: one kernel in place of an all-reduce and a norm, and bits that depend on nothing but
the row. Few rows are read whole by all ranks (one-shot); of many each rank sums a share that the others then read
(two-shot, torch's). NVLink multicast is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.kernels.cuda.fused_kernels import SplitSums, summed
from core.kernels.cuda.language import power, tl
from core.kernels.cuda.launching import enter, kernel, options
from core.kernels.cuda.quantize import rounded

log = logging.getLogger(__name__)

ROWS = 256  # the most of a one-shot sum
MANY_ROWS = 2048  # and of a two-shot one
_SLOTS = 2  # a rank may write the next part while others still read the last
_PATIENCE = 2**20  # looks at a flag in the check, which gives up; steps wait for ever


class RankSums(SplitSums):
    """A rank's part of a product, that is still to be summed over the ranks."""


@kernel()
def _last(flags, others, epoch):  # type: ignore[no-untyped-def]
    """The lowest number of an exchange that the other ranks have told of."""
    return tl.min(tl.where(others, tl.atomic_add(flags, 0, others, sem="acquire", scope="sys"), epoch), 0)


@kernel("rows")
def _exchange(  # type: ignore[no-untyped-def]
    x, parts, scale, bias, buffers, flags, epochs, weight, inverse, out, rows, eps, N: tl.constexpr,
    SPLITS: tl.constexpr, ME: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, WRITE: tl.constexpr,
    READ: tl.constexpr, PATIENCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row. `buffers` and `flags` are each rank's addresses: rows of parts, and for each row and rank
    the number of the last exchange that its part is of. That of this one is one more than in `epochs`, this rank's own.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < N
    kind: tl.constexpr = x.dtype.element_ty
    factor = tl.load(weight + c, inside, other=0.0).to(tl.float32)
    if inverse is not None:
        factor *= tl.load(inverse + c, inside, other=0.0)
    enter(EARLY)
    epoch = tl.load(epochs + row) + 1
    ranks = tl.arange(0, SIZE)
    others = ranks != ME
    told = tl.load(flags + ranks).to(tl.pointer_type(tl.int32)) + row * SIZE + ME
    tells = tl.load(flags + ME).to(tl.pointer_type(tl.int32)) + row * SIZE + ranks
    y = tl.load(x + row * N + c, inside, other=0.0).to(tl.float32)
    if WRITE:
        part = summed(parts, scale, bias, row, rows, c, inside, N, SPLITS)
        to = tl.multiple_of(tl.load(buffers + ME).to(tl.pointer_type(kind)), 16)
        tl.store(to + row * N + c, part.to(kind), inside)
        tl.debug_barrier()  # the flags are of all threads' stores
        tl.atomic_xchg(told, epoch, others, sem="release", scope="sys")
    if READ:
        looks = 0
        last = _last(tells, others, epoch)
        while (last < epoch) & ((PATIENCE == 0) | (looks < PATIENCE)):
            last = _last(tells, others, epoch)
            looks += 1
        tl.debug_barrier()
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(SIZE):
            source = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(kind)), 16)
            total += tl.load(source + row * N + c, inside, other=0.0).to(tl.float32)
        kept = (y + total).to(kind)
        tl.store(x + row * N + c, kept, inside)
        y = kept.to(tl.float32)  # the norm is of the rounded values that others will read
        y *= tl.rsqrt(tl.sum(y * y, 0) / N + eps) * factor
        tl.store(out + row * N + c, rounded(y, out.dtype.element_ty), inside)
        tl.store(epochs + row, epoch)


@dataclass(frozen=True, eq=False)
class Slot:
    """One of two places of parts: each rank's address of it, and of its flags, int64 [ranks], and own epochs
    int32 [rows].
    """

    buffers: Tensor
    flags: Tensor
    epochs: Tensor


class Exchange:
    """This rank's view of all ranks' symmetric memory, for rows of `width` channels."""

    def __init__(self, addresses: list[int], rank: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """`addresses` of each rank's memory, of `size_bytes` zeros."""
        self.rank, self.size, self.width, self.dtype, self._device = rank, len(addresses), width, dtype, device
        flags_bytes, buffer_bytes = _sizes(self.size, width, dtype)

        def at(offset: int) -> Tensor:
            return torch.tensor([address + offset for address in addresses], dtype=torch.int64, device=device)

        self.slots = [
            Slot(
                at(_SLOTS * flags_bytes + slot * buffer_bytes), at(slot * flags_bytes),
                torch.zeros(ROWS, dtype=torch.int32, device=device),
            )
            for slot in range(_SLOTS)
        ]  # fmt: skip
        self._memory: Any = None
        self._many: Tensor | None = None
        self._group = ""

    @staticmethod
    def size_bytes(ranks: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of a rank's memory."""
        return _SLOTS * sum(_sizes(ranks, width, dtype))

    @classmethod
    def over(cls, group: Any, width: int, dtype: torch.dtype, device: torch.device) -> Exchange:
        """Allocate and exchange symmetric memory among the ranks of a torch group. Raises what torch raises."""
        import torch.distributed._symmetric_memory as symmetric

        size = cls.size_bytes(group.size(), width, dtype)
        memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric.rendezvous(memory, group.group_name)
        exchange = cls([int(address) for address in handle.buffer_ptrs], group.rank(), width, dtype, device)
        many = symmetric.empty(MANY_ROWS * width, dtype=dtype, device=device)
        symmetric.rendezvous(many, group.group_name)
        exchange._memory, exchange._many, exchange._group = (memory, handle), many, group.group_name
        return exchange

    def add_norm_(
        self, x: Tensor, sums: SplitSums, weight: Tensor, eps: float, inverse: Tensor | None, dtype: torch.dtype, *,
        slot: int, early: int = 0, write: bool = True, read: bool = True, patience: int = 0,
    ) -> Tensor:  # fmt: skip
        """Add all ranks' `sums` to x [T, C] in place; its RMSNorm times `inverse` [C], as `dtype`. At most `ROWS` rows.

        Consecutive exchanges take turns of `slot`. All ranks call it, in the same order. `write` and `read` are its
        halves, for tests that run one rank after another.
        """
        rows = len(x)
        place, block = self.slots[slot], power(self.width)
        out = torch.empty(rows, self.width, dtype=dtype, device=x.device)
        _exchange[(rows,)](
            x, sums.parts, sums.scale, sums.bias, place.buffers, place.flags, place.epochs, weight, inverse, out, rows,
            eps, self.width, len(sums.parts), self.rank, self.size, block, write, read, patience, early,
            num_warps=max(1, min(16, block // 256)), **options(early),
        )  # fmt: skip
        return out

    def sum_many(self, x: Tensor) -> Tensor | None:
        """The sum [T, C] of all ranks' x, valid until the next call; None where it does not fit."""
        if self._many is None or x.numel() > self._many.numel() or x.dtype != self.dtype:
            return None
        part = self._many[: x.numel()]
        part.copy_(x.reshape(-1))
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", self._group)
        return part.view(x.shape)

    def check(self, agree: Callable[[bool], bool]) -> str:
        """Try both sums; "", or why they are not to be used. All ranks call it; `agree` is whether all give True."""
        for attempt in (self._compile, self._check_rows, self._check_many):
            try:
                attempt()
                reason = ""
            except Exception as error:  # of torch, Triton or the driver
                reason = f"{type(error).__name__}: {error}"
            if not agree(not reason):
                return reason or "it does not work on another rank"
        return ""

    def _compile(self) -> None:
        """Exchange once, without waiting for ranks that still compile."""
        for slot in range(_SLOTS):
            self._sum_of_ones(slot)

    def _check_rows(self) -> None:
        for slot in (0, 1, 0, 1):
            self._expect(self._sum_of_ones(slot))

    def _check_many(self) -> None:
        part = torch.full((2 * self.size, self.width), self.rank + 1, dtype=self.dtype, device=self._device)
        total = self.sum_many(part)
        assert total is not None
        self._expect(total)

    def _sum_of_ones(self, slot: int) -> Tensor:
        """The sum of two rows of 1 of the first rank, 2 of the second, …"""
        x = torch.zeros(2, self.width, dtype=self.dtype, device=self._device)
        part = torch.full((1, 2, self.width), float(self.rank + 1), device=self._device)
        ones = torch.ones(self.width, dtype=self.dtype, device=self._device)
        self.add_norm_(x, SplitSums(part), ones, 1e-5, None, self.dtype, slot=slot, patience=_PATIENCE)
        return x

    def _expect(self, total: Tensor) -> None:
        expected = sum(range(1, self.size + 1))
        if not bool((total == expected).all()):
            raise RuntimeError(f"a sum in symmetric memory is {float(total.float().mean())}, not {expected}")


def _sizes(ranks: int, width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a slot's flags, and of its rows."""
    return 4 * ROWS * ranks, ROWS * width * dtype.itemsize
