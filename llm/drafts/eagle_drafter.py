"""Drafts token by token by an EAGLE-3 head (`llm.drafts.eagle`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.kernels.kv_cache import Kind
from llm.backends.backend import TextBackend
from llm.checkpoints.load import TextModel, TextModelError
from llm.drafts import eagle
from llm.drafts.draft_forwards import Columns, Forwards, forwards
from llm.drafts.draft_graphs import Unread
from llm.drafts.drafter import DraftRequest, companion_cache
from llm.drafts.eagle import EagleDecoder, EagleNetwork
from llm.drafts.feature_drafter import FeatureDrafter
from llm.drafts.speculate import MOST

_COST = 0.12  # of a guess relative to a forward, where load may not decide
_GRAPHED = 8  # sequences at most: more of them are not guessed for on a GPU, or rarely


@dataclass(frozen=True, eq=False)
class EagleDraft:
    """The weights of an `EagleDrafter`."""

    name: str
    network: EagleNetwork
    lookahead = 1

    @classmethod
    def read(cls, folder: Path, model: TextModel) -> EagleDraft:
        """Read a published checkpoint for a model. Raises `TextModelError` for one that does not fit it."""
        return cls(folder.resolve().name, eagle.load(folder, model))

    @property
    def features(self) -> tuple[int, ...]:
        return self.network.sources

    def __call__(
        self, backend: TextBackend, *, pages: int, sequences: int, context: int, rows: int, kv: Kind,
        kernels: ctypes.CDLL | None,
    ) -> EagleDrafter:  # fmt: skip
        """Make the drafter; see `DrafterFactory`."""
        cache = companion_cache(
            self.name, backend, self.network.config, layers=1, head_dim=self.network.midlayer.self_attn.head_dim,
            pages=pages, sequences=sequences, context=context, kv=kv,
        )  # fmt: skip
        make = partial(EagleDecoder.of, self.network, backend.model.network.get_input_embeddings())
        try:
            runs, decoder = forwards(backend, self.network, cache, make)
            return EagleDrafter(self, decoder, runs, backend)
        except ValueError as error:
            raise TextModelError(f"draft {self.name}: {error}") from error


class EagleDrafter(FeatureDrafter):
    """Guesses a chain: each token the most likely one after those before it."""

    lookahead, at_once, most, cost = 1, False, MOST, _COST

    def __init__(self, draft: EagleDraft, decoder: EagleDecoder, runs: Forwards, backend: TextBackend) -> None:
        """Raises ValueError for layers that the kernels do not support."""
        network = draft.network
        self._words = torch.arange(len(network.d2t), device=network.d2t.device) + network.d2t
        self._project = lambda ops, x, tokens, rows, ends: (ops.linear(x, decoder.fc),)
        self._states = lambda ops, x, tokens, rows, ends: (eagle.draft(ops, decoder, tokens, x, rows),)
        self._logits = lambda ops, x, tokens, rows, ends: (eagle.logits(ops, decoder, x),)
        self._next = partial(_next, decoder)
        runs.pack(self._project, network.fc.in_features)
        runs.pack(self._next, network.fc.out_features)
        counts = range(1, MOST + 1)
        super().__init__(draft.features, runs, backend, counts=counts, reaches=(), sequences=_GRAPHED)

    def prepare(self, sequences: int) -> None:
        """Capture what one user needs."""
        super().prepare(1)

    def _read(self, requests: Sequence[DraftRequest]) -> None:
        self._computed(*self._unread(requests))

    def _eager(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        features, columns = self._unread(requests)
        last: Any = slice(-1, None)  # of one sequence nothing is gathered
        if len(requests) > 1:
            last = (np.cumsum([r.stop - r.read for r in requests]) - 1).tolist()
        x, columns = self._computed(features, columns)[last].clone(), columns[:, last].clone()
        drafts: list[list[int]] = [[] for _ in requests]
        live = [*range(len(requests))]
        (logits,) = self._forwards(self._logits, x, stream=True)
        for turn in range(1, max(r.count for r in requests) + 1):
            tokens = self._words[logits.argmax(-1)]
            for i, token in zip(live, tokens.tolist(), strict=True):
                drafts[i].append(token)
            left = [place for place, i in enumerate(live) if requests[i].count > turn]
            if not left:
                break
            columns[0] = tokens
            columns[1] += 1
            if len(left) < len(live):
                live, x, columns = [live[place] for place in left], x[left], columns[:, left]
            x, logits = self._forwards(self._next, x, columns, stream=True)
            x = x.clone()
        return drafts

    def _walk(self, features: Tensor, unread: Unread, count: int) -> Tensor:
        states = self._computed(features, (unread.tokens, unread.positions, unread.sequences))
        n = len(unread.counts)
        last = torch.arange(0, len(states), len(states) // n, device=states.device) + unread.unread - 1
        x, positions, sequences = states[last], unread.positions[last], unread.sequences[last]
        (logits,) = self._forwards(self._logits, x, stream=True)
        drafts = [self._words[logits.argmax(-1)]]
        for turn in range(1, count):
            positions = torch.where(turn < unread.counts, positions + 1, -1)
            x, logits = self._forwards(self._next, x, (drafts[-1].int(), positions, sequences), stream=True)
            drafts.append(self._words[logits.argmax(-1)])
        return torch.stack(drafts)

    def _computed(self, features: Tensor, columns: Columns) -> Tensor:
        """States [R, C] after unread positions and the tokens behind them."""
        (x,) = self._forwards(self._project, features)
        (states,) = self._forwards(self._states, x.clone(), columns, stream=True)
        return states


def _next(decoder: EagleDecoder, ops: Any, x: Any, tokens: Any, rows: Any, ends: Any) -> tuple[Any, Any]:
    """States of the tokens that follow states x, and the logits of what follows these."""
    states = eagle.draft(ops, decoder, tokens, x, rows)
    return states, eagle.logits(ops, decoder, states)
