"""A copy of a model's denoiser and text encoders over the same weights, in which each row applies its own LoRAs.

A forward adds scale · up(down(x)) to every layer that a row's LoRA contains, for that row only, as Punica (Chen et al.,
2023) and S-LoRA (Sheng et al., 2023) do; nothing is merged and no weight is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from core.ops.branches import LowRank, branch
from pipeline.extensions.adapters import ScaledAdapter
from pipeline.families.family import ImageModel

Owners = Sequence[tuple[ScaledAdapter, ...]]
"""The LoRAs that each row of a forward gets; rows beyond these get none."""
At = tuple[str, str]  # a part and the name of a layer in it


class _Share(NamedTuple):
    """One LoRA's contribution to some rows."""

    rows: slice | Tensor  # [n]
    scale: float | Tensor  # [n]
    factors: Mapping[At, LowRank]


_Table = dict[At, list[tuple[_Share, LowRank]]]


class AdaptedModel:
    """For one thread at a time. Its modules equal the model's, except inside `rows`."""

    def __init__(self, model: ImageModel, *, denoiser: bool = True) -> None:
        """`denoiser` False: the text encoders alone, where a backend's kernels apply the rest."""
        adapted = (part for part in model.family.adapters.parts if denoiser or part != model.family.denoiser)
        twins = {part: _twin(model.parts[part]) for part in adapted}
        self.model = model.with_parts(**twins)
        self.parts = tuple(twins)
        self._now: _Table = {}
        self._last: tuple[object, Owners, _Table] | None = None
        for part, module in twins.items():
            for name, layer in module.named_modules():
                if isinstance(layer, (nn.Linear, nn.Conv2d)):
                    layer.register_forward_hook(partial(self._add, (part, name)))

    @contextmanager
    def rows(self, owners: Owners, *, apart: bool = False) -> Iterator[None]:
        """Context: row i of every forward gets the LoRAs `owners[i]`.

        `apart` computes the addition for one row at a time, so that its bits depend on nothing but the row.
        """
        key = (apart, tuple(tuple((id(use.factors), use.scale) for use in uses) for uses in owners))
        last = self._last  # another thread may clear it
        if last is None or last[0] != key:
            shares = _each(owners) if apart else _together(owners, self.model.device, self.model.dtype)
            # The owners are kept with the result, so that no other object can take over their identity.
            last = self._last = (key, owners, _by_layer(shares))
        self._now = last[2]
        try:
            yield
        finally:
            self._now = {}

    @contextmanager
    def every(self, uses: tuple[ScaledAdapter, ...]) -> Iterator[None]:
        """Context: all rows of every forward get these LoRAs."""
        self._now = _by_layer([_Share(slice(None), use.scale, use.factors) for use in uses])
        try:
            yield
        finally:
            self._now = {}

    def clear_cache(self) -> None:
        """Drop the last rows' LoRAs. Thread-safe."""
        self._last = None

    def _add(self, at: At, layer: Any, given: tuple[Tensor, ...], output: Tensor) -> None:
        """A layer's forward hook: `output` [B, …] is its output for the input `given` [B, …]."""
        for share, factor in self._now.get(at, ()):
            x = given[0][share.rows]
            scale = factor.scale * share.scale
            if isinstance(scale, Tensor):
                scale = scale.view(-1, *[1] * (x.dim() - 1))
            delta = branch(layer, x, factor, scale)
            if isinstance(share.rows, slice):
                output[share.rows] += delta
            else:
                output.index_add_(0, share.rows, delta)


def _by_layer(shares: Sequence[_Share]) -> _Table:
    table: _Table = {}
    for share in shares:
        for at, factor in share.factors.items():
            table.setdefault(at, []).append((share, factor))
    return table


def _each(owners: Owners) -> list[_Share]:
    """Make one share per row and LoRA, in the order of the row's own."""
    return [_Share(slice(i, i + 1), use.scale, use.factors) for i, uses in enumerate(owners) for use in uses]


def _together(owners: Owners, device: torch.device, dtype: torch.dtype) -> list[_Share]:
    """Make one share per LoRA, with all rows that use it: the fewest products."""
    groups: dict[int, list[tuple[int, ScaledAdapter]]] = {}
    for row, uses in enumerate(owners):
        for use in uses:
            groups.setdefault(id(use.factors), []).append((row, use))
    shares = []
    for entries in groups.values():
        numbers, scales = [row for row, _ in entries], [use.scale for _, use in entries]
        first, end = numbers[0], numbers[-1] + 1
        whole = end - first == len(numbers)
        rows = slice(first, end) if whole else torch.tensor(numbers, device=device)
        scale = scales[0] if len({*scales}) == 1 else torch.tensor(scales, device=device, dtype=dtype)
        shares.append(_Share(rows, scale, entries[0][1].factors))
    return shares


def _twin(module: Any) -> Any:
    """A copy of the module that shares the original's parameters and buffers."""
    shared = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    return copy.deepcopy(module, shared)
