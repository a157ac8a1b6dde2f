"""How a phase of the picture is run, by which code and at which padded width, and what that costs.

Knows shapes, executables and measured seconds; knows nothing of requests.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from core.batching.cost import CostCurve, CostTable
from core.cuda_graphs import Graphs
from core.graphs import Executables, Key
from core.schedule import AUTO, BLOCK, DEPTHS, RESNET
from pipeline import denoise, encode, vae
from pipeline.folder import ModelError
from pipeline.load import Model
from unet_opt.decoder import DecoderPrograms
from unet_opt.deepcache import Split, shapes
from unet_opt.fused.decoder import FusedDecoder
from unet_opt.fused.network import FusedUNet
from unet_opt.program import UNetPrograms

KERNELS = "kernels"  # of our own, on a CPU
GRAPHS = "graphs"  # of fused layers, on a GPU
ENCODE, DEEP, VAE = "encode", "deep", "vae"
IMAGE = "image"  # what is edited becomes latents
SHALLOW = {BLOCK: "shallow", RESNET: "shallow-resnet"}  # by depth
STEPS = (DEEP, *SHALLOW.values())  # the phases that take a request one step further
VAE_ROWS = 4  # decoding gains nothing from width, and a wide batch makes everyone wait
_VAE_WIDTHS = (1, 2, VAE_ROWS)  # of graphs
_TEXT = "text"  # the encoders' part of `ENCODE`
_TEXT_ROWS = (1, 2, 4, 8, 16, 32)


class Group(NamedTuple):
    """Requests that may share a forward. `mode` sets deterministic requests apart, "eager" and "compiled".

    `adapted`: those with LoRAs of their own, which run on torch alone.
    """

    phase: str
    size: tuple[int, int]  # (width, height) in pixels; (0, 0) where it does not matter
    mode: str = ""
    adapted: bool = False


class Way(NamedTuple):
    """One way to run an iteration: `rows` counts padding, `seconds` is what it is expected to take."""

    function: Callable[..., Any]
    compiled: bool
    rows: int
    seconds: float


class Execution:
    """Executables of one model, and their cost curves."""

    def __init__(
        self,
        model: Model,
        kv_width: int,
        *,
        buckets: Sequence[int],
        deterministic_rows: int,
        compiled: bool,
        cache: Path | None,
        kernels: ctypes.CDLL | None = None,
        fused: bool = False,
        frugal: bool = False,
        adapted: Model | None = None,
    ) -> None:
        """`kernels` are the CPU kernels that UNet and VAE run on, where there are any: then nothing is compiled.

        `fused`: on a GPU all runs on fused layers in CUDA graphs. `frugal`: the model's own weights are let go once
        they are packed for the CPU kernels. `adapted` is the same model as requests with LoRAs need it: it keeps the
        UNet's. Raises `ModelError` for a model that kernels or layers do not know.
        """
        self.deterministic_rows = deterministic_rows
        self._model = model
        self._kv_width = kv_width
        self._buckets = sorted({*buckets, deterministic_rows}, reverse=True)
        self._costs = CostTable(guess_s=0.05)
        self.programs = kernels is not None
        self._packed: tuple[UNetPrograms, DecoderPrograms] | None = None
        self._fused: FusedUNet | None = None
        self._graphs: Graphs | None = None
        phases = _on_torch(model)
        self._adapted = {} if adapted is None else _on_torch(adapted)
        if fused:
            self._fused, on_gpu = _on_gpu(model, self._buckets[0])
            phases |= on_gpu
            self._graphs = Graphs(phases, model.device)
        if kernels is not None:
            self._packed = _packed(model, kernels)
            phases |= _on_kernels(model, *self._packed)
            if frugal:
                for programs in self._packed if adapted is None else self._packed[1:]:
                    programs.layers.release()
        self._executables = Executables(
            phases,
            compiled=compiled and model.device.type == "cpu" and kernels is None and not fused,
            cache=cache,
        )

    def told(self, mode: str, *, adapted: bool) -> str:
        """What a request of this mode may have met on its way, for its fingerprint."""
        own = KERNELS if self.programs else GRAPHS if self._graphs is not None else ""
        if adapted and own:
            return f"eager and {own}"
        return mode or own or ("eager or compiled" if self._executables.enabled else "eager")

    def fixed_way(self, size: tuple[int, int], depth: str = "", *, adapted: bool = False) -> str:
        """The mode for a deterministic request that begins now: compiled once all that it needs is compiled.

        `depth` is that of its shallow steps, if it has any.
        """
        if adapted:
            return "eager"
        if self.programs:
            return KERNELS
        if self._graphs is not None:
            return GRAPHS
        steps = (DEEP, SHALLOW[depth]) if depth else (DEEP,)
        keys = (*(Key(phase, self.deterministic_rows, size) for phase in steps), Key(VAE, 1, size))
        return "eager" if any(self._executables.find(key) is None for key in keys) else "compiled"

    def cheapest(self, group: Group, rows: int) -> Way:
        """How one iteration of so many rows is run. For a mode, always in the same bucket by the same executable."""
        phase, size, mode, adapted = group
        if phase in (ENCODE, IMAGE):
            return Way(self._nothing, False, rows, self._curve(group, False)(rows))
        if adapted:
            bucket = self.deterministic_rows if mode else rows
            return Way(self._adapted[phase], False, bucket, self._curve(group, False)(bucket))
        eager = self._executables.eager(phase)
        if self.programs:  # a row's bits depend neither on its companions nor on their number: nothing is padded
            return Way(eager, False, rows, self._curve(group._replace(mode=""), False)(rows))
        if self._graphs is not None:
            bucket = self._bucket(phase, rows, fixed=bool(mode))
            return Way(self._graph(phase, bucket, size), True, bucket, self._curve(group, True)(bucket))
        if mode:
            bucket = self.deterministic_rows if phase in STEPS else 1
            fixed = self._executables.find(Key(phase, bucket, size)) if mode == "compiled" else None
            if fixed is None:
                return Way(eager, False, bucket, self._curve(group, False)(bucket))
            return Way(fixed, True, bucket, self._curve(group, True)(bucket))
        best = Way(eager, False, rows, self._curve(group, False)(rows))
        for bucket in self._executables.buckets(phase, size):
            if bucket < rows:
                continue
            found, curve = self._executables.find(Key(phase, bucket, size)), self._curve(group, True)
            # An executable that was never timed is taken once, to be timed.
            if found is not None and (bucket not in curve.measured or curve(bucket) < best.seconds):
                best = Way(found, True, bucket, curve(bucket))
            break
        return best

    def feature_shapes(self, depth: str, size: tuple[int, int], *, adapted: bool = False) -> list[tuple[int, int, int]]:
        """What a shallow step of this depth reads: the shape of one row of each map, as `deep` returns it."""
        scale = self._model.vae_scale
        found = shapes(self._model.unet, depth, size[1] // scale, size[0] // scale)
        channels_last = (self.programs or self._fused is not None) and not adapted
        return [(height, width, channels) if channels_last else (channels, height, width)
                for channels, height, width in found]  # fmt: skip

    def keys(self, hidden: torch.Tensor, torch_keys: denoise.PackedKeys) -> torch.Tensor:
        """`PackedKeys` by our own kernels; by torch's without them."""
        if self._fused is not None:
            with torch.inference_mode():
                return self._fused.keys(hidden)
        return torch_keys(hidden) if self._packed is None else self._packed[0].keys(hidden)

    def embed(self, ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """`encode.embed` of this model: token ids [B, T] of each encoder to [B, T, D] and [B, P].

        They may lie in memory that the next call of anything here overwrites.
        """
        if self._graphs is None:
            return encode.embed(self._model, ids)
        rows = len(ids[0])
        bucket = next((count for count in _TEXT_ROWS if count >= rows), rows)
        padded = [torch.cat([part, *[part[:1]] * (bucket - rows)]).to(self._model.device) for part in ids]
        hidden, pooled = self._graphs.run(_TEXT, bucket, padded)
        return hidden[:rows], pooled[:rows]

    def synchronize(self) -> None:
        """Wait until all that this thread asked for is done, so that a clock tells what it took."""
        if self._model.device.type == "cuda":
            torch.cuda.current_stream(self._model.device).synchronize()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pictures of finished latents, uint8 [B, H, W, 3], without compiled code."""
        pixels: torch.Tensor = self._executables.eager(VAE)(latents)
        return pixels

    def observe(self, group: Group, rows: int, compiled: bool, seconds: float) -> None:
        """Refine a curve by what an iteration took."""
        self._curve(group, compiled).observe(rows, seconds)

    def prepare(self, size: tuple[int, int] | None = None, *, measure_s: float = 0.0) -> None:
        """Ask for compiled executables at a size (default: the native one), and time what runs now.

        Timing stops after `measure_s` seconds, the likeliest widths first; what was not reached is learnt from the
        first requests. Not to be called while the engine runs.
        """
        size = size or (self._model.native, self._model.native)
        shallow = SHALLOW[AUTO.depth]
        steps = [(phase, rows) for phase in (DEEP, shallow) for rows in self._buckets]
        for phase, rows in [*steps, (VAE, 1), (VAE, VAE_ROWS)]:
            self._executables.want(Key(phase, rows, size), self._example(phase, rows, size))
        if self._graphs is not None and measure_s > 0:
            self._record_text()
        until = time.monotonic() + measure_s
        # Other depths last: few ask for them.
        others = [phase for phase in SHALLOW.values() if phase != shallow]
        decodes = [(VAE, rows) for rows in (_VAE_WIDTHS[1:] if self._graphs is not None else (VAE_ROWS,))]
        steps = [(DEEP, 2), (shallow, 2), *steps, *decodes, *((p, r) for p in others for r in self._buckets)]
        for phase, rows in [(VAE, 1), *steps]:
            example = self._example(phase, rows, size)
            if self._graphs is not None:
                ways = [(self._graph(phase, rows, size), True)]
            else:
                found = self._executables.find(Key(phase, rows, size))
                ways = [(self._executables.eager(phase), False), *([] if found is None else [(found, True)])]
            for fn, compiled in ways:
                for run in range(3):
                    if time.monotonic() >= until:
                        return
                    started = time.perf_counter()
                    with torch.inference_mode():
                        example(fn)
                        self.synchronize()
                    if run:  # the first one warms up and does not count
                        self.observe(Group(phase, size), rows, compiled, time.perf_counter() - started)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until all that was asked for is compiled or has failed to compile."""
        return self._executables.wait(timeout_s)

    @property
    def size_bytes(self) -> dict[str, int]:
        """Bytes of the CPU kernels' packed weights, and of what each of their programs works in; empty without them.

        Programs of one network share their memory: together they hold what the largest needs.
        """
        if self._packed is None:
            return {}
        unet, decoder = self._packed
        weights, buffers = unet.size_bytes
        held = {
            f"{SHALLOW[depth] if depth else DEEP} × {rows}, latents {w}x{h}": size
            for (depth, rows, h, w), size in buffers.items()
        }
        return {"unet weights": weights, "vae weights": decoder.size_bytes, **held}

    def costs(self) -> dict[Any, Mapping[int, float]]:
        """What was measured: seconds by rows, for each (phase, size, compiled)."""
        return self._costs.measured()

    def close(self) -> None:
        self._executables.close()

    def _record_text(self) -> None:
        """All widths of the text encoders: one that is first met under load would hold up everybody."""
        length = self._model.tokenizers[0].model_max_length
        with torch.inference_mode():
            for rows in reversed(_TEXT_ROWS):
                ids = torch.zeros(rows, length, dtype=torch.long)
                self.embed([ids, ids])
            self.synchronize()

    def _bucket(self, phase: str, rows: int, *, fixed: bool) -> int:
        """The width of the graph for so many rows; `fixed`: of deterministic requests, always the same.

        Costs are asked of more rows than any forward has; nothing wider than the widest graph ever runs.
        """
        if fixed:
            return self.deterministic_rows if phase in STEPS else 1
        widths = reversed(self._buckets) if phase in STEPS else _VAE_WIDTHS
        return next((width for width in widths if width >= rows), rows)

    def _graph(self, phase: str, rows: int, size: tuple[int, int]) -> Callable[..., Any]:
        assert self._graphs is not None
        run = partial(self._graphs.run, phase, (rows, size))
        if phase not in SHALLOW.values():
            return run

        def without_text(features: Any, sample: Any, timestep: Any, encoder_hidden_states: Any, **rest: Any) -> Any:
            """Nothing of a shallow step reads it, and the graph would hold a copy."""
            return run(features, sample, timestep, **rest)

        return without_text

    def _curve(self, group: Group, compiled: bool) -> CostCurve:
        return self._costs[f"{group.phase}, adapted" if group.adapted else group.phase, group.size, compiled]

    def _example(self, phase: str, rows: int, size: tuple[int, int]) -> Callable[[Any], Any]:
        """A call of the phase with random inputs of the right shapes."""
        model, unet = self._model, self._model.unet.config
        tokens, pooled = model.tokenizers[0].model_max_length, model.text_encoders[1].config.projection_dim
        latents = (rows, unet.in_channels, size[1] // model.vae_scale, size[0] // model.vae_scale)
        depth = next((depth for depth, shallow in SHALLOW.items() if shallow == phase), None)
        features = [] if depth is None else self.feature_shapes(depth, size)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=model.device, dtype=model.dtype)

        def call(fn: Any) -> Any:
            if phase == VAE:
                return fn(random(*latents).float())
            inputs = denoise.Inputs(
                sample=random(*latents),
                timestep=torch.full((rows,), 500.0, device=model.device),
                kv=random(rows, tokens, self._kv_width),
                pooled=random(rows, pooled),
                time_ids=torch.ones(rows, 6, device=model.device, dtype=model.dtype),
                time_cond=None if unet.time_cond_proj_dim is None else random(rows, unet.time_cond_proj_dim),
            )
            if phase == DEEP:
                return inputs.run(fn)
            return inputs.run(fn, tuple(random(rows, *shape) for shape in features))

        return call

    @staticmethod
    def _nothing(*_: Any) -> Any:
        raise AssertionError("prompts and images are not encoded through an executable")


Phases = dict[str, Callable[..., Any]]


def _on_torch(model: Model) -> Phases:
    """Raises `ModelError` for a UNet that is not laid out as SDXL's."""
    try:
        split = Split(model.unet)
    except ValueError as error:
        raise ModelError(str(error)) from error
    shallow = {SHALLOW[depth]: partial(split.shallow, depth) for depth in DEPTHS}
    return {DEEP: split.deep, **shallow, VAE: lambda latents: vae.decode(model, latents)}


def _on_gpu(model: Model, rows: int) -> tuple[FusedUNet, Phases]:
    """Raises `ModelError` for parts that the fused layers do not know."""
    try:
        unet, decoder = FusedUNet(model.unet, rows=rows), FusedDecoder(model.vae)
    except ValueError as error:
        raise ModelError(str(error)) from error
    # What undoes the scaling, as tensors that are there already: graphs cannot fetch any from the host.
    none = torch.zeros(1, model.vae.config.latent_channels, 1, 1, device=model.device)
    shift = vae.unscale(none, model.vae.config)
    gain = vae.unscale(none + 1, model.vae.config) - shift
    shallow = {SHALLOW[depth]: partial(unet.shallow, depth) for depth in DEPTHS}
    return unet, {
        DEEP: unet,
        **shallow,
        VAE: lambda latents: vae.levels(decoder(latents * gain + shift)),
        _TEXT: lambda ids: encode.embed(model, ids),
    }


def _packed(model: Model, kernels: ctypes.CDLL) -> tuple[UNetPrograms, DecoderPrograms]:
    """Raises `ModelError` for parts that the CPU kernels do not know."""
    half = model.precision != "fp32"
    try:
        return UNetPrograms(kernels, model.unet, half=half), DecoderPrograms(kernels, model.vae, half=half)
    except ValueError as error:
        raise ModelError(str(error)) from error


def _on_kernels(model: Model, unet: UNetPrograms, decoder: DecoderPrograms) -> Phases:
    shallow = {SHALLOW[depth]: partial(unet.shallow, depth) for depth in DEPTHS}
    return {
        DEEP: unet,
        **shallow,
        VAE: lambda latents: vae.levels(decoder(vae.unscale(latents.float(), model.vae.config))),
    }
