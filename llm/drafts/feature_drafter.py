"""The base of drafters that read the model's hidden states (`eagle_drafter`, `block_drafter`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from core.kernels.kv_cache import on_device
from llm.backends.backend import TextBackend
from llm.drafts.draft_forwards import Forwards, FusedForwards
from llm.drafts.draft_graphs import DraftGraphs, Unread
from llm.drafts.drafter import DraftRequest
from llm.drafts.speculate import NO_GUESS, DraftTokens
from llm.sequence import SequenceState


class FeatureDrafter(ABC):
    """A `Drafter` whose guesses are the most likely tokens: distributions of one token each, which rejection sampling
    makes exact.
    """

    reads = True
    lookahead: int
    most: int

    def __init__(
        self, features: tuple[int, ...], forwards: Forwards, backend: TextBackend, *, counts: Sequence[int],
        reaches: Sequence[int], sequences: int,
    ) -> None:  # fmt: skip
        """The last arguments are of graphs: see `DraftGraphs`."""
        self.features, self._forwards, self.release = features, forwards, forwards.release
        self.graphs: DraftGraphs | None = None
        if isinstance(forwards, FusedForwards) and backend.step_graphs is not None:
            self.graphs = DraftGraphs(
                self._walk, forwards, backend.step_graphs, width=self.most + 1, counts=counts, reaches=reaches,
                sequences=sequences,
            )  # fmt: skip

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights, of its cache, and of its graphs."""
        graphs = 0 if self.graphs is None else self.graphs.size_bytes
        return self._forwards.size_bytes + self._forwards.cache.size_bytes + graphs

    def limit(self, work: SequenceState, count: int) -> int:
        return min(count, self.most)

    def kept(self, count: int, accepted: int) -> int:
        """None: keys and values of guesses are of guessed states, or of masks."""
        return 0

    def prepare(self, sequences: int) -> None:
        """Capture graphs."""
        if self.graphs is not None:
            self.graphs.prepare(sequences)

    @torch.inference_mode()
    def guess(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        self._forwards.cache.settle()
        if reading := [r for r in requests if not r.count and r.stop > r.read]:
            self._forwards.reach(max(r.stop for r in reading))
            self._read(reading)
        guessing = {i: r for i, r in enumerate(requests) if r.count and (r.stop > r.read or not self.lookahead)}
        drafts = dict(zip(guessing, self._guesses([*guessing.values()]) if guessing else (), strict=True))
        return [drafts.get(i, DraftTokens([]) if r.count else NO_GUESS) for i, r in enumerate(requests)]

    def _guesses(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        reach = max(r.stop + r.count for r in requests) + 1
        if self.graphs is not None:
            columns = [np.array([r.tokens[r.read + 1 : r.stop + 1], range(r.read, r.stop)], np.int32) for r in requests]
            ends = [(r.row, r.count, r.stop - r.read, r.tokens[r.stop], r.stop) for r in requests]
            if self.graphs([r.features for r in requests], columns, np.array(ends, np.int32).T, reach):
                return [DraftTokens.on_device(r.count) for r in requests]
        self._forwards.reach(reach)
        return [DraftTokens(tokens) for tokens in self._eager(requests)]

    @abstractmethod
    def _read(self, requests: Sequence[DraftRequest]) -> object:
        """Read the requests' positions."""

    @abstractmethod
    def _eager(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Read the requests' positions, if there are any, and guess."""

    @abstractmethod
    def _walk(self, features: Tensor, unread: Unread, count: int) -> Tensor:
        """The same on the device: `count` guesses of n sequences, int64 [count, n]."""

    def _unread(self, requests: Sequence[DraftRequest]) -> tuple[Tensor, Tensor]:
        """The features of the positions [R, F], and the next token, position and sequence of each, int32 [3, R]."""
        features = [r.features for r in requests if r.features is not None and r.stop > r.read]
        columns: list[list[int]] = [
            [token for r in requests for token in r.tokens[r.read + 1 : r.stop + 1]],
            [position for r in requests for position in range(r.read, r.stop)],
            [r.row for r in requests for _ in range(r.read, r.stop)],
        ]
        columns[0] += [0] * (len(columns[1]) - len(columns[0]))  # where none is needed
        return features[0] if len(features) == 1 else torch.cat(features), self._columns(columns)

    def _columns(self, columns: Sequence[Sequence[int]]) -> Tensor:
        return on_device(torch.from_numpy(np.array(columns, np.int32)), self._forwards.device)
