"""The forwards of a drafter of blocks (`llm.dflash`): by torch, as programs of CPU kernels, or as CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from core.cuda_graphs import CudaRecorder
from core.kernels.cpu.token_program import TokenPositions
from core.kernels.cuda.decode_kernel import part_count
from core.kernels.kv_cache import PAGE, KVCache, TokenBatch, on_device
from core.ops.cpu_arrays import Array as CpuArray
from core.ops.cpu_tokens import CpuTokenOps
from core.ops.cuda_tokens import CudaTokenOps, FusedBatch
from core.ops.ops import bind
from core.ops.packed import PackedLayers
from core.ops.trace import TraceOps
from core.quant.dynamic import Int8DynamicLinear
from llm import dflash, family
from llm.dflash import BlockDecoder, Checkpoint, DFlashNetwork
from llm.execution import FUSED, TextExecution
from llm.step_graphs import BUCKETS, REACHES, Array, bucket, recorder, rung
from llm.torch_ops import TorchTokenOps

log = logging.getLogger(__name__)
_POSITIONS = (0, 3, 4)  # among the columns of a graph's inputs


def of(checkpoint: Checkpoint, execution: TextExecution, cache: KVCache, sequences: int) -> Blocks:
    """Choose the kernels that run the model of `execution`. Raises ValueError for layers that they do not support."""
    network, target = checkpoint.network, execution.model.network
    decoder = BlockDecoder.of(network, target.get_input_embeddings(), target.get_output_embeddings())
    if execution.packed is not None:
        return _Programs(decoder, network, cache, execution.packed)
    if execution.kind == FUSED:
        return _Graphs(decoder, network, cache, execution.model.dtype, checkpoint.block, sequences)
    return Blocks(decoder, network, cache)


class Blocks:
    """Runs the walks of a drafter by torch."""

    def __init__(self, decoder: BlockDecoder, network: DFlashNetwork, cache: KVCache) -> None:
        angles = family.angles(network, cache.table.shape[1] * PAGE, cache.table.device)
        self._angles, self._bytes = angles, sum(weight.nbytes for weight in network.parameters())
        self._cache, self._device, self._width = cache, cache.table.device, int(decoder.fc.in_features)
        self._read_walk, self._draft_walk = bind(dflash.read, decoder), bind(dflash.draft, decoder)
        self._ops = TorchTokenOps(cache, angles)

    @property
    def size_bytes(self) -> int:
        """Bytes of the drafter's own weights."""
        return self._bytes

    def prepare(self, sequences: int) -> None:
        """Nothing to prepare."""

    def release(self) -> None:
        """Nothing to free."""

    @torch.inference_mode()
    def __call__(self, features: Sequence[Tensor], context: Array, blocks: Array) -> list[int]:
        """Read the context's features [T, ...], if there are any; the most likely tokens of the blocks' rows.

        `context` [2, T] are positions and sequences; `blocks` [4, R] tokens, positions, ends and sequences.
        """
        if features:
            self._read(features[0] if len(features) == 1 else torch.cat(list(features)), context)
        return self._drafted(blocks) if blocks.size else []

    def _read(self, features: Tensor, context: Array) -> None:
        self._read_walk(self._ops, features, self._batch(*context))

    def _drafted(self, blocks: Array) -> list[int]:
        tokens, positions, ends, sequences = blocks
        rows = self._batch(positions, sequences)
        logits = self._draft_walk(self._ops, self._tensor(tokens), rows, self._batch(ends, sequences))
        return _tokens(logits)

    def _batch(self, positions: Array, sequences: Array) -> TokenBatch:
        none = torch.zeros(0, dtype=torch.int32)
        return TokenBatch(none, self._tensor(positions), self._tensor(sequences), none)

    def _tensor(self, column: Array) -> Tensor:
        return on_device(torch.from_numpy(column), self._device)


