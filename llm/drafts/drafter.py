"""The interface of what guesses the next tokens of sequences, and its two simplest forms: a smaller model, and look-up.

A drafter's keys and values lie in pages with the numbers of the model's: so its state of a sequence is shared, evicted
and freed with the sequence's pages, and made anew when a preempted sequence is read again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from core.kernels.kv_cache import Kind, KVCache, TokenBatch
from llm.backends.backend import TextBackend
from llm.checkpoints.load import TextModelError
from llm.drafts.draft_graphs import DraftGraphs
from llm.drafts.speculate import MOST, NO_GUESS, DraftTokens, PromptLookup
from llm.sampling import sample
from llm.sequence import SequenceState


@dataclass(frozen=True, eq=False)
class DraftRequest:
    """A sequence to read and to guess on.

    The drafter reads the positions from `read` to `stop`, all of which the model has read: of these it gets the
    `features` [stop - read, layers · C], as many layers side by side as it names. What follows position `stop - 1` are
    `tokens[stop:]`, of which there is one where guesses are wanted, and with a `Drafter.lookahead` at least as many.
    """

    row: int  # of the cache's table
    tokens: Sequence[int]
    read: int
    stop: int
    count: int  # of tokens to guess at most; 0: only read
    settings: sample.RowSettings | None  # of one row; None is greedy
    features: Tensor | None = None
    own: Any = None  # `SequenceState.own`


class Drafter(Protocol):
    """Guesses the tokens that the model verifies in its next forward. Called by the thread that runs the model.

    What it guesses must depend on the request alone, whatever else is read or guessed with it.
    """

    graphs: DraftGraphs | None  # which guess on the device, before the host knows which of the last guesses were right

    @property
    def features(self) -> tuple[int, ...]:
        """The layers whose inputs it reads, the model's residual stream; none: it reads tokens."""
        ...

    @property
    def lookahead(self) -> int:
        """How many tokens behind a position its state of that position depends on."""
        ...

    @property
    def reads(self) -> bool:
        """Whether it keeps a state of what it has read, in pages."""
        ...

    @property
    def most(self) -> int:
        """How many guesses it makes at most."""
        ...

    @property
    def at_once(self) -> bool:
        """Whether it makes all guesses of a sequence in one forward of its own."""
        ...

    @property
    def cost(self) -> float:
        """What a guess, or that forward, takes relative to the model's, where measured times may not decide."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights and of its cache."""
        ...

    def limit(self, work: SequenceState, count: int) -> int:
        """How many tokens it will guess if asked for `count`, as far as it knows. On the engine's thread."""
        ...

    def guess(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        """Read and guess for all of them at once, each at most `count` tokens, which the device alone may know."""
        ...

    def kept(self, count: int, accepted: int) -> int:
        """The positions from `stop` on that need not be read: of `count` guesses the first `accepted` were right."""
        ...

    def prepare(self, sequences: int) -> None:
        """Compile and capture what is needed to guess for so many sequences."""
        ...

    def release(self) -> None:
        """Free duplicate weights."""
        ...


class DrafterFactory(Protocol):
    """The weights of a drafter, which it is made of once its model's memory exists."""

    @property
    def name(self) -> str: ...

    @property
    def features(self) -> tuple[int, ...]:
        """Return the drafter's."""
        ...

    @property
    def lookahead(self) -> int:
        """Return the drafter's."""
        ...

    def __call__(
        self, backend: TextBackend, *, pages: int, sequences: int, context: int, rows: int, kv: Kind,
        kernels: ctypes.CDLL | None,
    ) -> Drafter:  # fmt: skip
        """Make it for the model of `backend`, whose size the other arguments are. Raises `TextModelError` for a
        model that it does not fit.
        """
        ...


def companion_cache(
    name: str, backend: TextBackend, config: Any, *, layers: int, head_dim: int, pages: int, sequences: int,
    context: int, kv: Kind,
) -> KVCache:  # fmt: skip
    """Make the cache of a drafter's own layers, whose table is the model's. Raises `TextModelError`, naming the draft,
    for one whose `config` has a shorter context.
    """
    model = backend.model
    if config.max_position_embeddings < context:
        raise TextModelError(
            f"draft {name}: has a context of {config.max_position_embeddings}, and {model.name} of {context}"
        )
    return KVCache(
        layers=layers, kv_heads=config.num_key_value_heads, head_dim=head_dim, pages=pages, sequences=sequences,
        context=context, dtype=backend.cache.dtype, device=model.device, kind=kv, companion=backend.cache,
    )  # fmt: skip


class LookupDrafter:
    """Guesses what followed the last tokens at their previous occurrence (`PromptLookup`)."""

    features: tuple[int, ...] = ()
    reads, at_once, most, lookahead, cost, size_bytes = False, False, MOST, 0, 0.05, 0
    graphs: DraftGraphs | None = None

    def limit(self, work: SequenceState, count: int) -> int:
        lookup: PromptLookup = work.own or PromptLookup()
        work.own = lookup
        lookup.extend(work.tokens[len(lookup) :])
        return len(lookup.guess(min(count, MOST)))

    def guess(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        return [DraftTokens(r.own.guess(r.count)) if r.count else NO_GUESS for r in requests]

    def kept(self, count: int, accepted: int) -> int:
        return 0

    def prepare(self, sequences: int) -> None:
        """Nothing to prepare."""

    def release(self) -> None:
        """Nothing to free."""


class ModelDrafter:
    """A smaller model of the same vocabulary, which guesses token by token."""

    features: tuple[int, ...] = ()
    reads, at_once, most, lookahead, cost = True, False, MOST, 0, 0.12
    graphs: DraftGraphs | None = None

    def __init__(self, backend: TextBackend) -> None:
        self._backend = backend
        self.prepare, self.release = backend.prepare, backend.release

    @property
    def size_bytes(self) -> int:
        return self._backend.size_bytes

    def limit(self, work: SequenceState, count: int) -> int:
        return min(count, MOST)

    def kept(self, count: int, accepted: int) -> int:
        return 1 + min(accepted, count - 1) if count else 0  # it has read the last token, and all guesses but one

    def guess(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        """Run as many forwards as the longest has guesses."""
        drafts: list[list[int]] = [[] for _ in requests]
        probabilities: list[list[Tensor]] = [[] for _ in requests]
        if any(not request.count for request in requests):
            self._backend.forward(self._step([r for r in requests if not r.count], None))
        for turn in range(max((request.count for request in requests), default=0)):
            live = [i for i, request in enumerate(requests) if request.count > turn]
            logits = self._backend.forward(self._step([requests[i] for i in live], [drafts[i] for i in live])).logits
            best = logits.argmax(-1).tolist()
            sampled: list[tuple[int, int, sample.RowSettings]] = []
            for place, i in enumerate(live):
                if (settings := requests[i].settings) is None:
                    drafts[i].append(best[place])
                else:
                    sampled.append((place, i, settings))
            if sampled:
                places, owners, each = zip(*sampled, strict=True)
                index = np.array([len(requests[i].tokens) + turn for i in owners], np.int64)
                for i, token, q in zip(owners, *_drawn(logits[list(places)], each, index), strict=True):
                    drafts[i].append(token)
                    probabilities[i].append(q)
        return [
            DraftTokens(tokens, torch.stack(q) if q else None) for tokens, q in zip(drafts, probabilities, strict=True)
        ]

    @staticmethod
    def _step(requests: Sequence[DraftRequest], drafts: Sequence[list[int]] | None) -> TokenBatch:
        """The tokens that it has not read yet, of each; the first time at least a sequence's last token. None: those
        that the model has read, without output.
        """
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        output_rows: list[int] = []
        for i, request in enumerate(requests):
            guessed = [] if drafts is None else drafts[i]
            stop = request.stop if drafts is None else len(request.tokens) + len(guessed)
            new = [guessed[-1]] if guessed else list(request.tokens[request.read : stop])
            tokens += new
            positions += range(stop - len(new), stop)
            sequences += [request.row] * len(new)
            output_rows.append(len(tokens) - 1)
        return TokenBatch.of(tokens, positions, sequences, [] if drafts is None else output_rows)


def _drawn(logits: Tensor, each: Sequence[sample.RowSettings], index: sample.Counts) -> tuple[list[int], Tensor]:
    """A guess for each row of logits, and the normalized distributions that these were drawn from."""
    settings = sample.gathered(list(each))
    p = sample.probabilities(logits, settings)
    p /= p.sum(-1, keepdim=True)
    tokens: list[int] = sample.draw(p, sample.uniform(settings.seeds, index, sample.DRAFT)).tolist()
    return tokens, p
