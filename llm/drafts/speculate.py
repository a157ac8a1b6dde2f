"""Speculative decoding: guesses by a draft model or prompt lookup, their verification, and how many pay off.

The model verifies all guesses in one forward (Leviathan et al., 2023; Chen et al., 2023): answers have the same
distribution as without guesses, and greedy ones are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.sampling import sample

MOST = 8  # guesses at a time, made one after the other
MOST_AT_ONCE = 15  # of a block
MOST_OF_A_BLOCK = 63  # of the largest that is read
NO_TOKEN = -2  # equal to no token, nor to -1, which stands for logits that are not finite
USUAL = 0.7  # acceptance, before any is known
_NGRAMS = (3, 2)  # the longest match wins (prompt lookup decoding; Saxena, 2023)
_LEVELS = 32  # of acceptance, for the table of lengths
_RATE = 0.08  # learning rate of the acceptance


Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


class PromptLookup:
    """Finds earlier occurrences of a sequence's last tokens."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        """The number of tokens known."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for n in _NGRAMS:  # an n-gram ending here can be found only later
                if len(self._tokens) >= n:
                    self._after[tuple(self._tokens[-n:])] = len(self._tokens)
            self._tokens.append(token)

    def guess(self, limit: int) -> list[int]:
        """The tokens that followed the last ones at an earlier occurrence; fewer than `limit`, or none, if unknown."""
        for n in _NGRAMS:
            at = self._after.get(tuple(self._tokens[-n:])) if len(self._tokens) >= n else None
            if at is not None:
                return self._tokens[at : at + limit]
        return []


class AcceptanceRate:
    """The acceptance rate of guesses, learnt at `rate`."""

    def __init__(self, acceptance: float = USUAL, *, rate: float = _RATE) -> None:
        self.acceptance, self._rate = acceptance, rate

    def learn(self, guessed: int, accepted: int) -> None:
        """Observe that the first `accepted` of so many guesses were right; those after a wrong one tell nothing."""
        for _ in range(accepted):
            self.acceptance += self._rate * (1 - self.acceptance)
        if accepted < guessed:
            self.acceptance -= self._rate * self.acceptance


