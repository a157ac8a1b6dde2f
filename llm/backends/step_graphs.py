"""CUDA graphs for the steps of a decoder: one per bucket of rows, kind of step and reach of attention, replayed on
inputs at fixed addresses.

A step of decoding has one row per sequence and wants all logits; a mixed one reads prompts too, in tiles beside the
rows that decode. Padding rows are at position -1: they write no page and read none. Tokens that the host does not know
yet are negative: at -1 a row takes its sequence's latest one, which the step before has left on the device, and at
-2 - j the j-th guess of what follows it, which the drafter has left there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.cuda_graphs import CudaRecorder
from core.kernels.cuda.chunk_kernel import tiles, tokens_per_tile
from core.kernels.cuda.decode_kernel import PARTS, part_count
from core.kernels.cuda.token_kernels import known
from core.ops.cuda_branches import BranchShape
from core.ops.cuda_tokens import FusedBatch
from llm.backends.cuda import CudaDecoder
from llm.backends.forward import Forward
from llm.drafts.speculate import MOST_OF_A_BLOCK, NO_TOKEN
from llm.parallel.ranks import StageLink

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of steps of decoding
VERIFIED = 16  # rows of guesses, of all sequences together, that are attended to as those that decode, at most
_OUTPUTS = 128  # rows of a mixed graph whose logits it computes, at least: guesses of a few sequences are many rows
REACHES = (1, 4, PARTS)  # parts of the longest sequence: up to 256 tokens, up to 1,024, any

Array = npt.NDArray[np.int32]


class StepInputs(NamedTuple):
    """A step's inputs on the host, all int32."""

    columns: Array  # [3, T]: tokens, positions, sequences
    output_rows: Array  # [L]
    singles: Array  # rows alone of their sequence
    tiles: Array  # [n, 3], of the other rows
    parts: int  # as in `FusedBatch`

    @property
    def decodes(self) -> bool:
        """Return whether each sequence has one row, all of whose logits are wanted."""
        rows = self.columns.shape[1]
        return len(self.singles) == rows == len(self.output_rows) and bool((np.diff(self.output_rows) == 1).all())


class Shape(NamedTuple):
    """What a graph is captured for; `mixed` steps read prompts, and rows may have adapters of the shape `branches`."""

    rows: int
    mixed: bool
    parts: int
    branches: BranchShape | None = None


def bucket(rows: int) -> int | None:
    """The rows of the decoding graph that fits so many; None if there is none."""
    return next((size for size in BUCKETS if size >= rows), None)


def rung(parts: int) -> int:
    """The reach of the graph that fits sequences of so many parts."""
    return next(size for size in REACHES if size >= parts)


def mixed_buckets(rows: int) -> tuple[int, ...]:
    """The rows of mixed graphs for steps of at most so many: what a step takes is linear in them."""
    sizes = [8]  # a user's last token and guesses
    while sizes[-1] < rows:
        sizes.append(2 * sizes[-1] if sizes[-1] < 64 else sizes[-1] + (64 if sizes[-1] < 512 else 128))
    return tuple(sizes)


