"""The memory of keys and values: pages for all layers, in floats or in int8, and the tables that say whose they are.

Knows tensors and page numbers; who holds which page is kept by `llm.pages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from llm.pages import PAGE

Kind = Literal["float", "int8"]


@dataclass(frozen=True, eq=False)
class Step:
    """The tokens of one forward, of any sequences at any positions: rows of one matrix.

    Rows of one sequence lie side by side, at positions that count up; each sees its sequence up to itself.
    """

    tokens: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    sequences: Tensor  # int32 [T], rows of the cache's table
    picked: Tensor  # int32 [L]: the rows whose logits are wanted

    @classmethod
    def of(cls, tokens: list[int], positions: list[int], sequences: list[int], picked: list[int]) -> Step:
        columns = (tokens, positions, sequences, picked)
        return cls(*(torch.from_numpy(np.asarray(column, np.int32)) for column in columns))


def quantize_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] to int8 and an fp32 scale [...]: one for each token and head, by its largest magnitude."""
    scale = x.float().abs().amax(-1) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (x.float() / scale[..., None]).round().to(torch.int8), scale


class KVCache:
    """Keys [layers, pages, kv_heads, d, 16] and values [layers, pages, kv_heads, 16, d].

    Keys lie by channel, so that a vector of a processor, or a tile of a GPU, holds one channel of a page's tokens.
    `table` [sequences, pages of one] is what readers follow; its rows are written by `place`.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        sequences: int,
        context: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kind: Kind = "float",
        table: Tensor | None = None,
    ) -> None:
        """`sequences` of at most `context` tokens may be in the cache at once. `table` is another cache's, to share."""
        held = torch.int8 if kind == "int8" else dtype
        # Zeros, not whatever memory held: a page is read by whole vectors, also where no token was written yet.
        self.keys = torch.zeros(layers, pages, kv_heads, head_dim, PAGE, dtype=held, device=device)
        self.values = torch.zeros(layers, pages, kv_heads, PAGE, head_dim, dtype=held, device=device)
        self.key_scales = self.value_scales = None
        if kind == "int8":
            self.key_scales = torch.ones(layers, pages, kv_heads, PAGE, device=device)
            self.value_scales = torch.ones_like(self.key_scales)
        self.table = torch.zeros(sequences, -(-context // PAGE), dtype=torch.int32, device=device)
        if table is not None:
            self.table = table
        self.dtype = dtype

    @property
    def size_bytes(self) -> int:
        scales = (self.key_scales, self.value_scales)
        return self.keys.nbytes + self.values.nbytes + sum(s.nbytes for s in scales if s is not None)

    def place(self, sequence: int, pages: list[int], start: int = 0) -> None:
        """Say that the pages of a sequence from the one of number `start` on are these."""
        self.table[sequence, start : start + len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def write(self, layer: int, keys: Tensor, values: Tensor, step: Step) -> None:
        """Put keys and values [T, kv_heads, d] of a step's tokens into their pages."""
        at, within = self._at(step)
        if self.key_scales is not None and self.value_scales is not None:
            keys, scale = quantize_kv(keys)
            self.key_scales[layer][at, :, within] = scale
            values, scale = quantize_kv(values)
            self.value_scales[layer][at, :, within] = scale
        self.keys[layer][at, :, :, within] = keys
        self.values[layer][at, :, within] = values

    def read(self, layer: int, sequences: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, kv_heads, L, d] of the first L tokens of these sequences; L is `tokens` or a few more."""
        at = self.table[sequences, : -(-tokens // PAGE)].long()  # [S, P]
        keys, values = self.keys[layer][at], self.values[layer][at]  # [S, P, kv_heads, d, 16], [S, P, kv_heads, 16, d]
        if self.key_scales is not None and self.value_scales is not None:
            keys = keys * self.key_scales[layer][at][:, :, :, None]
            values = values * self.value_scales[layer][at][..., None]
        keys, values = keys.permute(0, 2, 1, 4, 3).flatten(2, 3), values.transpose(1, 2).flatten(2, 3)
        return keys.to(self.dtype), values.to(self.dtype)

    def _at(self, step: Step) -> tuple[Tensor, Tensor]:
        positions = step.positions.long()
        return self.table[step.sequences.long(), positions // PAGE].long(), positions % PAGE
