"""The KV cache's memory: pages for all layers, in floats, int8 or E4M3, and the page tables of sequences.

`llm.cache.pages` allocates pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from core.kernels.cuda.quantize import max_level, to_levels

Kind = Literal["float", "int8", "fp8"]
PAGE = 16  # tokens of a page: one channel of its keys fills one vector register of a CPU


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """The tokens of one forward, of any sequences at any positions: rows of one matrix.

    Rows of one sequence are adjacent, at increasing positions; each attends to its sequence up to itself.
    """

    tokens: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    sequences: Tensor  # int32 [T], rows of the cache's table
    output_rows: Tensor  # int32 [L]: the rows whose logits are wanted
    state_rows: Tensor | None = None  # int32 [S]: those whose hidden states are wanted
    adapters: Sequence[Any] | None = None  # of each row, None for none, as packed for what runs them; None: of no row
    logits: bool = True  # False: of the output rows only the most likely tokens are wanted

    @classmethod
    def of(
        cls,
        tokens: list[int],
        positions: list[int],
        sequences: list[int],
        output_rows: list[int],
        state_rows: list[int] | None = None,
    ) -> TokenBatch:
        columns = [tokens, positions, sequences, output_rows, *([state_rows] if state_rows else [])]
        tensors: list[Any] = [torch.from_numpy(np.asarray(column, np.int32)) for column in columns]
        return cls(*tensors)

    def to(self, device: torch.device) -> TokenBatch:
        """The same on a device, copied without waiting."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: x.to(device, non_blocking=True) for name, x in columns.items() if isinstance(x, Tensor)
        }
        return replace(self, **moved)


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` copied to a device; to a GPU without waiting for what runs there."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def quantize_kv(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x [..., d] to int8 or E4M3 and an fp32 scale [...]: one for each token and head, by its largest magnitude."""
    scale = x.float().abs().amax(-1) / max_level(dtype)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return to_levels((x.float() / scale[..., None]).nan_to_num(0), dtype), scale


class KVCache:
    """Keys [layers, pages, kv_heads, d, 16] and values [layers, pages, kv_heads, 16, d]; on a GPU [..., 16, d] and
    [..., d, 16].

    On a CPU a vector register then holds one channel of a page's tokens. A GPU's tensor cores need the summed dimension
    contiguous (channels of keys, tokens of values), since bytes are not transposed while loading. `table` [sequences,
    pages of one] is what readers use; its rows are written by `place`.
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
        companion: KVCache | None = None,
        turned: bool | None = None,
    ) -> None:
        """Allocate room for `sequences` sequences of at most `context` tokens at once.

        `companion`: the cache whose table it shares. `turned`: the GPU layout; default: by device.
        """
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.turned = torch.device(device).type != "cpu" if turned is None else turned
        storage_dtype = {"float": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind]
        # Zeros, not uninitialized memory: a page is read by whole vectors, also where no token was written yet.
        page = (PAGE, head_dim) if self.turned else (head_dim, PAGE)
        self.keys = torch.zeros(layers, pages, kv_heads, *page, dtype=storage_dtype, device=device)
        self.values = torch.zeros(layers, pages, kv_heads, *reversed(page), dtype=storage_dtype, device=device)
        self.key_scales = self.value_scales = None
        if kind != "float":
            self.key_scales = torch.ones(layers, pages, kv_heads, PAGE, device=device)
            self.value_scales = torch.ones_like(self.key_scales)
        self.table = torch.zeros(sequences, -(-context // PAGE), dtype=torch.int32, device=device)
        self._placed: deque[tuple[int, int, list[int]]] = deque()
        self._copies: deque[tuple[int, int]] = deque()
        self.mirror: deque[tuple[int, int, list[int]]] | None = None  # receives what is placed, for other ranks
        if companion is not None:
            self.table, self._placed = companion.table, companion._placed
        self.dtype = dtype

    @property
    def size_bytes(self) -> int:
        scales = (self.key_scales, self.value_scales)
        return self.keys.nbytes + self.values.nbytes + sum(s.nbytes for s in scales if s is not None)

    @property
    def largest(self) -> float:
        """The largest value that is kept, whose multiples by scales are finite too."""
        return torch.finfo(self.dtype).max / 2

    @property
    def top(self) -> float:
        """The largest level of keys and values that have scales; 0 without scales."""
        return 0.0 if self.key_scales is None else max_level(self.keys.dtype)

    def layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """One layer's keys, values and their scales."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys[layer], self.values[layer], None, None
        return self.keys[layer], self.values[layer], self.key_scales[layer], self.value_scales[layer]

    def place(self, sequence: int, pages: list[int], start: int = 0) -> None:
        """Set the pages of a sequence from page number `start` on.

        On a GPU readers see it after the next `settle`: the caller runs beside the forwards, on no stream.
        """
        if self.mirror is not None:
            self.mirror.append((sequence, start, list(pages)))
        if self.table.device.type != "cpu":
            self._placed.append((sequence, start, list(pages)))
            return
        self.table[sequence, start : start + len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of all layers at the next `settle`, before which nothing is written to it."""
        self._copies.append((source, target))

    def settle(self) -> None:
        """Copy pages, and write the placed ones into the table, in order, on the current stream."""
        targets: dict[int, int] = {}
        while self._copies:
            source, target = self._copies.popleft()
            targets[target] = source
        if targets:
            self._copy(on_device(torch.tensor([[*targets.values()], [*targets]]), self.table.device))
        width = self.table.shape[1]
        counts: dict[int, int] = {}
        while self._placed:
            sequence, start, pages = self._placed.popleft()
            counts.update(zip(range(sequence * width + start, (sequence + 1) * width), pages, strict=False))
        if counts:
            both = on_device(torch.from_numpy(np.array([[*counts], [*counts.values()]], np.int32)), self.table.device)
            self.table.view(-1)[both[0].long()] = both[1]

    @torch.inference_mode()
    def _copy(self, pages: Tensor) -> None:
        """Copy pages [2, n]: sources, which are all read first, and targets."""
        plain = torch.uint8 if self.keys.itemsize == 1 else self.keys.dtype  # indexing does not support E4M3
        for held in (self.keys.view(plain), self.values.view(plain), self.key_scales, self.value_scales):
            if held is not None:
                held[:, pages[1]] = held[:, pages[0]]

    def write(self, layer: int, keys: Tensor, values: Tensor, step: TokenBatch) -> None:
        """Write keys and values [T, kv_heads, d] of a step's tokens into their pages.

        Of values, what is not finite becomes a large number: readers multiply by 0 what others left in a page.
        """
        at, within = self._at(step)
        values = values.where(values.abs() <= self.largest, self.largest)
        if self.key_scales is not None and self.value_scales is not None:
            keys, scale = quantize_kv(keys, self.keys.dtype)
            self.key_scales[layer][at, :, within] = scale
            values, scale = quantize_kv(values, self.keys.dtype)
            self.value_scales[layer][at, :, within] = scale
        # 8-bit ones as bytes: indexing does not support E4M3.
        held_keys, held_values = self._pages(layer)
        held_keys[at, :, :, within] = keys.to(self.keys.dtype).view(held_keys.dtype)
        held_values[at, :, within] = values.to(self.keys.dtype).view(held_keys.dtype)

    def read(self, layer: int, sequences: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [S, kv_heads, L, d] of the first `counts` [S] tokens of these sequences, by whole pages: keys
        behind them are zeros, which a mask is added to.
        """
        at = self.table[sequences, : -(-int(counts.max()) // PAGE)].long()  # [S, P]
        # [S, P, kv_heads, d, 16], [S, P, kv_heads, 16, d]
        keys, values = (pages[at].view(self.keys.dtype) for pages in self._pages(layer))
        if self.key_scales is not None and self.value_scales is not None:
            keys = keys.float() * self.key_scales[layer][at][:, :, :, None]
            values = values.float() * self.value_scales[layer][at][..., None]
        keys, values = keys.permute(0, 2, 1, 4, 3).flatten(2, 3), values.transpose(1, 2).flatten(2, 3)
        behind = torch.arange(keys.shape[2], device=counts.device) >= counts[:, None]
        keys = keys.masked_fill(behind[:, None, :, None], 0)
        return keys.to(self.dtype), values.to(self.dtype)

    def _pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys by channel and values by token, in either layout; E4M3 as bytes."""
        plain = torch.uint8 if self.keys.dtype == torch.float8_e4m3fn else self.keys.dtype
        keys, values = self.keys[layer].view(plain), self.values[layer].view(plain)
        return (keys.mT, values.mT) if self.turned else (keys, values)

    def _at(self, step: TokenBatch) -> tuple[Tensor, Tensor]:
        positions = step.positions.long()
        return self.table[step.sequences.long(), positions // PAGE].long(), positions % PAGE
