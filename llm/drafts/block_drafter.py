"""Drafts blocks of tokens by DFlash (`llm.drafts.dflash`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from core.kernels.kv_cache import Kind
from core.ops.ops import bind
from llm.backends.backend import TextBackend
from llm.backends.step_graphs import REACHES
from llm.checkpoints.load import TextModel, TextModelError
from llm.drafts import dflash
from llm.drafts.dflash import BlockDecoder, Checkpoint
from llm.drafts.draft_forwards import Forwards, forwards
from llm.drafts.draft_graphs import Unread
from llm.drafts.drafter import DraftRequest, companion_cache
from llm.drafts.feature_drafter import FeatureDrafter

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
        self, backend: TextBackend, *, pages: int, sequences: int, context: int, rows: int, kv: Kind,
        kernels: ctypes.CDLL | None,
    ) -> BlockDrafter:  # fmt: skip
        """Make the drafter; see `DrafterFactory`."""
        network, target = self.checkpoint.network, backend.model.network
        cache = companion_cache(
            self.name, backend, network.config, layers=network.config.num_hidden_layers,
            head_dim=network.config.head_dim, pages=pages, sequences=sequences, context=context, kv=kv,
        )  # fmt: skip
        make = partial(BlockDecoder.of, network, target.get_input_embeddings(), target.get_output_embeddings())
        try:
            runs, decoder = forwards(backend, network, cache, make)
            return BlockDrafter(self, decoder, runs, backend, sequences)
        except ValueError as error:
            raise TextModelError(f"draft {self.name}: {error}") from error


class BlockDrafter(FeatureDrafter):
    """Guesses a block in one forward."""

    lookahead, at_once, cost = 0, True, _COST

    def __init__(
        self, draft: BlockDraft, decoder: BlockDecoder, runs: Forwards, backend: TextBackend, sequences: int
    ) -> None:
        """Raises ValueError for layers that the kernels do not support."""
        self.most, self._mask = draft.checkpoint.block - 1, draft.checkpoint.mask
        read, block = bind(dflash.read, decoder), bind(dflash.draft, decoder)
        self._context = lambda ops, x, tokens, rows, ends: (read(ops, x, rows),)[:0]
        self._block = lambda ops, x, tokens, rows, ends: (block(ops, tokens, rows, ends),)
        runs.pack(self._context, int(decoder.fc.in_features))
        runs.pack(self._block, None)
        super().__init__(
            draft.features, runs, backend, counts=[self.most], reaches=REACHES, sequences=sequences
        )  # fmt: skip

    def _read(self, requests: Sequence[DraftRequest]) -> None:
        self._forwards(self._context, *self._unread(requests))

    def _eager(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        if unread := [r for r in requests if r.stop > r.read]:
            self._read(unread)
        blocks: tuple[list[int], ...] = ([], [], [], [])
        for r in requests:
            end, rows = r.stop + r.count, r.count + 1
            columns = [r.tokens[r.stop], *[self._mask] * r.count], range(r.stop, end + 1), [r.row] * rows, [end] * rows
            for column, own in zip(blocks, columns, strict=True):
                column += own
        (logits,) = self._forwards(self._block, None, self._columns(blocks))
        tokens = iter(logits.argmax(-1).tolist())
        return [[*islice(tokens, r.count + 1)][1:] for r in requests]

    def _walk(self, features: Tensor, unread: Unread, count: int) -> Tensor:
        n = len(unread.owners)
        self._forwards(self._context, features, (unread.tokens, unread.positions, unread.sequences))
        sequences = unread.sequences.view(n, -1)
        places = torch.arange(sequences.shape[1], dtype=torch.int32, device=features.device)
        counts = unread.counts[:, None]
        inside = (places <= counts) & (counts > 0)
        columns = (
            torch.where(places == 0, unread.token[:, None], self._mask),
            torch.where(inside, unread.stop[:, None] + places, -1),
            sequences,
            torch.where(inside, (unread.stop + unread.counts)[:, None], -1),
        )
        (logits,) = self._forwards(self._block, None, [column.reshape(-1) for column in columns])
        return logits.argmax(-1).view(n, -1)[:, 1 : count + 1].T