class StepGraphs:
    """Runs steps of any kind. Called by one thread, on one stream. Graphs not captured by `prepare` are captured on
    first use.
    """

    def __init__(self, model: CudaDecoder, sequences: int, context: int, rows: int, device: torch.device) -> None:
        """Set up graphs for at most so many sequences, of at most `context` tokens, and steps of so many rows."""
        self._model = model
        self._device = device
        self._recorder: CudaRecorder | None = None
        self._sequences = sequences
        self.most = bucket(max(sequences, VERIFIED if model.feature_width else 1)) or BUCKETS[-1]
        self._outputs = max(self.most, min(_OUTPUTS, mixed_buckets(rows)[-1]))
        self._mixed = mixed_buckets(rows)
        self.rungs = [size for size in REACHES if size <= rung(part_count(context))]
        # Each sequence's latest token, and the guesses behind it; the last column is of padding rows.
        guesses = MOST_OF_A_BLOCK if model.feature_width else 0
        self._unknown = torch.zeros(1 + guesses, sequences + 1, dtype=torch.int32, device=device)
        self.latest, self.guesses = self._unknown[0], self._unknown[1:]
        most = max(self._mixed[-1], self.most)
        # The tokens of a step's rows, all of them known, where guesses are made; the last one is nobody's.
        self.tokens = torch.full((most + 1 if guesses else 0,), NO_TOKEN, dtype=torch.int32, device=device)
        shapes = Shape(self._mixed[-1], True, 1), Shape(self.most, False, 1)
        self._inputs = torch.zeros(max(_size(self._layout(s)) for s in shapes), dtype=torch.int32, device=device)
        self._logits = torch.zeros(self._outputs, model.vocabulary, device=device)
        self._link = None if model.ranks is None else StageLink(model.ranks, self._mixed[-1], model.width, model.dtype)
        # `likeliest` of steps, also of those without a graph.
        self.best = torch.zeros(max(self._outputs, sequences), dtype=torch.int64, device=device)
        # The features of graphs' steps; those of a step without a graph have memory of their own.
        self.captured = torch.zeros(most, model.feature_width, dtype=model.dtype, device=device)
        self._graphs: dict[Shape, Callable[[], object]] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of inputs, logits and what was captured."""
        tensors = (self._unknown, self.tokens, self.best, self._inputs, self._logits, self.captured)
        return sum(x.nbytes for x in tensors) + (0 if self._recorder is None else self._recorder.size_bytes)

    def prepare(self, sequences: int) -> None:
        """Compile and capture what so many sequences need; the largest first, whose memory the others share."""
        largest = bucket(max(sequences, VERIFIED if self._model.feature_width else 1)) or self.most
        for rows in reversed(self._mixed):
            for parts in self.rungs:
                self._graph(Shape(rows, True, parts))
        for rows in reversed([size for size in BUCKETS if size <= largest]):
            for parts in self.rungs:
                self._graph(Shape(rows, False, parts))
        if self._recorder is not None:
            self._recorder.settle()

    def clear(self) -> None:
        """Drop all graphs, once the device has ended what was submitted."""
        if self._recorder is not None:
            self._recorder.settle()
        self._graphs.clear()

    def __call__(self, step: StepInputs) -> Forward | None:
        """Compute a step by a graph. None: no graph fits it."""
        shape = self._shape(step)
        if shape is None:
            return None
        graph = self._graph(shape)
        stage(self._padded(step, shape), self._inputs)
        if self._link is not None:
            self._link.receive(shape.rows)
        graph()
        if self._link is not None:
            self._link.send(shape.rows)
        forward = self._results(step.columns.shape[1], self._logits[: len(step.output_rows)])
        return forward._replace(features=self.captured, recorded=True) if self._model.feature_width else forward

    def run(self, batch: FusedBatch, owners: Tensor) -> Forward:
        """Compute a step without a graph, of any shape. `owners` [L] are the output rows' sequences."""
        rows = len(batch.tokens)
        if self._link is not None:
            self._link.receive(rows)
        if self._model.feature_width:
            batch = replace(batch, features=self.captured.new_empty(rows, self._model.feature_width))
        logits, states = self._step(batch, owners, None)
        if self._link is not None:
            self._link.send(rows)
        return self._results(rows, logits)._replace(states=states, features=batch.features)

    def _results(self, rows: int, logits: Tensor) -> Forward:
        """The results of a step that has been submitted; none but logits before the last stage of a pipeline."""
        count = len(logits)
        best = self.best[:count] if count <= len(self.best) else None
        return Forward(logits, best, tokens=self.tokens[:rows] if len(self.tokens) else None)

    def _step(self, batch: FusedBatch, owners: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
        kept = self.tokens[: len(batch.tokens)] if len(self.tokens) else torch.empty_like(batch.tokens)
        rows = batch.of(known(batch.tokens, batch.sequences, self._unknown, kept, early=self._model.ops.early))
        before, after = (None, None) if self._link is None else self._link.of(len(rows.tokens))
        if after is not None:
            after.copy_(self._model.stage(rows, before))
            return self._logits[:0], None
        logits, states = self._model(rows, out=out, before=before)
        best = self.best if len(logits) <= len(self.best) else self.best.new_empty(len(logits))
        self._model.likeliest(logits, owners, self.latest, best[: len(logits)])
        return logits, states

    # -- shapes and inputs -------------------------------------------------------------------------------------------

    def _shape(self, step: StepInputs) -> Shape | None:
        rows, parts = step.columns.shape[1], rung(step.parts)
        if step.decodes and (size := bucket(rows)) is not None and size <= self.most:
            return Shape(size, False, parts, self._branches)
        width = next((size for size in self._mixed if size >= rows), None)
        if width is None or len(step.output_rows) > min(width, self._outputs) or len(step.singles) > self.most:
            return None
        padding = -(-(width - rows) // tokens_per_tile(self._model.group))
        return Shape(width, True, parts, self._branches) if len(step.tiles) + padding <= self._tiles(width) else None

    @property
    def _branches(self) -> BranchShape | None:
        """The shape of the adapters of the step under way; None: no row has any."""
        branches = self._model.ops.branches
        return None if branches is None else branches.shape

    def _tiles(self, rows: int) -> int:
        """The most tiles of a graph: each sequence, and the padding, may have one that is not full."""
        return rows // tokens_per_tile(self._model.group) + self.most + 1

    def _layout(self, shape: Shape) -> list[int]:
        """Numbers of the parts of the inputs: tokens, positions, sequences, owners, and of mixed steps output rows,
        singles and tiles. Each begins aligned to 16 bytes: kernels are compiled for that.
        """
        rows, outputs = shape.rows, min(shape.rows, self._outputs)
        return [rows] * 3 + ([outputs, outputs, self.most, 3 * self._tiles(rows)] if shape.mixed else [rows])

    def _padded(self, step: StepInputs, shape: Shape) -> Array:
        rows, nobody = step.columns.shape[1], self._sequences
        layout = self._layout(shape)
        inputs = np.zeros(_size(layout), np.int32)
        tokens, positions, sequences, owners, *rest = _split(inputs, layout)
        tokens[:rows], positions[:rows], sequences[:rows] = step.columns
        positions[rows:] = -1
        owners[:] = nobody
        owners[: len(step.output_rows)] = step.columns[2][step.output_rows]
        if rest:
            output_rows, singles, tile_inputs = rest
            singles[:] = -1
            output_rows[: len(step.output_rows)] = step.output_rows
            singles[: len(step.singles)] = step.singles
            # Tiles of the padding rows as well, or attention would leave whatever their memory held.
            cut = step.tiles.ravel().tolist() + list(chain(*tiles([(rows, shape.rows - rows, 0)], self._model.group)))
            tile_inputs[: len(cut)] = cut
        return inputs

    # -- graphs --------------------------------------------------------------------------------------------------------

    def _graph(self, shape: Shape) -> Callable[[], object]:
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._graphs[shape] = self._captured(shape)
        return graph

    def _captured(self, shape: Shape) -> Callable[[], object]:
        layout = self._layout(shape)
        tokens, positions, sequences, owners, *rest = _split(self._inputs, layout)
        output_rows, singles, cut = rest or (None, None, None)
        cut = None if cut is None else cut.view(-1, 3)
        features = self.captured[: shape.rows] if self._model.feature_width else None
        batch = FusedBatch(tokens, positions, sequences, output_rows, singles, cut, shape.parts, features=features)
        count = len(owners)

        def run() -> object:
            return self._step(batch, owners, self._logits[:count])

        if self._device.type != "cuda":
            return run
        self._recorder = self._recorder or recorder(self._device)
        # Of nobody: what is run to compile, and to record, writes nothing.
        self._inputs.zero_()
        positions.fill_(-1)
        if singles is not None:
            singles.fill_(-1)
        owners.fill_(self._sequences)
        try:
            return self._recorder.record(run)[0]
        except RuntimeError as error:
            log.warning("steps of %d rows run without a graph: %s", shape.rows, error)
            return run


def stage(values: Array, inputs: Tensor) -> None:
    """Copy values to the first of the inputs; to a GPU without waiting for what runs there."""
    staged = torch.from_numpy(values)
    inputs[: len(staged)].copy_(staged.pin_memory() if inputs.is_cuda else staged, non_blocking=True)


def recorder(device: torch.device) -> CudaRecorder:
    """Records with the priority of the current stream."""
    current = torch.cuda.current_stream(device)
    return CudaRecorder(device, None if current == torch.cuda.default_stream(device) else current)


def _aligned(count: int) -> int:
    return -(-count // 4) * 4


def _size(layout: Sequence[int]) -> int:
    return sum(map(_aligned, layout))


def _split(inputs: Any, layout: Sequence[int]) -> list[Any]:
    """The parts of an array or a tensor."""

    def parts() -> Iterator[Any]:
        start = 0
        for count in layout:
            yield inputs[start : start + count]
            start += _aligned(count)

    return list(parts())
