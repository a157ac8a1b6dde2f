"""Runs a model's forward on its KV cache: by our kernels where they support the model, else by torch."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contract.precision import is_quantized, runs
from core.kernels.cpu.library import identity
from core.kernels.cuda import decode_kernel, driver
from core.kernels.cuda.chunk_kernel import tiles
from core.kernels.device import HOPPER, TRITON
from core.kernels.kv_cache import Kind, KVCache, TokenBatch
from core.ops.cuda_tokens import FusedBatch
from llm.attention import PagedContext
from llm.cpu import CpuDecoder
from llm.cuda import CudaDecoder
from llm.decode_graphs import DecodeGraphs, rung
from llm.load import TextModel, TextModelError

log = logging.getLogger(__name__)

KERNELS, FUSED, TORCH = "kernels", "fused", "torch"


class TextExecution:
    """One model on one cache, called by one thread at a time, on one stream."""

    def __init__(
        self,
        model: TextModel,
        *,
        pages: int,
        sequences: int,
        context: int,
        kv: Kind = "float",
        kernels: ctypes.CDLL | None = None,
        companion: KVCache | None = None,
    ) -> None:
        """`kernels` are the CPU kernels, if there are any; `companion` is a cache whose table is shared.

        Raises `TextModelError` for INT8 on a CPU without them, and for FP8 on any CPU.
        """
        self.model = model
        self.kernels_reason = ""  # why no faster kernels run it
        self._library = kernels
        self.cache = KVCache(
            layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim, pages=pages, sequences=sequences,
            context=context, dtype=model.dtype if model.device.type != "cpu" else torch.float32, device=model.device,
            kind=kv, companion=companion,
        )  # fmt: skip
        self._states: Tensor | None = None  # by torch
        self._programs = self._on_kernels(kernels)
        self._fused = self._on_gpu(sequences, context)

    @property
    def best(self) -> Tensor | None:
        """`sample.likeliest` of the last step's logits, if computed with them."""
        return None if self._fused is None else self._fused.best

    @property
    def states(self) -> Tensor | None:
        """Hidden states [S, C] of the last step's `state_rows`, after the last norm."""
        if self._programs is not None:
            return self._programs.states
        return self._states if self._fused is None else self._fused.model.states

    @property
    def kernels(self) -> str:
        """The kernels that run the model, by their name in `core.kernels.device`."""
        if self._programs is not None and self._library is not None:
            return identity(self._library).instructions
        if self._fused is None:
            return TORCH
        in_8_bits = is_quantized(self.model.precision)  # only its products may be Hopper's
        return HOPPER if in_8_bits and driver.unsupported_reason(self.model.device) is None else TRITON

    @property
    def kind(self) -> str:
        return KERNELS if self._programs is not None else TORCH if self._fused is None else FUSED

    def prepare(self, sequences: int, rows: int) -> None:
        """Compile and capture what is needed to decode so many sequences, and for steps of up to so many rows."""
        if self._fused is not None:
            self._fused.prepare(sequences, rows)

    def release(self) -> None:
        """Free duplicate weights: once our kernels have packed them, the model's own are dropped for good."""
        if self._programs is not None:
            self._programs.release()

    def __call__(self, step: TokenBatch) -> Tensor:
        """Logits [L, V] in fp32 of the step's picked rows, overwritten by the next call."""
        if self._programs is not None:
            return self._programs(step)
        self.cache.settle()
        if self._fused is not None:
            return self._fused(step)
        step = step.to(self.model.device)
        with torch.inference_mode(), self._read_states(step.state_rows):
            output = self.model.network(
                step.tokens.long()[None],
                position_ids=step.positions.long()[None],
                use_cache=False,
                logits_to_keep=step.output_rows.long(),
                paged=PagedContext.of(self.cache, step),
            )
            logits: Tensor = output.logits[0].float()
            return logits

    @contextmanager
    def _read_states(self, rows: Tensor | None) -> Iterator[None]:
        """Keep these rows of what the layers return: a model with a head returns its logits alone."""
        self._states = None
        if rows is None:
            yield
            return

        def keep(module: Any, inputs: Any, output: Any) -> None:
            self._states = output.last_hidden_state[0, rows.long()]

        hook = self.model.network.base_model.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    def _on_kernels(self, kernels: ctypes.CDLL | None) -> CpuDecoder | None:
        model = self.model
        if not runs(model.precision, model.device.type):
            raise TextModelError(f"{model.precision} does not run on a CPU; take int8 or fp32")
        if model.device.type == "cpu" and model.precision in ("fp32", "bf16", "int8") and kernels is not None:
            try:
                return CpuDecoder(kernels, model.network, self.cache, half=model.precision != "fp32")
            except ValueError as error:
                if model.precision == "int8":
                    raise TextModelError(f"int8 does not run here: {error}; take fp32") from error
                self._on_torch(str(error))
        elif model.device.type == "cpu" and model.precision == "int8":
            raise TextModelError("int8 does not run here: without our CPU kernels it would be slower than fp32")
        elif model.device.type == "cpu":
            self.kernels_reason = "the CPU kernels are turned off, or do not run here or in this precision"
        return None

    def _on_gpu(self, sequences: int, context: int) -> FusedTextExecution | None:
        model = self.model
        if model.device.type != "cuda":
            return None
        if model.dtype == torch.float32:
            self._on_torch("ours multiply bf16 and 8 bits, not fp32")
            return None
        try:
            return FusedTextExecution(CudaDecoder(model.network, self.cache), self.cache, sequences, context)
        except ValueError as error:
            self._on_torch(str(error))
        return None

    def _on_torch(self, reason: str) -> None:
        self.kernels_reason = reason
        log.warning("%s runs on torch: %s", self.model.name, reason)


