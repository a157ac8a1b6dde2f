"""CUDA graphs for decode steps: one per bucket of rows and reach of attention, replayed on inputs at fixed addresses.

Padding rows are at position -1: they write no page and read none. Steps with other rows than one per sequence run
without a graph in `llm.execution`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.cuda_graphs import CAPTURE_LOCK, without_collections
from core.kernels.cuda.decode_kernel import PARTS, part_count
from core.ops.cuda_tokens import FusedBatch
from llm.cuda import CudaDecoder
from llm.sample import likeliest

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REACHES = (1, 4, PARTS)  # parts of the longest sequence: up to 256 tokens, up to 1,024, any

Columns = npt.NDArray[np.int32]  # [3, T]: tokens, positions, sequences


def bucket(rows: int) -> int | None:
    """The rows of the graph that fits so many; None if there is none."""
    return next((size for size in BUCKETS if size >= rows), None)


def rung(parts: int) -> int:
    """The reach of the graph that fits sequences of so many parts."""
    return next(size for size in REACHES if size >= parts)


class DecodeGraphs:
    """Runs decode steps, one row per sequence, all of whose logits are wanted.

    Called by one thread, on one stream. Graphs not captured by `prepare` are captured on first use.
    """

    def __init__(self, model: CudaDecoder, sequences: int, context: int, device: torch.device) -> None:
        """Set up graphs for at most so many sequences, of at most `context` tokens."""
        self._model = model
        self._most = bucket(sequences) or BUCKETS[-1]
        self.rungs = [size for size in REACHES if size <= rung(part_count(context))]
        width = max(4, self._most)  # 16-byte alignment, which kernels are compiled for
        self._inputs = torch.zeros(3, width, dtype=torch.int32, device=device)
        self._given = torch.zeros(3, width, dtype=torch.int32)
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._given = self._given.pin_memory()
            self._copied = torch.cuda.Event()
        self._logits = torch.zeros(self._most, model.vocabulary, device=device)
        self.best = torch.zeros(self._most, dtype=torch.int64, device=device)  # `likeliest` of the last step's rows
        self._graphs: dict[tuple[int, int], Callable[[], object]] = {}
        self._pool: Any = None

    def prepare(self, rows: int) -> None:
        """Compile and capture what so many rows and fewer need; the largest first, whose memory the others share."""
        largest = min(bucket(rows) or self._most, self._most)
        for size in reversed([size for size in BUCKETS if size <= largest]):
            for parts in self.rungs:
                self._graph(size, parts)

    def __call__(self, columns: Columns) -> Tensor | None:
        """Logits [T, V] in fp32, overwritten by the next call. None: too many rows for any graph."""
        rows = columns.shape[1]
        size = bucket(rows)
        if size is None or size > self._most:
            return None
        parts = rung(part_count(int(columns[1].max()) + 1))
        graph = self._graph(size, parts)
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy may still be in progress
        inputs = self._given.numpy()
        inputs[:, :rows] = columns
        inputs[:, rows:size] = [[0], [-1], [0]]
        self._inputs.copy_(self._given, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        graph()
        return self._logits[:rows]

    def _graph(self, rows: int, parts: int) -> Callable[[], object]:
        graph = self._graphs.get((rows, parts))
        if graph is None:
            graph = self._graphs[rows, parts] = self._captured(rows, parts)
        return graph

    def _captured(self, rows: int, parts: int) -> Callable[[], object]:
        tokens, positions, sequences = (column[:rows] for column in self._inputs)
        batch = FusedBatch(tokens, positions, sequences, None, None, None, parts)

        def run() -> object:
            return self.best[:rows].copy_(likeliest(self._model(batch, out=self._logits[:rows])))

        if self._inputs.device.type != "cuda":
            return run
        self._inputs[1].fill_(-1)
        run()  # compiles outside of the capture, which must not compile
        try:
            return self._recorded(run)
        except RuntimeError as error:
            log.warning("decoding %d rows runs without a graph: %s", rows, error)
            return run

    def _recorded(self, run: Callable[[], object]) -> Callable[[], object]:
        """Capture `run` as a graph, with the priority of the current stream; all graphs share one memory pool."""
        current = torch.cuda.current_stream()
        stream = current if current != torch.cuda.default_stream() else torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with CAPTURE_LOCK, without_collections():
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                # Other threads keep using the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
            self._pool = self._pool or graph.pool()
            torch.cuda.synchronize()
        return graph.replay
