"""The cost curves of a backend's phases, and their measurement with random inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from core.batching.cost import CostCurve, CostTable
from core.graphs import ExecutableKey
from pipeline.backends.phases import DECODES, DEEP, SHALLOW, TEXT
from pipeline.families.family import ImageModel, Network
from unet_opt.inputs import DenoiserInputs

Size = tuple[int, int]
_DEFAULT_S = 0.05
_RUNS = 3


def synchronize(device: torch.device) -> None:
    """Wait for all work this thread has submitted, so that measured times include it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class PhaseCosts:
    """The seconds by rows for each phase and size; compiled and recorded code has curves of its own."""

    def __init__(self, *, skip_first: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """`skip_first`: the first run of a shape that is neither compiled nor recorded is not counted, because it
        compiles kernels or writes a program.
        """
        self._table = CostTable(_DEFAULT_S, clock)
        self._skip_first = skip_first
        self._seen: set[ExecutableKey] = set()

    def curve(self, phase: str, size: Size, compiled: bool, field: str = "") -> CostCurve:
        """Return the curve of a phase, or of what an extension of this field adds to it."""
        return self._table[(field, phase) if field else phase, size, compiled]

    def observe(self, key: ExecutableKey, compiled: bool, seconds: float, field: str = "") -> None:
        """Update a curve with an iteration's time, or an extension's part of it."""
        if self._skip_first and not compiled and key not in self._seen:
            return self.warmed(key)
        self._table[(field, key.phase) if field else key.phase, key.size, compiled].observe(key.rows, seconds)

    def measure(self, key: ExecutableKey, compiled: bool, seconds: float) -> None:
        """Update a curve with a time that was taken for it, and not of an iteration."""
        self._table[key.phase, key.size, compiled].measure(key.rows, seconds)

    def warmed(self, key: ExecutableKey) -> None:
        """Note that the shape has run once."""
        self._seen.add(key)

    def measured(self) -> dict[Any, Mapping[int, float]]:
        """Return measured seconds by rows, for each (phase, size, compiled); an extension's phase is (field, phase)."""
        return {**self._table.measured()}


class PhaseTimer:
    """Times a model's phases on examples."""

    def __init__(self, model: ImageModel, costs: PhaseCosts, denoiser: Network) -> None:
        self._model = model
        self._costs = costs
        self._denoiser = denoiser

    def __call__(
        self,
        key: ExecutableKey,
        function: Callable[..., Any],
        compiled: bool,
        *,
        runs: int = _RUNS,
        until: float = float("inf"),
    ) -> bool:
        """Measure all runs but the first, which is warm-up. False if `until` came before the last."""
        size: Any = key.size
        example = self.example(key.phase, key.rows, size, chunks=key.chunks)
        for run in range(runs):
            if time.monotonic() >= until:
                return False
            synchronize(self._model.device)  # with the iterations before it
            started = time.perf_counter()
            with torch.inference_mode():
                example(function)
                synchronize(self._model.device)
            if run:  # also the first replay of a graph is slow: it uploads the graph to the device
                self._costs.measure(key, compiled, time.perf_counter() - started)
            else:
                self._costs.warmed(key)
        return True

    def example(
        self, phase: str, rows: int, size: Size, seed: int = 0, *, chunks: int = 1
    ) -> Callable[[Callable[..., Any]], Any]:
        """Return a call of the phase with random inputs of the right shapes; for `TEXT` with no words."""
        model = self._model
        height, width = size[1] // model.vae_scale, size[0] // model.vae_scale
        # A generator of its own: a failed recording may leave the device's default one unusable.
        generator = torch.Generator(model.device).manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=model.device, dtype=model.dtype, generator=generator)

        def call(function: Callable[..., Any]) -> Any:
            if phase == TEXT:
                return function(model.family.example_ids(model, rows))
            if phase in DECODES.values():
                return function(random(rows, model.latent_channels, height, width).float())
            inputs = DenoiserInputs(
                random(rows, model.input_channels, height, width),
                torch.full((rows,), 500.0, device=model.device),
                model.family.example(model, self._denoiser.text_width, rows, generator, chunks),
            )
            if phase == DEEP:
                return function(inputs)
            return function(inputs, tuple(random(rows, *shape) for shape in features))

        depth = next((depth for depth, shallow in SHALLOW.items() if shallow == phase), None)
        features = [] if depth is None else self._denoiser.feature_shapes(depth, height, width)
        return call
