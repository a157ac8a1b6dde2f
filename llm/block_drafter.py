"""Drafts blocks of tokens by DFlash (`llm.dflash`), behind the protocol of `llm.drafts`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from core.kernels.kv_cache import Kind, KVCache
from llm import block_runs, dflash
from llm.block_runs import Blocks
from llm.dflash import Checkpoint
from llm.drafts import DraftRequest, companion_cache
from llm.execution import TextExecution
from llm.load import TextModel, TextModelError
from llm.sequence import SequenceState
from llm.speculate import NO_GUESS, DraftTokens

_COST = 0.4  # of its forward relative to the model's, where load may not decide


@dataclass(frozen=True, eq=False)
class BlockDraft:
    """The weights of a `BlockDrafter`."""

    name: str
    checkpoint: Checkpoint
    lookahead = 0

    @classmethod
    def read(cls, folder: Path, model: TextModel) -> BlockDraft:
        """Read a published checkpoint for a model. Raises `TextModelError` for one that does not fit it."""
        return cls(folder.resolve().name, dflash.load(folder, model))

    @property
    def features(self) -> tuple[int, ...]:
        """The layers whose inputs it reads: those behind the ones whose outputs it was trained on."""
        return tuple(source + 1 for source in self.checkpoint.network.sources)

    def __call__(
        self, execution: TextExecution, *, pages: int, sequences: int, context: int, rows: int, kv: Kind,
        kernels: ctypes.CDLL | None,
    ) -> BlockDrafter:  # fmt: skip
        """Make the drafter; see `DrafterFactory`."""
        config = self.checkpoint.network.config
        cache = companion_cache(
            self.name, execution, config, layers=config.num_hidden_layers, head_dim=config.head_dim, pages=pages,
            sequences=sequences, context=context, kv=kv,
        )  # fmt: skip
        try:
            blocks = block_runs.of(self.checkpoint, execution, cache, sequences)
        except ValueError as error:
            raise TextModelError(f"draft {self.name}: {error}") from error
        return BlockDrafter(self, cache, blocks)


class BlockDrafter:
    """A `llm.drafts.Drafter` that guesses a block in one forward.

    Each guess is the most likely token of its place: a distribution of one token, which rejection sampling makes exact.
    """

    lookahead, reads, at_once, cost = 0, True, True, _COST

    def __init__(self, draft: BlockDraft, cache: KVCache, blocks: Blocks) -> None:
        self.features, self.prepare = draft.features, blocks.prepare
        self.most, self._mask = draft.checkpoint.block - 1, draft.checkpoint.mask
        self._cache, self._blocks = cache, blocks

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights and of its cache."""
        return self._blocks.size_bytes + self._cache.size_bytes

    def release(self) -> None:
        """Free duplicate weights."""
        self._blocks.release()

    def limit(self, work: SequenceState, count: int) -> int:
        return min(count, self.most)

    def kept(self, count: int, accepted: int) -> int:
        """None: keys and values of a block are those of masks."""
        return 0

    def guess(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        unread = [r for r in requests if r.stop > r.read]
        features = [r.features for r in unread if r.features is not None]
        positions = [n for r in unread for n in range(r.read, r.stop)]
        context = np.array([positions, [r.row for r in unread for _ in range(r.read, r.stop)]], np.int32)
        blocks: tuple[list[int], ...] = ([], [], [], [])
        tokens, places, ends, rows = blocks
        counts = [min(request.count, self.most) for request in requests]
        for request, count in zip(requests, counts, strict=True):
            if count:
                end = request.stop + count
                tokens += [request.tokens[request.stop], *[self._mask] * count]
                places += range(request.stop, end + 1)
                ends += [end] * (count + 1)
                rows += [request.row] * (count + 1)
        self._cache.settle()
        best = iter(self._blocks(features, context, np.array(blocks, np.int32)))
        return [DraftTokens([*islice(best, count + 1)][1:]) if count else NO_GUESS for count in counts]
