"""Low-rank branches on the GPU lowering: adapters in the device's memory, and the table of which rows get which.

The table lies at a fixed address, and adapters are read by the addresses in it: a recorded graph runs any adapters of
the same `BranchShape`. `core.kernels.cuda.low_rank` has the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from core import transfers
from core.kernels.branches import BranchPart
from core.kernels.cuda import low_rank
from core.kernels.cuda.language import power
from core.kernels.cuda.low_rank import ENTRY, BranchShares, RowAdapters, Window
from core.ops.branches import LowRank, as_part
from core.ops.fused import FusedLayer

Uses = Sequence[Sequence[tuple["CudaBranches", float]]]
"""Of each row its adapters, in the order in which they are added, with their scales."""
FOLDS = True  # whether 8-bit products on Hopper add branches themselves
_LEAST_RANKS = 32  # that a shape has room for
_ALIGNED = 16  # bytes


class BranchShape(NamedTuple):
    """The key that fixes the launches of a batch's branches: adapters of a row, ranks of one in a layer, at most; and
    the layers, as a set of bits by their numbers, that have any.
    """

    uses: int
    ranks: int
    layers: int


class CudaBranches:
    """One adapter's branches, in one piece of the device's memory: a table of all layers, then their factors."""

    def __init__(self, layers: Mapping[int, low_rank.LayerFactors], count: int, device: torch.device) -> None:
        """`layers` by their numbers, of `count` that there are."""
        self.layers = sum(1 << number for number in layers)
        self.ranks = max((names.ranks for names in layers.values()), default=0)
        tensors, size = [], count * ENTRY * 8
        table = torch.zeros(count, ENTRY, dtype=torch.int64)
        for number, names in layers.items():
            for place, tensor in enumerate((names.down, names.up, names.spans)):
                table[number, place] = size
                tensors.append((size, tensor))
                size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
            table[number, ENTRY - 1] = names.ranks
        memory = transfers.allocated(size, device)
        table[:, : ENTRY - 1] += memory.data_ptr()
        host = torch.empty(size, dtype=torch.uint8)
        for at, tensor in [(0, table), *tensors]:
            host[at : at + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
        self._memory = transfers.filled(memory, host)

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    @property
    def size_bytes(self) -> int:
        return self._memory.nbytes


class AdaptableLayers:
    """The layers of a lowering that adapters may have a share in: those that exist when the first is packed."""

    def __init__(
        self, layers: Sequence[FusedLayer], model: nn.Module, scaled: Sequence[FusedLayer] | None = None
    ) -> None:
        """`scaled` are the same layers of another model, whose inputs have scales of their own; default: `layers`."""
        names = {module: name for name, module in model.named_modules()}
        self._layers = tuple(layers)
        self._names = [[names.get(module, "?") for module in layer.modules] for layer in layers]
        # All at once: each copy from the device waits for what is queued there.
        inverses = [layer.inverse for layer in (layers if scaled is None else scaled)]
        scales = [inverse.flatten() for inverse in inverses if inverse is not None]
        parts = iter(torch.cat(scales).cpu().split([len(each) for each in scales])) if scales else iter(())
        self._inverses = [None if inverse is None else next(parts) for inverse in inverses]

    def pack(self, factors: Mapping[str, LowRank]) -> CudaBranches:
        """An adapter by its layers' names. Raises ValueError, naming the layer, for a factor that fits none."""
        if unknown := sorted(factors.keys() - {name for names in self._names for name in names}):
            raise ValueError(f"layer {unknown[0]}: the kernels do not run it, and so no branch of it")
        packed = {
            number: self._packed(number, factors)
            for number, names in enumerate(self._names)
            if any(name in factors for name in names)
        }
        return CudaBranches(packed, len(self._layers), self._layers[0].weight.device)

    def _packed(self, number: int, factors: Mapping[str, LowRank]) -> low_rank.LayerFactors:
        layer, parts, start = self._layers[number], list[BranchPart](), 0
        for name, module in zip(self._names[number], layer.modules, strict=True):
            width = len(module.weight)
            if name in factors:
                try:
                    part = as_part(start, width, layer.taps**2, factors[name])
                    if part.down.shape[-1] != layer.channels:
                        raise ValueError(f"it reads {part.down.shape[-1]} channels, not {layer.channels}")
                except (ValueError, RuntimeError) as error:
                    raise ValueError(f"layer {name}: its branch does not fit: {error}") from error
                inverse = self._inverses[number]
                parts.append(part if inverse is None else part._replace(down=part.down / inverse))
            start += width
        return low_rank.pack(parts, start, layer.base, eight=layer.kind == torch.int8)