def _tokens(logits: Tensor) -> list[int]:
    """The most likely token of each row; any where logits are not finite: a guess need not be right."""
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


class _Programs(Blocks):
    """Runs the walks as programs of CPU kernels, one for each number of rows.

    Layers and head are in INT8, scaled by row: what a rounded drafter guesses is verified all the same, and other rows
    have no share in it.
    """

    def __init__(self, decoder: BlockDecoder, network: DFlashNetwork, cache: KVCache, packed: PackedLayers) -> None:
        """`packed` are the model's layers. Raises ValueError for unsupported ones."""
        rounded: list[nn.Module] = []

        def in_int8(layer: nn.Linear | Int8DynamicLinear) -> nn.Module:  # a quantized model's head already is
            rounded.append(layer if isinstance(layer, Int8DynamicLinear) else Int8DynamicLinear.of(layer, None))
            return rounded[-1]

        super().__init__(decoder.with_linear(in_int8), network, cache)
        self._layers = PackedLayers(packed.library, nn.ModuleList(rounded))
        self._new = partial(CpuTokenOps, packed.library, self._layers, cache, self._angles)
        self._reads: dict[int, tuple[CpuTokenOps, CpuArray, TokenPositions, CpuArray]] = {}
        self._drafts: dict[int, tuple[CpuTokenOps, Tensor, CpuArray]] = {}
        self._context_program(1)  # packs all layers, and finds any that are unsupported
        self._draft_program(2)

    @property
    def size_bytes(self) -> int:
        return self._layers.size_bytes

    def release(self) -> None:
        self._layers.release()

    def _read(self, features: Tensor, context: Array) -> None:
        count = len(features)
        ops, x, rows, _ = self._reads.get(count) or self._context_program(count)
        x.x.copy_(features)
        rows.positions.copy_(torch.from_numpy(context[0]))
        rows.sequences.copy_(torch.from_numpy(context[1]))
        ops.program.run()

    def _drafted(self, blocks: Array) -> list[int]:
        count = blocks.shape[1]
        ops, inputs, out = self._drafts.get(count) or self._draft_program(count)
        inputs.copy_(torch.from_numpy(blocks))
        ops.program.run()
        return _tokens(out.x)

    def _context_program(self, count: int) -> tuple[CpuTokenOps, CpuArray, TokenPositions, CpuArray]:
        ops = self._new()
        x, rows = ops.input((count, self._width)), ops.rows(count)
        program = self._reads[count] = ops, x, rows, self._read_walk(ops, x, rows)
        return program

    def _draft_program(self, count: int) -> tuple[CpuTokenOps, Tensor, CpuArray]:
        ops = self._new()
        inputs = ops.program.buffer(4, count, dtype=torch.int32)
        tokens, positions, ends, sequences = inputs
        rows = TokenPositions(positions, sequences, self._cache.table)
        out = self._draft_walk(ops, CpuArray(tokens, (count,), None), rows, replace(rows, positions=ends))
        program = self._drafts[count] = ops, inputs, out
        return program


