"""The backend of fused layers in CUDA graphs, which are recorded in the background of live requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from core.cuda_graphs import CudaRecorder, GraphCache, Recorder
from core.graphs import ExecutableKey
from core.ops.branches import LowRank
from core.ops.cuda import CudaLowering
from core.ops.cuda_branches import BranchShape, CudaBranches
from core.ops.ops import Lowering
from core.transfers import to_device
from pipeline.backends.backend import BatchGroup, ExecutionPlan, ImageBackend, Widths, planned
from pipeline.backends.graph_choice import NARROW, GraphChoice, worth_recording
from pipeline.backends.phases import (
    DECODES,
    DEEP,
    SHALLOW,
    STEPS,
    TEXT,
    TEXT_WIDTHS,
    VAE_TINY,
    VAE_WIDTHS,
    drop_text_input,
    fixed_rows,
    likeliest,
    on_gpu,
    timed,
)
from pipeline.backends.timing import PhaseCosts, PhaseTimer
from pipeline.extensions.adapters import ScaledAdapter
from pipeline.families.family import ImageModel
from pipeline.fingerprint import KernelIdentity
from pipeline.recording import GraphSet

GRAPHS = "graphs"
LAYERS = "layers"  # the same kernels without graphs, one by one
_CAPACITY = 128  # graphs: about thirty of all widths of a size, or three of each size that is drawn now and then


class GraphBackend(ImageBackend):
    """A backend whose rows are padded to the next recorded width. Until a graph exists, its kernels run one by one.

    Requests with LoRAs of their own share forwards with all others; a forward with any has graphs of its own, so that
    one without is as fast as ever.
    """

    fixed_shapes = True
    packs = True

    def __init__(
        self,
        model: ImageModel,
        widths: Widths | None = None,
        *,
        recorder: Recorder | None = None,
        capacity: int = _CAPACITY,
    ) -> None:
        """`recorder` records the graphs; default: CUDA's on a GPU, elsewhere none are recorded. The `capacity` that
        were used last are kept. Raises `ModelError` for a model that the layers do not support.
        """
        widths = widths or Widths()
        self.model = model
        self.widths = replace(widths, buckets=(*widths.buckets, widths.max_rows))
        networks = on_gpu(model, self.widths.descending[0])
        self.denoiser, self._layers = networks.denoiser, networks.phases
        parts = {model.family.denoiser: self.denoiser.lowering, "vae": networks.decoder.lowering}
        self.lowerings = {part: lowering for part, lowering in parts.items() if isinstance(lowering, CudaLowering)}
        self._lowering = self.lowerings[model.family.denoiser]
        self.kernels = KernelIdentity.on_gpu(model)
        self._sizes = {(0, 0), *model.sizes}
        self.costs = PhaseCosts(skip_first=True)
        self._timer = PhaseTimer(model, self.costs, self.denoiser)
        if recorder is None and model.device.type == "cuda":
            recorder = CudaRecorder(model.device)
        self.recorder = recorder
        steps = dict.fromkeys(STEPS, self.widths.descending[::-1])
        decodes = {phase: VAE_WIDTHS for phase in DECODES.values() if phase in self._layers}
        recorded, self.phases = {**steps, **decodes}, self._layers
        if not model.family.padded:  # prompts of different lengths have no graph in common
            recorded[TEXT] = TEXT_WIDTHS
            self.phases = {**self._layers, TEXT: lambda ids: embed_recorded(self.graphs, model.device, ids)}
        self.graphs = GraphSet(GraphCache(self._layers, recorder, capacity=capacity), recorded, self._record)
        self._choice = GraphChoice(self.graphs, self.costs, self.widths.descending, self._sizes)

    def plan(self, group: BatchGroup, rows: int, *, live: bool = False) -> ExecutionPlan:
        """Return the graph, of the next usual width or a narrower one that paid to be recorded; while it is missing,
        the next wider one if that is known to cost less, else the same kernels at the same width one by one. A mode
        keeps one width, and either graphs or none.
        """
        phase, size, mode, _, chunks, _ = group
        # Costs are queried for more rows than any forward has; nothing wider than the widest graph ever runs.
        width = fixed_rows(phase, self.widths.deterministic_rows) if mode else self.graphs.width(phase, rows)
        key = ExecutableKey(phase, width, size, chunks)
        if live and worth_recording(key, self._sizes):
            self.graphs.missed(key)
        if mode == LAYERS:
            return planned(self, group, width, self._layers[phase])
        if live and not mode:
            self._choice.count(key, rows)
        recorded = self._choice.recorded(key, width if mode else rows)
        if recorded is not None:
            return planned(self, group, recorded, self._function(replace(key, rows=recorded)), True)
        graph, direct = self.costs.curve(phase, size, True), self.costs.curve(phase, size, False)
        # Until it is timed it is assumed as fast as a graph, and so is timed.
        measured = width in direct.measured
        seconds = direct(width) if measured or not graph.measured else graph(width)
        wider = None if mode or not measured else self.graphs.wider(key)
        if wider is not None and graph(wider.rows) < seconds:
            return planned(self, group, wider.rows, self._function(wider), True)
        return ExecutionPlan(self._function(key), False, width, seconds)

    def lowering_for(self, network: Any) -> Lowering:
        return CudaLowering(self.model.dtype, self.widths.descending[0])

    def deterministic_mode(
        self, size: tuple[int, int], depth: str, decode: str, chunks: int = 1, *, controlled: bool = False
    ) -> str:
        """Return graphs, if all that it needs are recorded by now; none of longer texts, nor with controls or LoRAs.

        cuBLAS and cuDNN may choose other algorithms while a graph is recorded, so that bits differ from the same
        kernels launched one by one.
        """
        phases = (DEEP, SHALLOW[depth], decode) if depth else (DEEP, decode)
        keys = (ExecutableKey(phase, fixed_rows(phase, self.widths.deterministic_rows), size) for phase in phases)
        return GRAPHS if chunks == 1 and not controlled and all(self.graphs.has(key) for key in keys) else LAYERS

    def executable(self, mode: str) -> str:
        return LAYERS if mode == LAYERS else GRAPHS

    def prepare(self, size: tuple[int, int] | None = None, *, measure_s: float = 0.0) -> None:
        """Record within this time as well; what remains stays `graphs.pending`."""
        size, widths = size or (self.model.native, self.model.native), self.widths.descending
        until = time.monotonic() + measure_s
        if self.graphs.records:
            self.graphs.plan(likeliest(widths, size))
            while time.monotonic() < until and self.graphs.record_next():
                pass
            return
        for key in timed(widths, size, VAE_WIDTHS[1:], tiny=VAE_TINY in self.phases):
            if not self._timer(key, self._function(key), True, until=until):
                return

    def adapt(self, owners: Sequence[tuple[ScaledAdapter, ...]], *, apart: bool) -> AbstractContextManager[None]:
        rows = [[(use.packed, use.scale) for use in uses if isinstance(use.packed, CudaBranches)] for uses in owners]
        return self._lowering.adapted(rows)

    def pack_adapter(self, factors: Mapping[str, LowRank]) -> CudaBranches:
        return self._lowering.pack_branches(factors)

    def forget_adapters(self) -> None:
        self._lowering.clear_branches()

    def _record(self, key: ExecutableKey, record: Callable[..., Any]) -> None:
        """Record the graph on an example, and time it."""
        size: Any = key.size
        branches = key.variant if isinstance(key.variant, BranchShape) else None
        branch_context = nullcontext() if branches is None else self._lowering.adapted_like(branches)
        with torch.inference_mode(), branch_context:
            self._timer.example(key.phase, key.rows, size, chunks=key.chunks)(
                drop_text_input(self.denoiser, key.phase, record)
            )
        if key.phase != TEXT and branches is None:
            self._timer(key, self._function(key), True, runs=2)
            if key.phase in STEPS and key.rows <= NARROW:  # what the graph saves
                self._timer(key, self._layers[key.phase], False, runs=2)

    def _function(self, key: ExecutableKey) -> Callable[..., Any]:
        """Return the graph of this key, or with LoRAs that of their shape; until it is recorded, its kernels."""

        def run(*arguments: Any, **options: Any) -> Any:
            graph_key, shape = key, self._lowering.branch_shape
            if shape is not None and key.phase in STEPS:
                graph_key = replace(key, variant=shape)
                if worth_recording(graph_key, self._sizes):
                    self.graphs.missed(graph_key)
            return self.graphs.function(graph_key)(*arguments, **options)

        return drop_text_input(self.denoiser, key.phase, run)


def embed_recorded(graphs: GraphSet, device: torch.device, ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run `TEXT`, at the next width of a graph."""
    rows = len(ids[0])
    key = ExecutableKey(TEXT, graphs.width(TEXT, rows), (0, 0))
    padded = [to_device(torch.cat([part, *[part[:1]] * (key.rows - rows)]), device) for part in ids]
    # Not later: embeddings are cached, and must not depend on when they were computed.
    graphs.record_now(key)
    return tuple(part[:rows] for part in graphs.function(key)(padded))
