"""A step of text as values: the shares that sequences have in it, the rows of its forward, and each share's result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor

from core.kernels.kv_cache import TokenBatch
from llm.drafts.speculate import NO_GUESS, DraftTokens
from llm.features.pooling import PooledStates
from llm.parameters import Logprob
from llm.sampling.pending import PendingToken
from llm.sequence import SequenceState

_NO_READERS: Mapping[str, Reader] = MappingProxyType({})


class Share(NamedTuple):
    """A sequence's share of a step: `length` of its tokens from `start` on, then guesses.

    The first one may be its pending token. `length` 0: its last token is only waited for.
    """

    sequence: SequenceState
    start: int
    length: int
    last: bool  # whether its tokens end with this, so that the next one is chosen
    guess: DraftTokens = NO_GUESS

    @property
    def rows(self) -> int:
        """The number of its rows in the forward."""
        return self.length + len(self.guess.tokens)

    def among(self, positions: range) -> range:
        """Return those of a sequence's positions that are among the share's tokens."""
        start, stop = max(self.start, positions.start), min(self.start + self.length, positions.stop)
        return range(start, max(start, stop))


@dataclass(slots=True, eq=False)
class StepResult:
    """The results of one share, which the step fills in before it hands them over.

    `tokens` are the next ones, None where there are none. They are empty where the mask of a grammar was late: the
    share is to be run again. Of an answer that runs ahead they are those of the step before, and this one's is
    `pending`.
    """

    tokens: Sequence[int] | None = None
    logprobs: Sequence[Logprob] = ()  # of these
    error: BaseException | None = None  # why the share has no results
    pending: PendingToken | None = None
    scores: Sequence[Logprob] = ()  # of the prompt's tokens
    pooled: PooledStates | None = None  # of an embedded prompt, with what was pooled before
    features: Tensor | None = None  # of positions that the drafter is yet to read
    # Guesses that the device makes for the next step, with which the drafter reads what this one computes.
    next_guesses: int | None = None
    accepted: int = 0  # right guesses, which the tokens begin with

    @property
    def late(self) -> bool:
        """Return whether the share is to be run again."""
        return self.tokens is not None and not self.tokens


@dataclass(slots=True, eq=False)
class Output:
    """The rows of the logits of a share's next tokens: from `first` on, one more than it has guesses."""

    sequence: SequenceState
    start: int  # of the share
    guess: DraftTokens
    first: int
    result: StepResult

    @property
    def plain(self) -> bool:
        """Return whether greedy decoding without adjustments suffices."""
        return self.sequence.plain and not self.guess.tokens

    @property
    def position(self) -> int:
        """The position of its next token: that after the pending one, if there is one."""
        return len(self.sequence.tokens) + (self.sequence.pending is not None)

    @property
    def rows(self) -> range:
        """The rows of the logits of its next tokens."""
        return range(self.first, self.first + len(self.guess.tokens) + 1)


class Reader(Protocol):
    """A reader of a forward: it wants the logits, or the hidden states, at some of a share's positions."""

    reads_states: bool  # else logits

    def places(self, share: Share) -> range:
        """Return the positions, all among the share's tokens, in order."""
        ...

    def fill(self, share: Share, result: StepResult, x: Tensor) -> None:
        """Fill in the result from finite logits [n, V], or states [n, C] in fp32 on the host, at these positions."""
        ...


class Reading(NamedTuple):
    """A reader's rows among the logits, or the states, of a forward."""

    reader: Reader
    share: Share
    result: StepResult
    rows: slice


class Step(NamedTuple):
    """One forward's tokens, and the shares that want something of it."""

    tokens: TokenBatch
    sampled: list[Output]  # shares that want a next token
    logits: list[Reading]
    states: list[Reading]

    @classmethod
    def of(
        cls, shares: Sequence[Share], results: Sequence[StepResult], readers: Mapping[str, Reader] = _NO_READERS
    ) -> Step:
        """Collect shares as one step, which fills in their results. `readers` are by names that sequences use."""
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        output_rows: list[int] = []
        state_rows: list[int] = []
        sampled: list[Output] = []
        readings: tuple[list[Reading], list[Reading]] = [], []  # of logits and of states
        plain = True  # the most likely tokens suffice
        for share, result in zip(shares, results, strict=True):
            sequence, start, length, last, guess = share
            pending = sequence.pending
            if length == 1 and not guess.tokens:  # most of hundreds
                tokens.append(sequence.tokens[start] if pending is None else pending.token)
                positions.append(start)
                sequences.append(sequence.row)
                if pending is not None:  # it decodes
                    plain = plain and sequence.plain
                    sampled.append(Output(sequence, start, guess, len(output_rows), result))
                    output_rows.append(len(tokens) - 1)
                    continue
            else:
                rows = length + len(guess.tokens)
                tokens += sequence.tokens[start : start + length]
                tokens += guess.tokens
                positions += range(start, start + rows)
                sequences += [sequence.row] * rows
            zero = len(tokens) - len(guess.tokens) - length - start  # position 0's row
            for name in sequence.uses:
                if (reader := readers.get(name)) is not None and (places := reader.places(share)):
                    rows_of = state_rows if reader.reads_states else output_rows
                    rows_read = slice(len(rows_of), len(rows_of) + len(places))
                    readings[reader.reads_states].append(Reading(reader, share, result, rows_read))
                    rows_of += range(zero + places.start, zero + places.stop)
            if last and sequence.parameters.max_tokens:
                plain = plain and sequence.plain and not guess.tokens
                sampled.append(Output(sequence, start, guess, len(output_rows), result))
                output_rows += range(len(tokens) - 1 - len(guess.tokens), len(tokens))
        batch = TokenBatch.of(tokens, positions, sequences, output_rows, state_rows)
        if any(share.sequence.adapter is not None for share in shares):
            packed = [None if s.sequence.adapter is None else s.sequence.adapter.packed for s in shares]
            adapters = [own for own, share in zip(packed, shares, strict=True) for _ in range(share.rows)]
            batch = replace(batch, adapters=adapters)
        if plain and not readings[0]:
            batch = replace(batch, logits=False)
        return cls(batch, sampled, *readings)
