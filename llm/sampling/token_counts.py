"""Counts the tokens of sequences on the model's device, for penalties: nothing waits for the device or the host."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from core.kernels.kv_cache import on_device
from llm.parts import ScheduledTokens
from llm.sequence import SequenceState

_PROMPT, _ANSWER = 1, 2  # a token's entry: whether it is in the prompt, and twice the times it is in the answer


class TokenCounts:
    """A table int32 [rows, V] of the sequences that are penalized, by their row in the cache's table.

    It has the tokens that the host knows: an iteration that is thrown away leaves no trace.
    """

    def __init__(self, vocabulary: int, device: torch.device, *, rows: int = 1) -> None:
        """`rows` are the most that the table comes to have."""
        self._vocabulary, self._rows_at_most = vocabulary, rows
        self._table = torch.zeros(0, vocabulary, dtype=torch.int32, device=device)
        # By row: whose tokens, and how many of them. An answer that has ended leaves memory.
        self._counted: dict[int, tuple[weakref.ref[SequenceState], int]] = {}

    def seen(self, parts: Sequence[ScheduledTokens]) -> tuple[Tensor, Tensor]:
        """The tokens in prompt and answer, bool [n, V], and their occurrences in the answer, int32 [n, V], for each
        part's next token: its pending one counts too.
        """
        self._grow(1 + max(part.work.row for part in parts))
        self._update(parts)
        entries = self._table[self._rows([part.work.row for part in parts])]
        pending = [(i, part.work) for i, part in enumerate(parts) if part.work.pending is not None]
        if pending:
            places = self._rows([i * self._vocabulary for i, _ in pending])
            _add_(entries, places + self._tokens([work for _, work in pending]), _ANSWER)
        return entries > 0, entries // _ANSWER

    def _update(self, parts: Sequence[ScheduledTokens]) -> None:
        """Count the tokens that have become known since a part's sequence was counted last."""
        new: list[int] = []
        prompts: list[int] = []
        answers: list[int] = []
        for work in (part.work for part in parts):
            owner, count = self._counted.get(work.row, (lambda: None, 0))
            start = work.row * self._vocabulary
            if owner() is not work:
                new.append(work.row)
                prompts += [start + token for token in work.tokens[: work.prompt]]
                count = work.prompt
            answers += [start + token for token in work.tokens[count:]]
        if new:
            self._table.index_fill_(0, self._rows(new), 0)
            self._table.view(-1).index_fill_(0, self._rows(prompts), _PROMPT)
        if answers:
            _add_(self._table, self._rows(answers), _ANSWER)
        self._counted.update((part.work.row, (weakref.ref(part.work), len(part.work.tokens))) for part in parts)

    def _tokens(self, works: Sequence[SequenceState]) -> Tensor:
        """Their pending tokens [n], of which some only the device knows; 0 where there is none."""
        steps = [(work.pending, work.pending_row) for work in works]
        tokens = self._rows([0 if pending is None else max(0, pending.at(row)) for pending, row in steps])
        for step in {pending for pending, _ in steps if pending is not None and pending.known is None}:
            places, rows = zip(*((i, row) for i, (pending, row) in enumerate(steps) if pending is step), strict=True)
            tokens[self._rows(places)] = step.on_device[self._rows(rows)].clamp_(min=0)
        return tokens

    def _grow(self, rows: int) -> None:
        if rows > len(self._table):
            table = self._table.new_zeros(max(rows, min(2 * rows, self._rows_at_most)), self._vocabulary)
            table[: len(self._table)] = self._table
            self._table = table

    def _rows(self, values: Sequence[int]) -> Tensor:
        return on_device(torch.tensor(values), self._table.device)


def table_bytes(rows: int, vocabulary: int) -> int:
    """The memory that a table of so many rows comes to take."""
    return 4 * rows * vocabulary


def _add_(table: Tensor, places: Tensor, amount: int) -> None:
    """Add at these places of the flattened table, of which some may be equal."""
    table.view(-1).index_add_(0, places, torch.full_like(places, amount, dtype=table.dtype))
