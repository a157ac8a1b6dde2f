"""Runs a model's forward on its KV cache: by our kernels where they support the model, else by torch."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contract.precision import IMAGE_SCHEMES, PRECISIONS, runs
from core.kernels.cpu.library import identity
from core.kernels.cuda import decode_kernel, driver
from core.kernels.cuda.chunk_kernel import tiles
from core.kernels.device import HOPPER, TRITON
from core.kernels.kv_cache import Kind, KVCache, TokenBatch, on_device
from core.ops.branches import LowRank, PackedAdapter
from core.ops.cuda_branches import CudaRowBranches
from core.ops.cuda_tokens import FusedBatch
from core.ops.packed import PackedLayers
from llm.backends.attention import PagedContext
from llm.backends.cpu import CpuDecoder
from llm.backends.cuda import CudaDecoder
from llm.backends.step_graphs import BUCKETS, VERIFIED, StepGraphs, StepInputs, mixed_buckets, rung
from llm.checkpoints.load import TextModel, TextModelError
from llm.features.adapters import AdaptedModules, TorchAdapter
from llm.parallel.ranks import RankGroup, shared_

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
        rows: int = 256,
        kv: Kind = "float",
        kernels: ctypes.CDLL | None = None,
        companion: KVCache | None = None,
        group: RankGroup | None = None,
        features: tuple[int, ...] = (),
    ) -> None:
        """`rows` are the most of a step; `kernels` are the CPU kernels, if there are any; `companion` is a cache whose
        table is shared. `group`: the ranks of which this is one, whose part of the model `model` is. `features` are
        layers whose inputs are captured.

        Raises `TextModelError` for INT8 on a CPU without them, and for FP8 on any CPU.
        """
        self.model = model
        self.group = group
        self.kernels_reason = ""  # why no faster kernels run it
        self._library = kernels
        self.cache = KVCache(
            layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim, pages=pages, sequences=sequences,
            context=context, dtype=model.dtype if model.device.type != "cpu" else torch.float32, device=model.device,
            kind=kv, companion=companion,
        )  # fmt: skip
        self._states: Tensor | None = None  # by torch
        self._adapted: AdaptedModules | None = None  # by torch
        self._captured = features
        self.features: Tensor | None = None  # captured inputs [T, layers · C] of the last step's rows
        self._programs = self._on_kernels(kernels)
        self._fused = self._on_gpu(sequences, context, rows)
        # As the CPU kernels read the layers, if these run the model.
        self.packed: PackedLayers | None = None if self._programs is None else self._programs.layers
        if PRECISIONS[model.precision].emulated:
            emulated = f"{model.precision} is emulated: its weights become floats as they are multiplied"
            self.kernels_reason = "; ".join(filter(None, [emulated, self.kernels_reason]))
        self.step_graphs = None if self._fused is None else self._fused.graphs
        # Each sequence's latest token, for rows whose token is -1; the last one is of padding rows.
        self.latest = (
            torch.zeros(sequences + 1, dtype=torch.int32, device=model.device)
            if self.step_graphs is None
            else self.step_graphs.latest
        )

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
        in_8_bits = self.model.precision in IMAGE_SCHEMES  # only its products may be Hopper's
        return HOPPER if in_8_bits and driver.unsupported_reason(self.model.device) is None else TRITON

    @property
    def kind(self) -> str:
        return KERNELS if self._programs is not None else TORCH if self._fused is None else FUSED

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights, packed ones included, of the cache, and of the CUDA graphs captured so far."""
        network = self.model.network
        storages = [tensor.untyped_storage() for tensor in (*network.parameters(), *network.buffers())]
        unique = {storage.data_ptr(): storage.nbytes() for storage in storages}
        packed = 0 if self._programs is None else self._programs.size_bytes
        graphs = 0 if self._fused is None else self._fused.graphs.size_bytes
        return int(sum(unique.values()) + packed + graphs + self.cache.size_bytes)

    def prepare(self, sequences: int) -> None:
        """Compile and capture what is needed to decode so many sequences, and to read their prompts."""
        if self._fused is not None:
            self._fused.prepare(sequences)

    def close(self) -> None:
        """Drop all CUDA graphs: they hold the operations of a group of ranks."""
        if self._fused is not None:
            self._fused.graphs.clear()

    def release(self) -> None:
        """Free duplicate weights: once our kernels have packed them, the model's own are dropped for good."""
        if self._programs is not None:
            self._programs.release()

    def pack(self, factors: Mapping[str, LowRank]) -> PackedAdapter:
        """An adapter for rows of steps, by the layers' names. On any thread.

        Raises ValueError, naming the layer, for a factor that does not fit it.
        """
        if self._programs is not None:
            return self._programs.pack(factors)
        if self._fused is not None:
            return self._fused.pack(factors)
        return TorchAdapter(factors, self.model.device, self.model.dtype)

    def __call__(self, step: TokenBatch) -> Tensor:
        """Logits [L, V] in fp32 of the step's picked rows, overwritten by the next call.

        A row whose token is -1 takes its sequence's `latest` one.
        """
        self.cache.settle()
        if self._fused is not None:
            logits = self._fused(step)
            self.features = self._fused.graphs.features
            return logits
        step = self.with_known_tokens(step)
        if self._programs is not None:
            logits = self._programs(step)
            self.features = self._programs.features
            return logits
        step = step.to(self.model.device)
        if step.adapters is not None and self._adapted is None:
            self._adapted = AdaptedModules(self.model.network)
        adapted = nullcontext() if self._adapted is None else self._adapted.rows(step.adapters, self.model.device)
        with torch.inference_mode(), adapted, self._read_states(step.state_rows):
            return self._by_torch(step)

    def _by_torch(self, step: TokenBatch) -> Tensor:
        """transformers' network, or a rank's part of it, which gives no logits before the last stage."""
        network, group = self.model.network, self.group
        inputs = {"position_ids": step.positions.long()[None], "paged": PagedContext.of(self.cache, step)}
        if group is None or group.rank.first:
            inputs["input_ids"] = step.tokens.long()[None]
        else:
            x = torch.empty(1, len(step.tokens), network.config.hidden_size, dtype=self.model.dtype)
            inputs["inputs_embeds"] = group.receive(x.to(self.model.device))
        if group is not None and not group.rank.last:
            group.send(network.model(use_cache=False, **inputs).last_hidden_state)
            return torch.empty(0, self.model.vocabulary, device=self.model.device)
        output = network(use_cache=False, logits_to_keep=step.output_rows.long(), **inputs)
        logits: Tensor = output.logits[0].float()
        return logits

    def with_known_tokens(self, step: TokenBatch) -> TokenBatch:
        """The step with its sequences' latest tokens in place of -1, unless the device knows them."""
        if self._fused is not None or not bool((step.tokens < 0).any()):
            return step
        latest = self.latest.cpu()[step.sequences.long()].clamp_(min=0)  # -1 where the logits were NaN
        return replace(step, tokens=torch.where(step.tokens < 0, latest, step.tokens))

    def keep(self, step: TokenBatch, tokens: Tensor) -> None:
        """Make these tokens [L], on the model's device, the latest of the output rows' sequences."""
        owners = on_device(step.sequences[step.output_rows.long()].long(), self.latest.device)
        self.latest[owners] = tokens.int()

    @contextmanager
    def _read_states(self, rows: Tensor | None) -> Iterator[None]:
        """Keep these rows of what the layers return, since a model with a head returns its logits alone; and of all
        rows what the captured layers are given.
        """
        self._states = None
        base, hooks, inputs = self.model.network.base_model, [], dict[int, Tensor]()

        def keep(module: Any, args: Any, output: Any) -> None:
            self._states = None if rows is None else output.last_hidden_state[0, rows.long()]

        def capture(layer: int, module: Any, args: Any, kwargs: Any) -> None:
            inputs[layer] = (args[0] if args else kwargs["hidden_states"])[0]

        if rows is not None:
            hooks.append(base.register_forward_hook(keep))
        for layer in self._captured:
            hooks.append(base.layers[layer].register_forward_pre_hook(partial(capture, layer), with_kwargs=True))
        try:
            yield
            if self._captured:
                self.features = torch.cat([inputs[layer] for layer in self._captured], -1)
        finally:
            for hook in hooks:
                hook.remove()

    def _on_kernels(self, kernels: ctypes.CDLL | None) -> CpuDecoder | None:
        model = self.model
        if not runs(model.precision, model.device.type):
            raise TextModelError(f"{model.precision} does not run on a CPU; take int8 or fp32")
        if self.group is not None:
            shared_(model.network, self.group)
            if model.device.type == "cpu":
                kernels = None
        in_int8 = model.precision in ("int8", "int8-sparse")
        ours = in_int8 or model.precision in ("fp32", "bf16", "w4a8")  # which is packed as INT8
        if model.device.type == "cpu" and ours and kernels is not None:
            try:
                return CpuDecoder(
                    kernels, model.network, self.cache, half=model.precision != "fp32", features=self._captured
                )
            except ValueError as error:
                if in_int8:
                    raise TextModelError(f"{model.precision} does not run here: {error}; take fp32") from error
                self._on_torch(str(error))
        elif model.device.type == "cpu" and in_int8:
            slower = "without our CPU kernels it would be slower than fp32"
            raise TextModelError(f"{model.precision} does not run here: {slower}")
        elif model.device.type == "cpu":
            self.kernels_reason = "the CPU kernels are turned off, or do not run here or in this precision"
        return None

    def _on_gpu(self, sequences: int, context: int, rows: int) -> FusedTextExecution | None:
        model = self.model
        if model.device.type != "cuda":
            return None
        if model.dtype == torch.float32:
            self._on_torch("ours multiply bf16 and 8 bits, not fp32")
            return None
        try:
            if self.group is not None:
                self.group.open_exchange(int(model.config.hidden_size), model.dtype)
            decoder = CudaDecoder(model.network, self.cache, self.group, self._captured)
            return FusedTextExecution(decoder, self.cache, sequences, context, rows)
        except ValueError as error:
            self._on_torch(str(error))
        return None

    def _on_torch(self, reason: str) -> None:
        self.kernels_reason = reason
        log.warning("%s runs on torch: %s", self.model.name, reason)


