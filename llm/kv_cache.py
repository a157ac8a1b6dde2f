"""The memory of keys and values: pages for all layers, in floats, int8 or E4M3, and the tables that say whose they are.

Knows tensors and page numbers; who holds which page is kept by `llm.pages`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from core.quant.kernels.cuda.quantize import to_levels, top
from llm.pages import PAGE

Kind = Literal["float", "int8", "fp8"]


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


def quantize_kv(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x [..., d] to int8 or E4M3 and an fp32 scale [...]: one for each token and head, by its largest magnitude."""
    scale = x.float().abs().amax(-1) / top(dtype)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return to_levels(x.float() / scale[..., None], dtype), scale


class KVCache:
    """Keys [layers, pages, kv_heads, d, 16] and values [layers, pages, kv_heads, 16, d]; on a GPU [..., 16, d] and
    [..., d, 16].

    A vector of a processor then holds one channel of a page's tokens. What a GPU's tensor cores sum over, channels of
    keys and tokens of values, wants to lie side by side instead: bytes are not turned round on their way there.
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
        beside: KVCache | None = None,
        turned: bool | None = None,
    ) -> None:
        """`sequences` of at most `context` tokens may be in the cache at once. `beside`: whose table it shares.

        `turned`: as on a GPU; by default as the device wants it.
        """
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.turned = torch.device(device).type != "cpu" if turned is None else turned
        held = {"float": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind]
        # Zeros, not whatever memory held: a page is read by whole vectors, also where no token was written yet.
        page = (PAGE, head_dim) if self.turned else (head_dim, PAGE)
        self.keys = torch.zeros(layers, pages, kv_heads, *page, dtype=held, device=device)
        self.values = torch.zeros(layers, pages, kv_heads, *reversed(page), dtype=held, device=device)
        self.key_scales = self.value_scales = None
        if kind != "float":
            self.key_scales = torch.ones(layers, pages, kv_heads, PAGE, device=device)
            self.value_scales = torch.ones_like(self.key_scales)
        self.table = torch.zeros(sequences, -(-context // PAGE), dtype=torch.int32, device=device)
        self._placed: deque[tuple[int, int, list[int]]] = deque()
        if beside is not None:
            self.table, self._placed = beside.table, beside._placed
        self.dtype = dtype

    @property
    def size_bytes(self) -> int:
        scales = (self.key_scales, self.value_scales)
        return self.keys.nbytes + self.values.nbytes + sum(s.nbytes for s in scales if s is not None)

    @property
    def top(self) -> float:
        """The largest level of keys and values that have scales; 0 of those that have none."""
        return 0.0 if self.key_scales is None else top(self.keys.dtype)

    def layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """One layer's keys, values and their scales."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys[layer], self.values[layer], None, None
        return self.keys[layer], self.values[layer], self.key_scales[layer], self.value_scales[layer]

    def place(self, sequence: int, pages: list[int], start: int = 0) -> None:
        """Say that the pages of a sequence from the one of number `start` on are these.

        On a GPU readers know it after the next `settle`: whoever places runs beside the forwards, on no stream.
        """
        if self.table.device.type != "cpu":
            self._placed.append((sequence, start, list(pages)))
            return
        self.table[sequence, start : start + len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def settle(self) -> None:
        """Write what was placed into the table, in order, on the current stream."""
        width = self.table.shape[1]
        found: dict[int, int] = {}
        while self._placed:
            sequence, start, pages = self._placed.popleft()
            found.update(zip(range(sequence * width + start, (sequence + 1) * width), pages, strict=False))
        if found:
            both = torch.from_numpy(np.array([[*found], [*found.values()]], np.int32)).to(self.table.device)
            self.table.view(-1)[both[0].long()] = both[1]

    def write(self, layer: int, keys: Tensor, values: Tensor, step: Step) -> None:
        """Put keys and values [T, kv_heads, d] of a step's tokens into their pages."""
        at, within = self._at(step)
        if self.key_scales is not None and self.value_scales is not None:
            keys, scale = quantize_kv(keys, self.keys.dtype)
            self.key_scales[layer][at, :, within] = scale
            values, scale = quantize_kv(values, self.keys.dtype)
            self.value_scales[layer][at, :, within] = scale
        # As bytes where they are of one: indexing knows no E4M3.
        held_keys, held_values = self._pages(layer)
        held_keys[at, :, :, within] = keys.to(self.keys.dtype).view(held_keys.dtype)
        held_values[at, :, within] = values.to(self.keys.dtype).view(held_keys.dtype)

    def read(self, layer: int, sequences: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, kv_heads, L, d] of the first L tokens of these sequences; L is `tokens` or a few more."""
        at = self.table[sequences, : -(-tokens // PAGE)].long()  # [S, P]
        # [S, P, kv_heads, d, 16], [S, P, kv_heads, 16, d]
        keys, values = (pages[at].view(self.keys.dtype) for pages in self._pages(layer))
        if self.key_scales is not None and self.value_scales is not None:
            keys = keys.float() * self.key_scales[layer][at][:, :, :, None]
            values = values.float() * self.value_scales[layer][at][..., None]
        keys, values = keys.permute(0, 2, 1, 4, 3).flatten(2, 3), values.transpose(1, 2).flatten(2, 3)
        return keys.to(self.dtype), values.to(self.dtype)

    def _pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys by channel and values by token, however they lie; E4M3 as bytes."""
        plain = torch.uint8 if self.keys.dtype == torch.float8_e4m3fn else self.keys.dtype
        keys, values = self.keys[layer].view(plain), self.values[layer].view(plain)
        return (keys.mT, values.mT) if self.turned else (keys, values)

    def _at(self, step: Step) -> tuple[Tensor, Tensor]:
        positions = step.positions.long()
        return self.table[step.sequences.long(), positions // PAGE].long(), positions % PAGE
