"""Counts the tokens of sequences on the model's device, for penalties: nothing waits for the device or the host."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from core.kernels.kv_cache import on_device
from llm.sampling.pending import PendingToken
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

    def seen(self, sequences: Sequence[SequenceState]) -> tuple[Tensor, Tensor]:
        """The tokens in prompt and answer, bool [n, V], and their occurrences in the answer, int32 [n, V], for each
        sequence's next token: its pending one counts too.
        """
        self._grow(1 + max(sequence.row for sequence in sequences))
        self._update(sequences)
        entries = self._table[self._rows([sequence.row for sequence in sequences])]
        if pending := [(i, token) for i, sequence in enumerate(sequences) if (token := sequence.pending) is not None]:
            places = self._rows([i * self._vocabulary for i, _ in pending])
            _add_(entries, places + self._tokens([token for _, token in pending]), _ANSWER)
        return entries > 0, entries // _ANSWER

    def _update(self, sequences: Sequence[SequenceState]) -> None:
        """Count the tokens that have become known since a sequence was counted last."""
        new: list[int] = []
        prompts: list[int] = []
        answers: list[int] = []
        for sequence in sequences:
            owner, count = self._counted.get(sequence.row, (lambda: None, 0))
            start = sequence.row * self._vocabulary
            if owner() is not sequence:
                new.append(sequence.row)
                prompts += [start + token for token in sequence.tokens[: sequence.prompt]]
                count = sequence.prompt
            answers += [start + token for token in sequence.tokens[count:]]
        if new:
            self._table.index_fill_(0, self._rows(new), 0)
            self._table.view(-1).index_fill_(0, self._rows(prompts), _PROMPT)
        if answers:
            _add_(self._table, self._rows(answers), _ANSWER)
        self._counted.update((each.row, (weakref.ref(each), len(each.tokens))) for each in sequences)

    def _tokens(self, pending: Sequence[PendingToken]) -> Tensor:
        """Pending tokens [n], of which some only the device knows."""
        tokens = self._rows([max(0, each.token) for each in pending])
        for step in {each.step for each in pending if each.step.known is None}:
            places, rows = zip(*((i, each.row) for i, each in enumerate(pending) if each.step is step), strict=True)
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
