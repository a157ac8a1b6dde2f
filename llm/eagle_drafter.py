"""Drafts token by token by an EAGLE-3 head (`llm.eagle`), behind the protocol of `llm.drafts`."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from core.cuda_graphs import CudaRecorder
from core.kernels.cpu.token_program import TokenPositions
from core.kernels.cuda.decode_kernel import part_count
from core.kernels.kv_cache import PAGE, Kind, KVCache, TokenBatch, on_device
from core.ops.cpu_arrays import Array as CpuArray
from core.ops.cpu_tokens import CpuTokenOps
from core.ops.cuda_tokens import CudaTokenOps, FusedBatch, Residual
from core.ops.packed import PackedLayers
from core.ops.trace import TraceOps
from core.quant.dynamic import Int8DynamicLinear
from llm import eagle, family
from llm.drafts import DraftRequest, companion_cache
from llm.eagle import EagleDecoder, EagleNetwork
from llm.execution import FUSED, TextExecution
from llm.load import TextModel, TextModelError
from llm.sequence import SequenceState
from llm.speculate import MOST, NO_GUESS, DraftTokens
from llm.step_graphs import bucket, recorder, rung
from llm.torch_ops import TorchTokenOps

log = logging.getLogger(__name__)

_COST = 0.12  # of a guess relative to a forward, where load may not decide
_WIDTH = -(-(MOST + 1) // 4) * 4  # unread rows of a sequence in a graph, aligned as kernels want
_GRAPHED = 8  # sequences at most: more of them are not guessed for on a GPU, or rarely


@dataclass(frozen=True, eq=False)
class EagleDraft:
    """The weights of an `EagleDrafter`."""

    name: str
    network: EagleNetwork
    lookahead = 1

    @classmethod
    def read(cls, folder: Path, model: TextModel) -> EagleDraft:
        """Read a published checkpoint for a model. Raises `TextModelError` for one that does not fit it."""
        return cls(folder.resolve().name, eagle.load(folder, model))

    @property
    def features(self) -> tuple[int, ...]:
        return self.network.sources

    def __call__(
        self, execution: TextExecution, *, pages: int, sequences: int, context: int, rows: int, kv: Kind,
        kernels: ctypes.CDLL | None,
    ) -> EagleDrafter:  # fmt: skip
        """Make the drafter; see `DrafterFactory`."""
        cache = companion_cache(
            self.name, execution, self.network.config, layers=1, head_dim=self.network.midlayer.self_attn.head_dim,
            pages=pages, sequences=sequences, context=context, kv=kv,
        )  # fmt: skip
        embedding = execution.model.network.get_input_embeddings()
        try:
            if execution.packed is not None:
                steps: Steps = _Programs(self.network, embedding, cache, execution.packed)
            else:
                steps = (_Graphs if execution.kind == FUSED else Steps)(self.network, embedding, cache)
        except ValueError as error:
            raise TextModelError(f"draft {self.name}: {error}") from error
        return EagleDrafter(self, cache, steps)


class EagleDrafter:
    """A `llm.drafts.Drafter` that guesses a chain: each token the most likely one after those before it."""

    lookahead, reads, at_once, most, cost = 1, True, False, MOST, _COST

    def __init__(self, draft: EagleDraft, cache: KVCache, steps: Steps) -> None:
        self.features, self.prepare, self.release = draft.features, steps.prepare, steps.release
        self._cache, self._steps = cache, steps

    @property
    def size_bytes(self) -> int:
        return self._steps.size_bytes + self._cache.size_bytes

    def limit(self, work: SequenceState, count: int) -> int:
        return min(count, MOST)

    def kept(self, count: int, accepted: int) -> int:
        """None: keys and values of guesses are those of guessed states."""
        return 0

    @torch.inference_mode()
    def guess(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        self._cache.settle()
        only_read = [r for r in requests if not r.count and r.stop > r.read]
        if only_read:
            self._steps(*_unread(only_read), [])
        guessing = [r for r in requests if r.count and r.stop > r.read]
        if not guessing:
            return [NO_GUESS if not r.count else DraftTokens([]) for r in requests]
        drafts = iter(self._steps(*_unread(guessing), [r.count for r in guessing]))
        return [NO_GUESS if not r.count else DraftTokens(next(drafts) if r.stop > r.read else []) for r in requests]


Rows = np.ndarray[Any, np.dtype[np.int32]]


def _unread(requests: Sequence[DraftRequest]) -> tuple[Tensor, Rows, list[int]]:
    """The features of all unread positions [R, ...]; the tokens after them, the positions and sequences [3, R]; and
    how many of them each request has.
    """
    features = [r.features for r in requests if r.features is not None]
    columns = (
        [token for r in requests for token in r.tokens[r.read + 1 : r.stop + 1]],
        [position for r in requests for position in range(r.read, r.stop)],
        [r.row for r in requests for _ in range(r.read, r.stop)],
    )
    both = features[0] if len(features) == 1 else torch.cat(features)
    return both, np.array(columns, np.int32), [r.stop - r.read for r in requests]


class Steps:
    """Runs the head by torch."""

    def __init__(self, network: EagleNetwork, embedding: Any, cache: KVCache) -> None:
        self._angles = family.angles(network, cache.table.shape[1] * PAGE, cache.table.device)
        self._network, self._decoder, self._cache = network, EagleDecoder.of(network, embedding), cache
        self._words = torch.arange(len(network.d2t), device=network.d2t.device) + network.d2t
        self._ops: Any = TorchTokenOps(cache, self._angles)

    @property
    def size_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._network.parameters())

    def prepare(self, sequences: int) -> None:
        """Nothing to prepare."""

    def release(self) -> None:
        """Nothing to free."""

    def __call__(self, features: Tensor, columns: Rows, unread: list[int], counts: list[int]) -> list[list[int]]:
        """Read the unread positions of each sequence, then guess `counts` tokens of each; none: only read."""
        device = features.device
        tokens, positions, sequences = on_device(torch.from_numpy(columns), device)
        states = self._first(features, tokens, positions, sequences)
        drafts: list[list[int]] = [[] for _ in counts]
        live = list(range(len(counts)))
        picked = (np.cumsum(unread) - 1).tolist()
        for turn in range(max(counts, default=0)):
            index = torch.tensor(picked, device=device)
            x, positions, sequences = states[index], positions[index] + 1, sequences[index]
            tokens = self._words[self._logits(x, index).argmax(-1)]
            for i, token in zip(live, tokens.tolist(), strict=True):
                drafts[i].append(token)
            picked = [place for place, i in enumerate(live) if counts[i] > turn + 1]
            live = [live[place] for place in picked]
            if not live:
                break
            index = torch.tensor(picked, device=device)
            positions, sequences = positions[index], sequences[index]
            states = self._next(tokens[index], x[index], positions, sequences)
            picked = list(range(len(live)))
        return drafts

    def _first(self, features: Tensor, tokens: Tensor, positions: Tensor, sequences: Tensor) -> Tensor:
        return self._next(tokens, self._network.fc(features), positions, sequences)

    def _next(self, tokens: Tensor, x: Tensor, positions: Tensor, sequences: Tensor) -> Tensor:
        """States [R, C] after these tokens, of the states x of the positions before them."""
        rows = TokenBatch(tokens, positions, sequences, tokens[:0])
        states: Tensor = eagle.draft(self._ops, self._decoder, tokens, x, rows)
        return states

    def _logits(self, x: Tensor, index: Tensor) -> Tensor:
        """Logits of states x, which are rows `index` of those computed last."""
        logits: Tensor = eagle.logits(self._ops, self._decoder, x)
        return logits


class _Program(NamedTuple):
    """The head as CPU kernels for some rows."""

    ops: CpuTokenOps
    inputs: Tensor  # int32 [3, R]: tokens, positions, sequences
    x: CpuArray  # features [R, sources · C] or states [R, C]
    states: CpuArray
    logits: CpuArray | None


class _Programs(Steps):
    """Runs the head as programs of CPU kernels, in INT8 scaled by row: what a rounded head guesses is verified too."""

    def __init__(self, network: EagleNetwork, embedding: Any, cache: KVCache, packed: PackedLayers) -> None:
        """`packed` are the model's layers. Raises ValueError for unsupported ones."""
        super().__init__(network, embedding, cache)
        rounded: list[nn.Module] = []

        def in_int8(layer: nn.Linear) -> nn.Module:
            rounded.append(Int8DynamicLinear.of(layer, None))
            return rounded[-1]

        self._decoder, self._fc = EagleDecoder.of(network, embedding, in_int8), in_int8(network.fc)
        self._layers = PackedLayers(packed.library, nn.ModuleList(rounded))
        self._new = partial(CpuTokenOps, packed.library, self._layers, cache, self._angles)
        self._programs: dict[tuple[int, bool, bool], _Program] = {}
        self._ran = self._program(1, True, True)  # packs all layers, and finds any that are unsupported

    @property
    def size_bytes(self) -> int:
        return self._layers.size_bytes

    def prepare(self, sequences: int) -> None:
        for rows in range(1, MOST + 2):
            self._program(rows, True, True)
        self._program(1, False, True)

    def release(self) -> None:
        self._layers.release()

    def __call__(self, features: Tensor, columns: Rows, unread: list[int], counts: list[int]) -> list[list[int]]:
        if len(counts) != 1:
            self._speaks = bool(counts)
            return super().__call__(features, columns, unread, counts)
        program = self._run(torch.from_numpy(columns), features, True, True)  # of one user: nothing is gathered
        drafts: list[int] = []
        inputs = torch.from_numpy(columns[:, -1:].copy())
        while True:
            assert program.logits is not None
            token = int(self._words[int(program.logits.x[-1].argmax())])
            drafts.append(token)
            if len(drafts) == counts[0]:
                return [drafts]
            inputs[0], inputs[1] = token, inputs[1] + 1
            program = self._run(inputs, program.states.x[-1:].clone(), False, True)

    def _first(self, features: Tensor, tokens: Tensor, positions: Tensor, sequences: Tensor) -> Tensor:
        inputs = torch.stack([tokens, positions, sequences])
        return self._run(inputs, features, True, self._speaks).states.x.clone()

    def _next(self, tokens: Tensor, x: Tensor, positions: Tensor, sequences: Tensor) -> Tensor:
        inputs = torch.stack([tokens.int(), positions, sequences])
        return self._run(inputs, x, False, True).states.x.clone()

    def _logits(self, x: Tensor, index: Tensor) -> Tensor:
        assert self._ran.logits is not None
        return self._ran.logits.x[index]

    def _run(self, inputs: Tensor, x: Tensor, first: bool, speaks: bool) -> _Program:
        self._ran = program = self._programs.get((len(x), first, speaks)) or self._program(len(x), first, speaks)
        program.inputs.copy_(inputs)
        program.x.x.copy_(x)
        program.ops.program.run()
        return program

    def _program(self, count: int, first: bool, speaks: bool) -> _Program:
        ops: Any = self._new()
        inputs = ops.program.buffer(3, count, dtype=torch.int32)
        tokens, positions, sequences = inputs
        width = self._network.fc.in_features if first else self._network.fc.out_features
        x = ops.input((count, width))
        rows = TokenPositions(positions, sequences, self._cache.table)
        start = ops.linear(x, self._fc) if first else x
        states = eagle.draft(ops, self._decoder, CpuArray(tokens, (count,), None), start, rows)
        logits = eagle.logits(ops, self._decoder, states) if speaks else None
        program = self._programs[count, first, speaks] = _Program(ops, inputs, x, states, logits)
        return program