class CudaRowBranches:
    """The adapters of each row of a lowering's calls. Filled and read on the thread that computes."""

    def __init__(self, rows: int) -> None:
        """`rows` is the most images of a call."""
        self._rows = rows
        self.folds = FOLDS
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}  # by the adapters of a row; their addresses stay
        self._last: tuple[object, Uses] | None = None
        self._layers = 0  # that any adapter so far had
        self._now: tuple[BranchShape, RowAdapters] | None = None

    @property
    def shape(self) -> BranchShape | None:
        """The shape of the calls inside `adapted` or `like`; None outside, and for rows without any."""
        return None if self._now is None else self._now[0]

    @contextmanager
    def adapted(self, rows: Uses, device: torch.device) -> Iterator[None]:
        """Context: row i of every call gets the adapters `rows[i]`; those beyond get none."""
        rows = [[use for use in row if use[0].layers] for row in rows]
        if not any(rows):
            yield
            return
        adapters = [adapter for row in rows for adapter, _ in row]
        for adapter in adapters:
            self._layers |= adapter.layers
        ranks = max(_LEAST_RANKS, power(max(adapter.ranks for adapter in adapters)))
        shape = BranchShape(power(max(map(len, rows))), ranks, self._layers)
        key = tuple(tuple((id(adapter), scale) for adapter, scale in row) for row in rows)
        last = self._last  # another thread may clear it
        if last is None or last[0] != key:
            self._fill(shape.uses, rows, device)
            # The adapters are kept with the key, so that no other object can take over their identity.
            self._last = (key, rows)
        with self._within(shape):
            yield

    @contextmanager
    def like(self, shape: BranchShape, device: torch.device) -> Iterator[None]:
        """Context: calls are launched as for adapters of this shape, and no row has any."""
        self._last = None
        self._fill(shape.uses, [], device)
        with self._within(shape):
            yield

    def clear(self) -> None:
        """Let go of the last adapters. Thread-safe."""
        self._last = None

    @contextmanager
    def _within(self, shape: BranchShape) -> Iterator[None]:
        self._now = shape, RowAdapters(*self._tables[shape.uses], shape.ranks)
        try:
            yield
        finally:
            self._now = None

    @torch.inference_mode()
    def _fill(self, uses: int, rows: Uses, device: torch.device) -> None:
        if len(rows) > self._rows:
            raise ValueError(f"adapters of {len(rows)} rows, and there is room for {self._rows}")
        addresses = torch.zeros(self._rows, uses, dtype=torch.int64)
        scales = torch.zeros(self._rows, uses)
        for number, row in enumerate(rows):
            for place, (adapter, scale) in enumerate(row):
                addresses[number, place], scales[number, place] = adapter.address, scale
        if uses not in self._tables:
            self._tables[uses] = torch.zeros_like(addresses, device=device), torch.zeros_like(scales, device=device)
        for table, values in zip(self._tables[uses], (addresses, scales), strict=True):
            # Not from pageable memory: the host would wait for the steps that are queued.
            table.copy_(values.pin_memory() if table.is_cuda else values, non_blocking=True)

    def has(self, layer: FusedLayer) -> bool:
        """Return whether rows may have a share in this layer now."""
        return self._now is not None and bool(self._now[0].layers >> layer.number & 1)

    def shares(
        self, layer: FusedLayer, x: Tensor, window: Window, row_scale: Tensor | None = None
    ) -> BranchShares | None:
        """The shares that are added to the layer's result of x [B, H, W, C]; None if no row has one."""
        if not self.has(layer):
            return None
        assert self._now is not None
        self._check(x)
        return BranchShares(x, self._now[1], layer.number, window, row_scale, layer.base, self.folds).computed()

    def _check(self, x: Tensor) -> None:
        if len(x) > self._rows:
            raise ValueError(f"{len(x)} rows, and there is room for adapters of {self._rows}")
