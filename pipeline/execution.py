"""Selects how an image phase runs: executable, padded width and cost, and records measured times."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contract.plan import AUTO
from core.batching.cost import CostCurve, CostTable
from core.cuda_graphs import CudaRecorder, GraphCache, Recorder
from core.graphs import CompiledCache, ExecutableKey
from core.ops.cpu import CpuLowering
from pipeline import denoise
from pipeline.families.family import ImageModel
from pipeline.families.sdxl import conditioning as text
from pipeline.families.sdxl.parts import tokenizers
from pipeline.phases import (
    DEEP,
    ENCODE,
    GRAPHS,
    IMAGE,
    KERNELS,
    LAYERS,
    SHALLOW,
    STEPS,
    TEXT,
    TEXT_WIDTHS,
    VAE,
    VAE_ROWS,
    VAE_WIDTHS,
    likeliest,
    on_gpu,
    on_kernels,
    on_torch,
    without_text,
)
from pipeline.recording import GraphSet


class BatchGroup(NamedTuple):
    """Requests that may share a forward. `mode` separates deterministic requests, "eager" and "compiled".

    `adapted`: those with their own LoRAs, which run on torch only.
    """

    phase: str
    size: tuple[int, int]  # (width, height) in pixels; (0, 0) where irrelevant
    mode: str = ""
    adapted: bool = False


class ExecutionPlan(NamedTuple):
    """A way to run an iteration: `rows` includes padding, `seconds` is the expected time."""

    function: Callable[..., Any]
    compiled: bool
    rows: int
    seconds: float


class ImageExecution:
    """The executables of one model, and their cost curves."""

    def __init__(
        self,
        model: ImageModel,
        *,
        buckets: Sequence[int],
        deterministic_rows: int,
        compiled: bool,
        cache: Path | None,
        kernels: ctypes.CDLL | None = None,
        fused: bool = False,
        frugal: bool = False,
        adapted: ImageModel | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`kernels` are the CPU kernels for UNet and VAE, if there are any: then nothing is compiled.

        `fused`: everything runs on fused layers, recorded by `recorder` (default: as CUDA graphs on a GPU, not at all
        elsewhere). `frugal`: the model's own weights are dropped once they are packed for the CPU kernels. `adapted` is
        the model for requests with LoRAs: it keeps the UNet's weights. Raises `ModelError` for a model that kernels or
        layers do not support.
        """
        self.deterministic_rows = deterministic_rows
        self._model = model
        self._buckets = sorted({*buckets, deterministic_rows}, reverse=True)
        self._costs = CostTable(guess_s=0.05)
        self.programs = kernels is not None
        self._recordings: GraphSet | None = None
        self._timed: set[ExecutableKey] = set()  # shapes that ran without their graph, and are warm
        networks = on_torch(model)
        phases = networks.phases
        self._adapted = None if adapted is None else on_torch(adapted)
        if fused:
            networks = on_gpu(model, self._buckets[0])
            phases = networks.phases
            if recorder is None and model.device.type == "cuda":
                recorder = CudaRecorder(model.device)
            steps = dict.fromkeys(STEPS, self._buckets[::-1])
            self._recordings = GraphSet(GraphCache(phases, recorder), {**steps, VAE: VAE_WIDTHS, TEXT: TEXT_WIDTHS})
        if kernels is not None:
            networks = on_kernels(model, kernels)
            phases = networks.phases
            if frugal:
                for part in (networks.denoiser, networks.decoder) if adapted is None else (networks.decoder,):
                    assert isinstance(part.lowering, CpuLowering)
                    part.lowering.layers.release()
        self._networks = networks
        self._executables = CompiledCache(
            phases,
            compiled=compiled and model.device.type == "cpu" and kernels is None and not fused,
            cache=cache,
        )

    def metadata(self, mode: str, *, adapted: bool) -> str:
        """The executables that a request of this mode may have used, for its fingerprint."""
        own = KERNELS if self.programs else GRAPHS if self._recordings is not None else ""
        if adapted and own:
            return f"eager and {own}"
        return mode or own or ("eager or compiled" if self._executables.enabled else "eager")

    def deterministic_mode(self, size: tuple[int, int], depth: str = "", *, adapted: bool = False) -> str:
        """The mode for a deterministic request that begins now, which it keeps: compiled, or in CUDA graphs, once all
        that it needs is compiled or recorded.

        cuBLAS and cuDNN may choose other algorithms while a graph is recorded, so that bits differ from the same
        kernels launched one by one. `depth` is that of its shallow steps, if it has any.
        """
        if adapted:
            return "eager"
        if self.programs:
            return KERNELS
        steps = (DEEP, SHALLOW[depth]) if depth else (DEEP,)
        keys = (*(ExecutableKey(phase, self.deterministic_rows, size) for phase in steps), ExecutableKey(VAE, 1, size))
        if self._recordings is not None:
            return GRAPHS if all(self._recordings.has(key) for key in keys) else LAYERS
        return "eager" if any(self._executables.find(key) is None for key in keys) else "compiled"

    def cheapest(self, group: BatchGroup, rows: int) -> ExecutionPlan:
        """The cheapest way to run an iteration of so many rows. For a mode, always the same bucket and executable."""
        phase, size, mode, adapted = group
        if phase in (ENCODE, IMAGE):
            return ExecutionPlan(self._nothing, False, rows, self._curve(group, False)(rows))
        if adapted:
            bucket = self.deterministic_rows if mode else rows
            assert self._adapted is not None
            return ExecutionPlan(self._adapted.phases[phase], False, bucket, self._curve(group, False)(bucket))
        eager = self._executables.eager(phase)
        if self.programs:  # a row's bits do not depend on the batch: no padding
            return ExecutionPlan(eager, False, rows, self._curve(group._replace(mode=""), False)(rows))
        if self._recordings is not None:
            return self._graphed(self._recordings, group, self._key(self._recordings, group, rows))
        if mode:
            bucket = self.deterministic_rows if phase in STEPS else 1
            fixed = self._executables.find(ExecutableKey(phase, bucket, size)) if mode == "compiled" else None
            if fixed is None:
                return ExecutionPlan(eager, False, bucket, self._curve(group, False)(bucket))
            return ExecutionPlan(fixed, True, bucket, self._curve(group, True)(bucket))
        best = ExecutionPlan(eager, False, rows, self._curve(group, False)(rows))
        for bucket in self._executables.buckets(phase, size):
            if bucket < rows:
                continue
            found, curve = self._executables.find(ExecutableKey(phase, bucket, size)), self._curve(group, True)
            # An executable without a measured time is used once, to measure it.
            if found is not None and (bucket not in curve.measured or curve(bucket) < best.seconds):
                best = ExecutionPlan(found, True, bucket, curve(bucket))
            break
        return best

    def choose(self, group: BatchGroup, rows: int) -> ExecutionPlan:
        """`cheapest`, for an iteration that now runs so: a missing graph is recorded next."""
        if self._recordings is not None and group.phase not in (ENCODE, IMAGE) and not group.adapted:
            self._recordings.missed(self._key(self._recordings, group, rows))
        return self.cheapest(group, rows)

    def feature_shapes(self, depth: str, size: tuple[int, int], *, adapted: bool = False) -> list[tuple[int, ...]]:
        """The shape of one row of each feature map that a shallow step of this depth reads, as `deep` returns it."""
        scale = self._model.vae_scale
        return self._networks.denoiser.feature_shapes(depth, size[1] // scale, size[0] // scale)

    @property
    def text_width(self) -> int:
        """Channels of what the denoiser reads of one token of text."""
        return self._networks.denoiser.text_width

    @torch.inference_mode()
    def prepare_text(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the denoiser computes of the text alone, [B, T, D] to [B, T, width]."""
        return self._networks.denoiser.prepare_text(hidden)

    @torch.inference_mode()
    def adapted_text(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same for requests with LoRAs."""
        assert self._adapted is not None
        return self._adapted.denoiser.prepare_text(hidden)

    def embed(self, ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """`embed` of this model: token ids [B, T] of each encoder to [B, T, D] and [B, P].

        The results may be overwritten by the next call of any method.
        """
        if self._recordings is None:
            return text.embed(self._model, ids)
        rows = len(ids[0])
        key = ExecutableKey(TEXT, self._recordings.width(TEXT, rows), (0, 0))
        padded = [torch.cat([part, *[part[:1]] * (key.rows - rows)]).to(self._model.device) for part in ids]
        # Not later: embeddings are cached, and must not depend on when they were computed.
        self._recordings.record_now(key, self._record)
        hidden, pooled = self._recordings.function(key)(padded)
        return hidden[:rows], pooled[:rows]

    def synchronize(self) -> None:
        """Wait for all work this thread has submitted, so that measured times include it."""
        if self._model.device.type == "cuda":
            torch.cuda.current_stream(self._model.device).synchronize()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode finished latents to uint8 [B, H, W, 3], without compiled code."""
        pixels: torch.Tensor = self._executables.eager(VAE)(latents)
        return pixels

    def observe(self, group: BatchGroup, rows: int, compiled: bool, seconds: float) -> None:
        """Update a cost curve with an iteration's time, except the first of a shape without its graph, which
        compiles.
        """
        key = ExecutableKey(group.phase, rows, group.size)
        if self._recordings is not None and not compiled and key not in self._timed:
            self._timed.add(key)
            return
        self._curve(group, compiled).observe(rows, seconds)

    def prepare(self, size: tuple[int, int] | None = None, *, measure_s: float = 0.0) -> None:
        """Request compiled executables at a size (default: the native one), and time what runs now.

        Timing stops after `measure_s` seconds, the most likely widths first; the rest is learnt from the first
        requests. CUDA graphs are recorded within this time; remaining ones stay `pending`, for `record_next`. Not to be
        called while the engine runs.
        """
        size = size or (self._model.native, self._model.native)
        shallow = SHALLOW[AUTO.depth]
        steps = [*product((DEEP, shallow), self._buckets)]
        for phase, rows in [*steps, (VAE, 1), (VAE, VAE_ROWS)]:
            self._executables.want(ExecutableKey(phase, rows, size), self._example(phase, rows, size))
        until = time.monotonic() + measure_s
        if self._recordings is not None and self._recordings.records:
            self._recordings.plan(likeliest(self._buckets, size))
            while time.monotonic() < until and self.record_next():
                pass
            return
        decodes = product((VAE,), VAE_WIDTHS[1:] if self._recordings is not None else (VAE_ROWS,))
        # Other depths last: they are rarely requested.
        others = product((phase for phase in SHALLOW.values() if phase != shallow), self._buckets)
        for phase, rows in [(VAE, 1), (DEEP, 2), (shallow, 2), *steps, *decodes, *others]:
            key = ExecutableKey(phase, rows, size)
            if self._recordings is not None:
                ways = [(self._function(key), True)]
            else:
                found = self._executables.find(key)
                ways = [(self._executables.eager(phase), False), *([] if found is None else [(found, True)])]
            for fn, compiled in ways:
                if not self._measure(key, fn, compiled, 3, until):
                    return

    def _measure(self, key: ExecutableKey, fn: Any, compiled: bool, runs: int, until: float = float("inf")) -> bool:
        """Observe the times of all runs but the first, which is warm-up. False if `until` came before the last."""
        size: Any = key.size
        example = self._example(key.phase, key.rows, size)
        for run in range(runs):
            if time.monotonic() >= until:
                return False
            started = time.perf_counter()
            with torch.inference_mode():
                example(fn)
                self.synchronize()
            if run:  # also the first replay of a graph is slow: it uploads the graph to the device
                self.observe(BatchGroup(key.phase, size), key.rows, compiled, time.perf_counter() - started)
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until all requested executables are compiled or have failed."""
        return self._executables.wait(timeout_s)

    @property
    def size_bytes(self) -> dict[str, int]:
        """Bytes of the CPU kernels' packed weights, and of each program's buffers; empty without them.

        Programs of one network share buffers: together they use what the largest needs.
        """
        unet, decoder = self._networks.denoiser.lowering, self._networks.decoder.lowering
        if not isinstance(unet, CpuLowering) or not isinstance(decoder, CpuLowering):
            return {}
        weights, buffers = unet.size_bytes
        names = {"deep": DEEP, **SHALLOW}
        held = {
            f"{names[name]} × {shape[0]}, latents {shape[2]}x{shape[1]}": size
            for (name, shape), size in buffers.items()
            if name in names
        }
        return {f"{self._model.family.denoiser} weights": weights, "vae weights": decoder.size_bytes[0], **held}

    def costs(self) -> dict[Any, Mapping[int, float]]:
        """Measured seconds by rows, for each (phase, size, compiled), without LoRAs."""
        measured: dict[Any, Mapping[int, float]] = {**self._costs.measured()}
        return {key[:3]: curve for key, curve in measured.items() if not key[3]}

    def close(self) -> None:
        self._executables.close()

    @property
    def pending(self) -> bool:
        """Whether graphs are still to be recorded."""
        return self._recordings is not None and self._recordings.pending

    @property
    def graphs(self) -> tuple[int, int]:
        """How many graphs are recorded, and how many are wanted; (0, 0) without CUDA graphs."""
        return (0, 0) if self._recordings is None else self._recordings.counts

    def record_next(self) -> bool:
        """Record and time the most needed graph; False if none is left. On the thread that runs phases."""
        return self._recordings is not None and self._recordings.record_next(self._record)

    def _record(self, key: ExecutableKey, record: Callable[..., Any]) -> None:
        size: Any = key.size  # (width, height); None for `TEXT`
        with torch.inference_mode():
            self._example(key.phase, key.rows, size)(without_text(key.phase, record))
        if key.phase != TEXT:
            self._measure(key, self._function(key), True, 2)

    def _key(self, recordings: GraphSet, group: BatchGroup, rows: int) -> ExecutableKey:
        """The graph for so many rows. For deterministic requests always the same one.

        Costs are queried for more rows than any forward has; nothing wider than the widest graph ever runs.
        """
        phase, size, mode, _ = group
        if mode:
            return ExecutableKey(phase, self.deterministic_rows if phase in STEPS else 1, size)
        return ExecutableKey(phase, recordings.width(phase, rows), size)

    def _graphed(self, recordings: GraphSet, group: BatchGroup, key: ExecutableKey) -> ExecutionPlan:
        """The graph; while it is missing, the next wider one if that is known to cost less, else the same kernels at
        the same width one by one. A mode keeps one width, and either graphs or none.
        """
        graph, eager = self._curve(group, True), self._curve(group, False)
        if group.mode == LAYERS:
            return ExecutionPlan(self._executables.eager(group.phase), False, key.rows, eager(key.rows))
        if recordings.has(key):
            return ExecutionPlan(self._function(key), True, key.rows, graph(key.rows))
        # Until it is timed it is assumed as fast as a graph, and so is timed.
        measured = key.rows in eager.measured
        seconds = eager(key.rows) if measured or not graph.measured else graph(key.rows)
        wider = None if group.mode or not measured else recordings.wider(key)
        if wider is not None and graph(wider.rows) < seconds:
            return ExecutionPlan(self._function(wider), True, wider.rows, graph(wider.rows))
        return ExecutionPlan(self._function(key), False, key.rows, seconds)

    def _function(self, key: ExecutableKey) -> Callable[..., Any]:
        assert self._recordings is not None
        return without_text(key.phase, self._recordings.function(key))

    def _curve(self, group: BatchGroup, compiled: bool) -> CostCurve:
        return self._costs[group.phase, group.size, compiled, group.adapted]

    def _example(self, phase: str, rows: int, size: tuple[int, int], seed: int = 0) -> Callable[[Any], Any]:
        """A call of the phase with random inputs of the right shapes; for `TEXT` with no words."""
        model = self._model
        latents = (rows, model.latent_channels, size[1] // model.vae_scale, size[0] // model.vae_scale)
        depth = next((depth for depth, shallow in SHALLOW.items() if shallow == phase), None)
        features = [] if depth is None else self.feature_shapes(depth, size)

        # A generator of its own: a failed recording may leave the device's default one unusable.
        generator = torch.Generator(model.device).manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=model.device, dtype=model.dtype, generator=generator)

        def call(fn: Any) -> Any:
            if phase == TEXT:
                read = [tokenizer.model_max_length for tokenizer in tokenizers(model)]
                return fn([torch.zeros(rows, tokens, dtype=torch.long, device=model.device) for tokens in read])
            if phase == VAE:
                return fn(random(*latents).float())
            inputs = denoise.DenoiserInputs(
                random(*latents),
                torch.full((rows,), 500.0, device=model.device),
                model.family.example(model, self.text_width, rows, generator),
            )
            if phase == DEEP:
                return model.family.call(fn, inputs)
            return model.family.call(fn, inputs, tuple(random(rows, *shape) for shape in features))

        return call

    @staticmethod
    def _nothing(*_: Any) -> Any:
        raise AssertionError("prompts and images are not encoded through an executable")