class FusedTextExecution:
    """Runs a fused model: in CUDA graphs where one fits the step, otherwise kernel by kernel."""

    def __init__(self, model: CudaDecoder, cache: KVCache, sequences: int, context: int, rows: int) -> None:
        self.model = model
        self._device = cache.table.device
        model.ops.branches = CudaRowBranches(max(mixed_buckets(rows)[-1], BUCKETS[-1]))
        self.graphs = StepGraphs(model, sequences, context, rows, self._device)
        self._ranks = model.ranks
        self.best: Tensor | None = None

    @torch.inference_mode()
    def prepare(self, sequences: int) -> None:
        """Prepare like `TextExecution`."""
        self.graphs.prepare(sequences)

    def pack(self, factors: Mapping[str, LowRank]) -> PackedAdapter:
        """An adapter; see `TextExecution`."""
        return self.model.pack(factors)

    @torch.inference_mode()
    def __call__(self, batch: TokenBatch) -> Tensor:
        """Compute one step; see `TextExecution`."""
        branches = self.model.ops.branches
        if batch.adapters is None or branches is None:
            return self._run(batch)
        uses = [[] if adapter is None else [(adapter, 1.0)] for adapter in batch.adapters]
        with branches.adapted(uses, self._device):
            return self._run(batch)

    def _run(self, batch: TokenBatch) -> Tensor:
        step = self._step(batch)
        logits = self.graphs(step) if batch.state_rows is None else None
        if logits is None:
            rows, owners = self._on_device(step)
            if batch.state_rows is not None:
                rows = replace(rows, state_rows=on_device(batch.state_rows, self._device))
            logits = self.graphs.run(rows, owners)
        if self._ranks is not None and not self._ranks.rank.last:
            self.best = None
            return logits
        count = len(step.output_rows)
        self.best = self.graphs.best[:count] if count <= len(self.graphs.best) else None
        return self.model.whole(logits) if batch.logits or self.best is None else logits

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
        cut = np.array(tiles(runs, self.model.group), np.int32).reshape(-1, 3)
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