class _Graphs(Steps):
    """Runs the head as fused kernels: all steps of a chain in one CUDA graph, by the number of sequences and steps."""

    def __init__(self, network: EagleNetwork, embedding: Any, cache: KVCache) -> None:
        super().__init__(network, embedding, cache)
        self._ops = CudaTokenOps(embedding.weight.dtype, cache, self._angles)
        followed, width = TraceOps(), network.fc.out_features
        eagle.logits(followed, self._decoder, eagle.draft(followed, self._decoder, (1,), (1, width), None))
        for call in followed.calls:  # joined weights exist before anything is recorded
            self._ops.pack(call.operation, call.layers)
        self._device, self._parts = cache.table.device, 1
        self._reach = rung(part_count(cache.table.shape[1] * PAGE))
        rows = _GRAPHED * _WIDTH
        # Of rows: tokens, positions, sequences; of sequences: the last row, and how many guesses are made.
        self._inputs = torch.zeros(3 * rows + 2 * _GRAPHED, dtype=torch.int32, device=self._device)
        self._features = torch.zeros(rows, network.fc.in_features, dtype=embedding.weight.dtype, device=self._device)
        self._drafts = torch.zeros(MOST, _GRAPHED, dtype=torch.int64, device=self._device)
        self._graphs: dict[tuple[int, int, int], Callable[[], object]] = {}
        self._recorder: CudaRecorder | None = None

    def prepare(self, sequences: int) -> None:
        for steps in range(MOST, 0, -1):
            self._graph(1, steps, self._reach)
        if self._recorder is not None:
            self._recorder.settle()

    def __call__(self, features: Tensor, columns: Rows, unread: list[int], counts: list[int]) -> list[list[int]]:
        count, steps = bucket(len(counts)) or _GRAPHED + 1, max(counts, default=0)
        if not steps or count > _GRAPHED or max(unread) > _WIDTH:
            self._parts = rung(part_count(int(columns[1].max()) + 1 + steps))
            return super().__call__(features, columns, unread, counts)
        inputs = np.zeros((3, count * _WIDTH), np.int32)
        inputs[1] = -1
        places = [i * _WIDTH + j for i, own in enumerate(unread) for j in range(own)]
        inputs[:, places] = columns
        ends = np.zeros((2, count), np.int32)
        ends[0, : len(unread)] = np.arange(len(unread)) * _WIDTH + np.array(unread) - 1
        ends[1, : len(counts)] = counts
        staged = torch.from_numpy(np.concatenate([inputs.ravel(), ends.ravel()]))
        graph = self._graph(count, steps, self._reach)
        self._inputs[: len(staged)].copy_(on_device(staged, self._device), non_blocking=True)
        self._features[on_device(torch.tensor(places), self._device)] = features.to(self._features.dtype)
        graph()
        drafts = self._drafts[:steps, : len(counts)].T.tolist()
        return [draft[:own] for draft, own in zip(drafts, counts, strict=True)]

    def _chain(self, count: int, steps: int, parts: int) -> None:
        """The whole chain on the device, from `_inputs` and `_features` to `_drafts`. Rows at position -1 write, and
        see, nothing.
        """
        self._parts = parts
        rows = count * _WIDTH
        tokens, positions, sequences = self._inputs[: 3 * rows].view(3, rows)
        last, counts = self._inputs[3 * rows : 3 * rows + 2 * count].view(2, count).long()
        states = self._first(self._features[:rows], tokens, positions, sequences)
        x, positions, sequences = states[last], positions[last], sequences[last].contiguous()
        for turn in range(steps):
            drafted = self._words[self._logits(x, last).argmax(-1)]
            self._drafts[turn, :count].copy_(drafted)
            positions = torch.where(turn + 1 < counts, positions + 1, -1).int()
            if turn + 1 < steps:
                x = self._next(drafted.int(), x, positions, sequences)

    def _next(self, tokens: Tensor, x: Tensor, positions: Tensor, sequences: Tensor) -> Tensor:
        tokens = tokens.int()
        rows = FusedBatch(tokens, positions, sequences, None, None, None, self._parts)
        states = eagle.draft(self._ops, self._decoder, tokens, Residual(x.clone()), rows)
        if states.sums is not None:
            states.x += states.sums.whole().to(states.x.dtype)
        whole: Tensor = states.x
        return whole

    def _logits(self, x: Tensor, index: Tensor) -> Tensor:
        logits: Tensor = eagle.logits(self._ops, self._decoder, Residual(x))
        return logits

    def _graph(self, count: int, steps: int, parts: int) -> Callable[[], object]:
        if (graph := self._graphs.get((count, steps, parts))) is None:
            graph = self._graphs[count, steps, parts] = self._captured(count, steps, parts)
        return graph

    def _captured(self, count: int, steps: int, parts: int) -> Callable[[], object]:
        run = partial(self._chain, count, steps, parts)
        if self._device.type != "cuda":
            return run
        self._recorder = self._recorder or recorder(self._device)
        rows = count * _WIDTH
        self._inputs.zero_()
        self._inputs[rows : 2 * rows].fill_(-1)  # what is run to compile, and to record, writes nothing
        try:
            return self._recorder.record(run)[0]
        except RuntimeError as error:
            log.warning("drafts of %d steps run without a graph: %s", steps, error)
            return run
