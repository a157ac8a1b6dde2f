"""Runs a model as fused kernels on a GPU: in CUDA graphs where one fits the batch, otherwise kernel by kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from contract.precision import IMAGE_SCHEMES
from core.kernels.cuda import decode_kernel, driver
from core.kernels.cuda.chunk_kernel import tiles
from core.kernels.device import HOPPER, TRITON
from core.kernels.kv_cache import KVCache, TokenBatch, on_device
from core.ops.branches import LowRank, PackedAdapter
from core.ops.cuda_branches import CudaRowBranches
from core.ops.cuda_tokens import FusedBatch
from llm.backends.backend import FUSED, TextBackend
from llm.backends.cuda import CudaDecoder
from llm.backends.forward import Forward
from llm.backends.step_graphs import BUCKETS, VERIFIED, StepGraphs, StepInputs, mixed_buckets, rung
from llm.checkpoints.load import TextModel


class FusedBackend(TextBackend):
    """A model on fused kernels, or a rank's part of it."""

    kind = FUSED

    def __init__(
        self, model: TextModel, cache: KVCache, decoder: CudaDecoder, *, sequences: int, context: int, rows: int
    ) -> None:
        """`decoder` is the model's, on this cache. A batch has at most so many rows."""
        self._device = cache.table.device
        decoder.ops.branches = CudaRowBranches(max(mixed_buckets(rows)[-1], BUCKETS[-1]))
        self.decoder = decoder
        self.graphs = self.step_graphs = StepGraphs(decoder, sequences, context, rows, self._device)
        super().__init__(model, cache, self.graphs.latest)
        self.group = decoder.ranks

    @property
    def kernels(self) -> str:
        in_8_bits = self.model.precision in IMAGE_SCHEMES  # only its products may be Hopper's
        return HOPPER if in_8_bits and driver.unsupported_reason(self.model.device) is None else TRITON

    @property
    def size_bytes(self) -> int:
        return super().size_bytes + self.graphs.size_bytes

    @torch.inference_mode()
    def prepare(self, sequences: int) -> None:
        self.graphs.prepare(sequences)

    def close(self) -> None:
        """Drop all CUDA graphs that hold the operations of a group of ranks."""
        if self.group is not None:
            self.graphs.clear()

    def pack(self, factors: Mapping[str, LowRank]) -> PackedAdapter:
        return self.decoder.pack(factors)

    @torch.inference_mode()
    def forward(self, batch: TokenBatch) -> Forward:
        self.cache.settle()
        branches = self.decoder.ops.branches
        if batch.adapters is None or branches is None:
            return self._run(batch)
        uses = [[] if adapter is None else [(adapter, 1.0)] for adapter in batch.adapters]
        with branches.adapted(uses, self._device):
            return self._run(batch)

    def _run(self, batch: TokenBatch) -> Forward:
        step = self._step(batch)
        forward = self.graphs(step) if batch.state_rows is None else None
        if forward is None:
            rows, owners = self._on_device(step)
            if batch.state_rows is not None:
                rows = replace(rows, state_rows=on_device(batch.state_rows, self._device))
            forward = self.graphs.run(rows, owners)
        if self.group is not None and not self.group.rank.last:
            return Forward(forward.logits)
        whole = batch.logits or forward.best is None
        return forward._replace(logits=self.decoder.whole(forward.logits)) if whole else forward

    def _step(self, batch: TokenBatch) -> StepInputs:
        """The step's rows, grouped for attention."""
        columns = np.array([part.numpy(force=True) for part in (batch.tokens, batch.positions, batch.sequences)])
        sequences = columns[2]
        starts = np.flatnonzero(sequences[1:] != sequences[:-1]) + 1  # of each sequence's rows but the first
        bounds = np.array([0, *starts.tolist(), len(sequences)])
        firsts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
        many = counts > 1
        # A few guesses are attended to as rows that decode, whose kernel splits long sequences: then each has the bits
        # that it has without guesses.
        if int(counts[many].sum()) <= VERIFIED and len(batch.output_rows) == len(sequences) <= self.graphs.most:
            many[:] = False
        singles = np.flatnonzero(np.repeat(~many, counts))
        runs = np.stack([firsts[many], counts[many], sequences[firsts[many]]], 1).tolist()
        cut = np.array(tiles(runs, self.decoder.group), np.int32).reshape(-1, 3)
        parts = decode_kernel.part_count(int(columns[1, singles].max()) + 1) if len(singles) else 1
        return StepInputs(columns, batch.output_rows.cpu().numpy(), singles.astype(np.int32), cut, parts)

    def _on_device(self, step: StepInputs) -> tuple[FusedBatch, Tensor]:
        """A step of any shape, copied to the device at once, and the sequences of its output rows."""
        rows = step.columns.shape[1]
        arrays = [*step.columns, step.output_rows, step.columns[2][step.output_rows], step.singles, step.tiles.ravel()]
        # Each 16-byte aligned: kernels would be recompiled for other alignments.
        padded = [np.pad(part, (0, -len(part) % 4)) for part in arrays]
        packed = on_device(torch.from_numpy(np.concatenate(padded)), self._device)
        parts_on_device = packed.split([len(part) for part in padded])
        tokens, positions, sequences, selected, owners, alone, cuts = (
            part[: len(real)] for part, real in zip(parts_on_device, arrays, strict=True)
        )
        all_picked = len(step.output_rows) == rows and bool((step.output_rows == np.arange(rows)).all())
        batch = FusedBatch(
            tokens, positions, sequences, None if all_picked else selected, None if len(alone) == rows else alone,
            cuts.view(-1, 3) if len(cuts) else None, rung(step.parts),
        )  # fmt: skip
        return batch, owners