class _Graphs(Blocks):
    """Runs the walks as fused kernels: for blocks and their few new features in CUDA graphs by the number of rows."""

    def __init__(
        self, decoder: BlockDecoder, network: DFlashNetwork, cache: KVCache, dtype: torch.dtype, block: int,
        sequences: int,
    ) -> None:  # fmt: skip
        """`block` rows of each of at most so many sequences."""
        super().__init__(decoder, network, cache)
        self._fused, width = CudaTokenOps(dtype, cache, self._angles), self._width
        followed = TraceOps()
        self._read_walk(followed, (1, width), None)
        self._draft_walk(followed, (1,), None, None)
        for call in followed.calls:  # joined weights exist before anything is recorded
            self._fused.pack(call.operation, call.layers)
        self._block, self._sequences = -(-block // 4) * 4, sequences  # rows of a sequence, aligned as kernels want
        self._recorder: CudaRecorder | None = None
        rows = self._block * (bucket(sequences) or BUCKETS[-1])
        # Positions and sequences of the context; tokens, positions, ends and sequences of blocks.
        self._inputs = torch.zeros(6 * rows, dtype=torch.int32, device=self._device)
        self._features = torch.zeros(rows, width, dtype=dtype, device=self._device)
        self._best = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self._graphs: dict[tuple[int, int], Callable[[], object]] = {}

    def prepare(self, sequences: int) -> None:
        """Capture what so many sequences need; the largest first, whose memory the others share."""
        largest = bucket(min(sequences, self._sequences)) or BUCKETS[-1]
        reach = self._cache.table.shape[1] * PAGE
        for size in reversed([size for size in BUCKETS if size <= largest]):
            for parts in [parts for parts in REACHES if parts <= rung(part_count(reach))]:
                self._graph(size * self._block, parts)
        if self._recorder is not None:
            self._recorder.settle()

    @torch.inference_mode()
    def __call__(self, features: Sequence[Tensor], context: Array, blocks: Array) -> list[int]:
        read, drafted = context.shape[1], blocks.shape[1]
        fitting = next((n * self._block for n in BUCKETS if n * self._block >= max(read, drafted)), 0)
        if not drafted or not 0 < fitting <= len(self._features):  # prompts
            return super().__call__(features, context, blocks)
        inputs = np.zeros((6, fitting), np.int32)
        inputs[[*_POSITIONS]] = -1
        inputs[:2, :read], inputs[2:, :drafted] = context, blocks
        staged = torch.from_numpy(inputs.ravel())
        graph = self._graph(fitting, rung(part_count(int(blocks[2].max()) + 1)))
        self._inputs[: len(staged)].copy_(on_device(staged, self._device), non_blocking=True)
        if features:
            torch.cat(list(features), out=self._features[:read])
        graph()
        tokens: list[int] = self._best[:drafted].tolist()
        return tokens

    def _read(self, features: Tensor, context: Array) -> None:
        positions, sequences = (self._tensor(column) for column in context)
        self._read_walk(self._fused, features, _fused(positions, positions, sequences))

    def _drafted(self, blocks: Array) -> list[int]:
        columns = torch.stack([self._tensor(column) for column in blocks])
        return _tokens(self._logits(columns, rung(part_count(int(blocks[2].max()) + 1))))

    def _logits(self, columns: Tensor, parts: int) -> Tensor:
        tokens, positions, ends, sequences = columns
        rows, last = _fused(tokens, positions, sequences), _fused(tokens, ends, sequences, parts)
        logits: Tensor = self._draft_walk(self._fused, tokens, rows, last)
        return logits

    def _graph(self, rows: int, parts: int) -> Callable[[], object]:
        if (graph := self._graphs.get((rows, parts))) is None:
            graph = self._graphs[rows, parts] = self._captured(rows, parts)
        return graph

    def _captured(self, rows: int, parts: int) -> Callable[[], object]:
        columns = self._inputs[: 6 * rows].view(6, rows)

        def run() -> object:
            read = _fused(columns[0], columns[0], columns[1])
            self._read_walk(self._fused, self._features[:rows], read)
            logits = self._logits(columns[2:], parts)
            return self._best[:rows].copy_(logits.argmax(-1))

        if self._device.type != "cuda":
            return run
        self._recorder = self._recorder or recorder(self._device)
        columns.zero_()
        columns[[*_POSITIONS]] = -1  # what is run to compile, and to record, writes nothing
        try:
            return self._recorder.record(run)[0]
        except RuntimeError as error:
            log.warning("drafts of %d rows run without a graph: %s", rows, error)
            return run


def _fused(tokens: Tensor, positions: Tensor, sequences: Tensor, parts: int = 1) -> FusedBatch:
    return FusedBatch(tokens, positions, sequences, None, None, None, parts)
