"""Keeps a bounded sample of the rows that layers read while a model runs, on which scales are searched."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROWS = 512  # of each layer: for SDXL 0.8 GB in 16 bits
_STEPS, _CALLS = 1 << 16, 1 << 8  # more than there are: numbers of batches, steps and calls make one seed


@dataclass
class Samples:
    """Up to `count` rows [n, K] that each of these layers read, a uniform sample of all, in the input's own type.

    Bottom-k sampling: each row gets a pseudorandom key of its batch, step, call and position, and the rows with the
    smallest keys are kept. So the sample is the same whether or not the run was interrupted.
    """

    layers: Collection[str]
    count: int = ROWS
    rows: dict[str, Tensor] = field(default_factory=dict)  # [n, K], on the host
    keys: dict[str, Tensor] = field(default_factory=dict)  # fp64 [n], ascending

    def pick(self, layer: str, x: Tensor, place: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """Select the rows [n, K] of an input x [..., K], and their keys [n], that `add` may keep.

        `place` is the number of the batch, the step, and the call within both.
        """
        batch, step, call = place
        generator = torch.Generator().manual_seed((batch * _STEPS + step) * _CALLS + call)
        flat = x.detach().flatten(0, -2)
        keys = torch.rand(len(flat), generator=generator, dtype=torch.float64)
        if len(flat) > self.count:
            keys, smallest = keys.topk(self.count, largest=False)
            flat = flat[smallest.to(flat.device)]
        present = self.keys.get(layer)
        if present is not None and len(present) == self.count:
            near = keys < present[-1]
            keys, flat = keys[near], flat[near.to(flat.device)]
        return flat.cpu().clone(), keys

    def add(self, layer: str, rows: Tensor, keys: Tensor) -> None:
        """Keep those of `rows` [n, K] whose `keys` [n] are among the smallest so far."""
        if layer in self.rows:
            rows, keys = torch.cat([self.rows[layer], rows]), torch.cat([self.keys[layer], keys])
        order = keys.argsort(stable=True)[: self.count]
        self.rows[layer], self.keys[layer] = rows[order], keys[order]

    def fit(self, ranges: Mapping[str, Tensor]) -> bool:
        """Return whether rows and keys fit one another, and layers whose inputs have these ranges [steps, K]."""
        return self.rows.keys() == self.keys.keys() <= ranges.keys() and all(
            rows.shape == (len(self.keys[name]), ranges[name].shape[-1]) for name, rows in self.rows.items()
        )
