"""Low-rank branches of a product as they come, before the kernels of a device pack them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class BranchPart(NamedTuple):
    """A branch of the columns from `start` on: `down` fp32 [rank, taps, channels], `up` fp32 [columns, rank]."""

    start: int
    down: Tensor
    up: Tensor

    @property
    def end(self) -> int:
        return self.start + self.up.shape[0]


def aligned(parts: Sequence[BranchPart], columns: int, multiple: int) -> Sequence[BranchPart]:
    """The parts, if no vector of so many columns has columns of two; else one part of all `columns` in their place.

    Its `up` is zero where a part has no share. Its `down` is not to be read.
    """
    if all(part.start % multiple == 0 and (part.end % multiple == 0 or part.end == columns) for part in parts):
        return parts
    up = torch.zeros(columns, sum(part.up.shape[1] for part in parts))
    rank = 0
    for part in parts:
        up[part.start : part.end, rank : rank + part.up.shape[1]] = part.up
        rank += part.up.shape[1]
    return [BranchPart(0, parts[0].down, up)]
