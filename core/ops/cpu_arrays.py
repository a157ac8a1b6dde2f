"""The handles of the CPU lowering: activations in buffers of a program, pairs of them, and inputs that come later."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from core.kernels.cpu.program import Program
from core.ops.packed import PackedLayer


class Array:
    """Activations in a buffer of a program, released with the last reference: later calls may then reuse it.

    `x` [product of all but the last of `shape`, channels]: floats, or bytes for an INT8 layer. A view keeps its whole
    alive.
    """

    __slots__ = ("_program", "_whole", "reader", "shape", "x")

    def __init__(self, x: Tensor, shape: tuple[int, ...], program: Program | None, parent: Array | None = None) -> None:
        self.x, self.shape = x, shape
        self._program, self._whole = program, parent  # a program: the buffer is this array's own
        self.reader: PackedLayer | None = None  # of bytes

    def __del__(self) -> None:
        if self._program is not None:
            self._program.give_back(self.x)

    @property
    def images(self) -> int:
        return self.shape[0]

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width; tokens lie in one line."""
        height, width = (1, 1, *self.shape[1:-1])[-2:]
        return height, width


class ArrayPair(NamedTuple):
    """Two arrays read as one, x's channels first."""

    x: Array
    y: Array


class Bound(NamedTuple):
    """A range of channels, from `start` on, of the bound input, which is known when the program runs."""

    images: int
    channels: int
    start: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.images, self.channels
