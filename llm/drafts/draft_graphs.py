"""A drafter's guesses in CUDA graphs. They begin with what the host staged; or with what a forward of the model has
verified, before the host knows it: then the next guesses are made while the host takes in the last ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.cuda_graphs import CudaRecorder
from core.kernels.cuda.decode_kernel import part_count
from core.kernels.kv_cache import PAGE
from llm.backends.step_graphs import BUCKETS, Array, StepGraphs, bucket, recorder, rung, stage
from llm.drafts.draft_forwards import FusedForwards
from llm.drafts.speculate import agreeing

log = logging.getLogger(__name__)


class Verified(NamedTuple):
    """A sequence whose guesses a forward of the model verifies, as the host knows it before it has ended."""

    row: int  # of the cache's table
    first_row: int  # of the forward's rows: that of the last token before the guesses
    first_output: int  # of the forward's logits
    position: int  # of the first row
    guesses: int
    next_guesses: int  # that are to be made next


class Unread(NamedTuple):
    """The positions that a drafter is yet to read, on its device, all int32; and what it is to guess.

    Each of n sequences has as many rows of the columns [R], of which those at position -1 are nobody's.
    """

    tokens: Tensor  # those that follow the positions
    positions: Tensor
    sequences: Tensor
    owners: Tensor  # [n]: columns of `StepGraphs.guesses`
    counts: Tensor  # [n]: of guesses that are wanted; 0: none
    unread: Tensor  # [n]: of the rows
    token: Tensor  # [n]: the last one, which guesses follow
    stop: Tensor  # [n]: its position


class DraftGraphs:
    """Graphs by the number of sequences and of guesses, and by the reach of attention. Called by one thread."""

    def __init__(
        self, walk: Callable[[Tensor, Unread, int], Tensor], forwards: FusedForwards, steps: StepGraphs, *,
        width: int, counts: Sequence[int], reaches: Sequence[int], sequences: int,
    ) -> None:  # fmt: skip
        """`walk(features [R, F], unread, k)` gives the guesses [k, n]. `steps` are those of the model. A sequence has
        up to `width` rows; `counts` are the numbers of guesses, and `reaches` those of parts, that there are graphs
        for.
        """
        self._walk, self._forwards, self._steps = walk, forwards, steps
        self._width, self._counts = -(-width // 4) * 4, sorted(counts)  # aligned as kernels want
        most, largest = rung(part_count(forwards.cache.table.shape[1] * PAGE)), bucket(sequences) or BUCKETS[-1]
        self._reaches = [parts for parts in reaches if parts < most] + [most]
        self._sizes = [size for size in BUCKETS if size <= largest]
        self._device, rows = forwards.device, largest * self._width
        self._inputs = torch.zeros(6 * rows + 5 * largest, dtype=torch.int32, device=self._device)
        self._places = torch.arange(self._width, device=self._device)
        self._features = torch.zeros(rows, steps.captured.shape[1], dtype=steps.captured.dtype, device=self._device)
        self._accepted = torch.zeros(largest, dtype=torch.int64, device=self._device)
        self._graphs: dict[tuple[int, ...], Callable[[], object]] = {}
        self._recorder: CudaRecorder | None = None

    @property
    def captured(self) -> Tensor:
        """The features of a forward's rows that guesses may begin with."""
        return self._steps.captured

    @property
    def size_bytes(self) -> int:
        """Bytes of inputs and of what was captured."""
        own = self._inputs.nbytes + self._features.nbytes + self._accepted.nbytes + self._places.nbytes
        return own + (0 if self._recorder is None else self._recorder.size_bytes)

    def prepare(self, sequences: int) -> None:
        """Capture what so many sequences need; the largest first, whose memory the others share."""
        for size in reversed([size for size in self._sizes if size <= (bucket(sequences) or BUCKETS[-1])]):
            for count in reversed(self._counts):
                for parts in self._reaches:
                    self._graph(size, count, parts)
            self._graph(size)
        if self._recorder is not None:
            self._recorder.settle()

    def __call__(self, features: Sequence[Tensor | None], columns: Sequence[Array], ends: Array, reach: int) -> bool:
        """Submit the guesses of n sequences, of which each has unread `features` [r, F] and `columns` int32 [2, r]:
        tokens and positions. `ends` int32 [5, n] are as the last ones of `Unread`. False: no graph fits.
        """
        n = ends.shape[1]
        size = bucket(n)
        if size not in self._sizes or int(ends[2].max()) > self._width:
            return False
        graph = self._fitting(size, ends[1].tolist(), reach)
        staged = self._staged(size)
        staged.ends[:, :n] = ends
        for i, column in enumerate(columns):
            staged.columns[:2, i, : column.shape[1]] = column
            staged.columns[2, i] = ends[0, i]
        stage(staged.whole[: -staged.places.size], self._inputs)
        for i, own in enumerate(features):
            if own is not None:
                self._features[i * self._width : i * self._width + len(own)].copy_(own)
        graph()
        return True

    def begin(self, verified: Sequence[Verified]) -> tuple[Tensor, Callable[[], object]] | None:
        """Submit the count of each sequence's right guesses: int64 [n], on the device; and what submits the next
        guesses, which begin with what was right. None: no graph fits.

        The forward is the last one of the model's graphs.
        """
        size, n = bucket(len(verified)), len(verified)
        if size not in self._sizes:
            return None
        begin = self._graph(size)
        guess = self._fitting(
            size, [each.next_guesses for each in verified],
            2 + max(each.position + each.guesses + each.next_guesses for each in verified),
        )  # fmt: skip
        staged, slots = self._staged(size), np.arange(self._width, dtype=np.int32)
        rows, firsts, outputs, positions, counts, following = np.array(verified, np.int32).T[:, :, None]
        staged.columns[1, :n], staged.columns[2, :n] = positions + slots, rows
        staged.ends[0, :n], staged.ends[1, :n], staged.ends[4, :n] = rows[:, 0], following[:, 0], positions[:, 0] + 1
        guesses, bests, own = staged.places[:, :n]
        guesses[:] = np.where(slots < counts, firsts + 1 + slots, guesses)
        bests[:], own[:] = outputs + np.minimum(slots, counts), firsts + np.minimum(slots, counts)
        stage(staged.whole, self._inputs)
        begin()
        return self._accepted[:n], guess

    def _begin(self, size: int) -> None:
        """Accept guesses, and make what was right unread positions: `position` to that of the last right guess, with
        the tokens behind them.
        """
        unread, guesses, bests, rows = self._views(size)
        best = self._steps.best.index_select(0, bests).view(size, -1)
        right = agreeing(self._steps.tokens.index_select(0, guesses).view(size, -1), best)
        self._accepted[:size].copy_(right)
        torch.index_select(self._steps.captured, 0, rows, out=self._features[: len(rows)])
        best.clamp_(min=0)  # -1 where logits were not finite
        unread.tokens.copy_(best.view(-1))
        positions = unread.positions.view(size, -1)
        positions.masked_fill_(self._places > right[:, None], -1)
        unread.token.copy_(best.gather(1, right[:, None])[:, 0])
        unread.unread.copy_(right + 1)
        unread.stop.add_(right)

    def _guess(self, size: int, count: int, parts: int) -> None:
        unread, *_ = self._views(size)
        self._forwards.parts = parts
        drafts = self._walk(self._features[: size * self._width], unread, count)
        self._steps.guesses[:count].index_copy_(1, unread.owners.long(), drafts.int())

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _staged(self, size: int) -> _Staged:
        """Inputs on the host of sequences that are all nobody's."""
        rows = size * self._width
        whole = np.zeros(6 * rows + 5 * size, np.int32)
        columns, ends, places = np.split(whole, [3 * rows, 3 * rows + 5 * size])
        staged = _Staged(whole, columns.reshape(3, size, -1), ends.reshape(5, size), places.reshape(3, size, -1))
        staged.columns[1], staged.ends[0] = -1, len(self._steps.latest) - 1
        staged.places[0] = len(self._steps.tokens) - 1  # of no token
        return staged

    def _views(self, size: int) -> tuple[Unread, Tensor, Tensor, Tensor]:
        """The inputs on the device; and of the rows, where guesses, most likely tokens and features are found."""
        rows = size * self._width
        columns, ends, places = self._inputs[: 6 * rows + 5 * size].split([3 * rows, 5 * size, 3 * rows])
        return Unread(*columns.view(3, -1), *ends.view(5, -1)), *places.view(3, -1)

    # -- graphs --------------------------------------------------------------------------------------------------------

    def _fitting(self, size: int, counts: Sequence[int], reach: int) -> Callable[[], object]:
        """The graph for so many guesses of each sequence."""
        count = next(count for count in self._counts if count >= max(counts))
        parts = next((parts for parts in self._reaches if parts >= part_count(reach)), self._reaches[-1])
        return self._graph(size, count, parts)

    def _graph(self, *key: int) -> Callable[[], object]:
        """That of `_guess` for these arguments, or of `_begin` for one."""
        if (graph := self._graphs.get(key)) is None:
            graph = self._graphs[key] = self._captured(partial(self._guess if len(key) > 1 else self._begin, *key), key)
        return graph

    def _captured(self, run: Callable[[], None], key: tuple[int, ...]) -> Callable[[], object]:
        if self._device.type != "cuda":
            return run
        self._recorder = self._recorder or recorder(self._device)
        stage(self._staged(key[0]).whole, self._inputs)  # what is run to compile, and to record, writes nothing
        try:
            return self._recorder.record(run)[0]
        except RuntimeError as error:
            log.warning("drafts of %s run without a graph: %s", key, error)
            return run


class _Staged(NamedTuple):
    whole: Array
    columns: Array  # [3, n, width]
    ends: Array  # [5, n]
    places: Array  # [3, n, width]