class ForwardTimes:
    """The shortest measured seconds of a forward by its rows: the shape of the cost, whatever the machine's load is.
    Linear between measured numbers of rows, and beyond them. No forward takes longer than one of more rows.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> bool:
        """Record a measurement; returns whether it is the shortest, which alone counts: noise only adds."""
        if shortest := seconds < self._seconds.get(rows, np.inf):
            self._seconds[rows] = seconds
        return shortest

    def __len__(self) -> int:
        return len(self._seconds)

    def __call__(self, rows: Floats) -> Floats:
        known = sorted(self._seconds)
        seconds = np.minimum.accumulate([self._seconds[count] for count in known[::-1]])[::-1]
        slope = (seconds[-1] - seconds[0]) / max(1, known[-1] - known[0])  # of all, since costs rise in steps
        result: Floats = np.interp(rows, known, seconds) + slope * np.maximum(0, rows - known[-1])
        return result


class DraftLengths:
    """The number of guesses that maximizes tokens per second, by acceptance.

    With acceptance a, k guesses yield (1 − a^(k+1)) / (1 − a) tokens (Leviathan et al., 2023, equation 1).
    """

    def __init__(self, seconds: Floats) -> None:
        """`seconds` of an iteration with 0, 1, … guesses for every sequence: made and verified."""
        a = np.linspace(0, 0.99, _LEVELS)[:, None]
        k = np.arange(len(seconds))
        self._best = ((1 - a ** (k + 1)) / (1 - a) / seconds).argmax(1)

    def __call__(self, acceptance: float) -> int:
        return int(self._best[round(min(acceptance, 0.99) / 0.99 * (_LEVELS - 1))])


@dataclass(frozen=True, eq=False)
class DraftTokens:
    """`tokens` k, and the distributions they were drawn from: [k, V], or None for deterministic guesses."""

    tokens: list[int]
    q: Tensor | None = None

    @classmethod
    def on_device(cls, count: int) -> DraftTokens:
        """So many guesses that only the device knows, as `llm.backends.step_graphs` reads them."""
        return cls([*range(-2, -2 - count, -1)])

    @property
    def known(self) -> bool:
        """Return whether the host knows them."""
        return not self.tokens or self.tokens[0] >= 0


NO_GUESS = DraftTokens([])


def agreeing(guesses: Tensor, best: Tensor) -> Tensor:
    """How many of each answer's guesses [n, k] precede the first that is not the most likely token: int64 [n].

    What `agreed` counts on the host, on the device.
    """
    return (guesses == best).long().cumprod(1).sum(1)


def agreed(guesses: Sequence[int], best: Sequence[int]) -> list[int]:
    """A greedy answer's next tokens: the guesses up to the first wrong one, then the model's own token.

    `best` [k + 1] are the most likely tokens at the places of the k guesses and after them.
    """
    if not guesses:
        return [best[0]]
    count = next((j for j, guess in enumerate(guesses) if best[j] != guess), len(guesses))
    return [*guesses[:count], best[count]]


def accepted(
    p: Tensor,
    firsts: Sequence[int],
    guesses: Sequence[DraftTokens],
    settings: sample.SamplingSettings,
    index: sample.Counts,
) -> list[list[int]]:
    """Each sampled answer's next tokens, by rejection sampling (Chen et al., 2023, algorithm 2). All rows at once.

    p [rows, V] are normalized distributions: those of request r at rows firsts[r] … firsts[r] + k_r, for its k_r
    guesses and the token after them. `settings` and `index` [R] are of requests and of their next token.
    """
    counts = [len(guess.tokens) for guess in guesses]
    rows = [first + j for first, count in zip(firsts, counts, strict=True) for j in range(count)]
    mask = np.zeros(0, bool)
    if rows:
        tokens = [token for guess in guesses for token in guess.tokens]
        owner = np.repeat(np.arange(len(guesses)), counts)
        offset = np.concatenate([np.arange(count) for count in counts])
        u = sample.uniform(settings.seeds[owner], index[owner] + offset, sample.ACCEPT)
        likely = p[rows, tokens].double().cpu()
        proposed = torch.cat([_proposed(guess) for guess in guesses]).double().cpu()
        mask = (u * proposed < likely).numpy()
    ends, finals, start = [], [], 0
    for first, count, guess in zip(firsts, counts, guesses, strict=True):
        wrong = np.flatnonzero(~mask[start : start + count])
        count_kept = int(wrong[0]) if len(wrong) else count
        finals.append(_left(p[first + count_kept], guess, count_kept))
        ends.append(count_kept)
        start += count
    u = sample.uniform(settings.seeds, index + np.array(ends, np.int64), sample.TOKEN)
    last = sample.draw(torch.stack(finals), u).tolist()
    return [[*guess.tokens[:end], token] for guess, end, token in zip(guesses, ends, last, strict=True)]


def _proposed(guess: DraftTokens) -> Tensor:
    """The proposal probability of each guess where it was drawn, [k]."""
    if guess.q is None:
        return torch.ones(len(guess.tokens))
    return guess.q.gather(1, torch.tensor(guess.tokens, device=guess.q.device)[:, None])[:, 0]


def _left(p: Tensor, guess: DraftTokens, place: int) -> Tensor:
    """The distribution of the token after the last accepted guess, [V]: p minus the rejected guess's proposal."""
    if place == len(guess.tokens):
        return p
    if guess.q is None:
        left = p.clone()
        left[guess.tokens[place]] = 0
    else:
        left = (p - guess.q[place]).clamp_min(0)
    return left if bool(left.sum() > 0) else p  # equal up to rounding: nothing is ever rejected there