class FusedTextExecution:
    """Runs a fused model: in CUDA graphs for decode steps with one row per sequence; otherwise kernel by kernel."""

    def __init__(self, model: CudaDecoder, cache: KVCache, sequences: int, context: int) -> None:
        self.model = model
        self._device = cache.table.device
        self.graphs = DecodeGraphs(model, sequences, context, self._device)
        self.best: Tensor | None = None

    @torch.inference_mode()
    def prepare(self, sequences: int, rows: int) -> None:
        """Prepare like `TextExecution`. Padding rows stand in for later ones: they write nothing."""
        self.graphs.prepare(sequences)
        nobody = torch.full((rows,), -1, dtype=torch.int32, device=self._device)
        zeros = torch.zeros_like(nobody)
        widths = {16, *(1 << n for n in range(8, rows.bit_length())), rows}
        for width in sorted(width for width in widths if width <= rows):
            tile = torch.tensor([[0, 2, 0]], dtype=torch.int32, device=self._device)
            for parts in self.graphs.rungs:
                self.model(FusedBatch(zeros[:width], nobody[:width], zeros[:width], zeros[:2], zeros[:1], tile, parts))

    @torch.inference_mode()
    def __call__(self, step: TokenBatch) -> Tensor:
        """Compute one step; see `TextExecution`."""
        self.best = None
        columns = np.stack([part.cpu().numpy() for part in (step.tokens, step.positions, step.sequences)])
        output_rows = step.output_rows.cpu().numpy()
        rows = columns.shape[1]
        firsts = np.flatnonzero(np.diff(columns[2], prepend=-1))  # of each sequence's rows
        if len(firsts) == rows == len(output_rows) and bool((output_rows == np.arange(rows)).all()):
            logits = self.graphs(columns)
            if logits is not None:
                self.best = self.graphs.best[:rows]
                return logits
        batch = self._rows(columns, output_rows, firsts)
        if step.state_rows is not None:
            batch = replace(batch, state_rows=step.state_rows.to(self._device))
        return self.model(batch)

    def _rows(
        self, columns: np.ndarray[Any, np.dtype[np.int32]], output_rows: np.ndarray[Any, Any], firsts: Any
    ) -> FusedBatch:
        """All of a forward's inputs, copied to the device at once."""
        rows = columns.shape[1]
        counts = np.diff(firsts, append=rows)
        singles = firsts[counts == 1]
        runs = [
            (int(first), int(count), int(columns[2, first]))
            for first, count in zip(firsts, counts, strict=True)
            if count > 1
        ]
        cut = np.array(tiles(runs, self.model.group), np.int32).reshape(-1, 3)
        parts = rung(decode_kernel.part_count(int(columns[1, singles].max()) + 1)) if len(singles) else 1
        arrays = [part.astype(np.int32) for part in (*columns, output_rows, singles, cut.ravel())]
        # Each 16-byte aligned: kernels would be recompiled for other alignments.
        padded = [np.pad(part, (0, -len(part) % 4)) for part in arrays]
        packed = torch.from_numpy(np.concatenate(padded)).to(self._device)
        parts_on_device = packed.split([len(part) for part in padded])
        tokens, positions, sequences, selected, alone, cuts = (
            part[: len(real)] for part, real in zip(parts_on_device, arrays, strict=True)
        )
        all_picked = len(output_rows) == rows and bool((output_rows == np.arange(rows)).all())
        return FusedBatch(
            tokens, positions, sequences, None if all_picked else selected, None if len(singles) == rows else alone,
            cuts.view(-1, 3) if len(cut) else None, parts,
        )  # fmt: skip
