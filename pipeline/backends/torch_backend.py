"""The torch backend: the model's own modules, eagerly, and compiled in the background where that pays."""

from __future__ import annotations

import time
from pathlib import Path

from contract.plan import AUTO
from core.graphs import CompiledCache, ExecutableKey
from pipeline.backends.backend import BatchGroup, ExecutionPlan, ImageBackend, Widths, planned
from pipeline.backends.phases import DECODES, DEEP, SHALLOW, VAE_ROWS, VAE_TINY, fixed_rows, on_torch, timed
from pipeline.backends.timing import PhaseCosts, PhaseTimer
from pipeline.families.family import ImageModel
from pipeline.fingerprint import KernelIdentity

EAGER, COMPILED = "eager", "compiled"


class TorchBackend(ImageBackend):
    """The model's own modules; on CPUs also compiled by shape: free requests take what is cheaper by measured times."""

    def __init__(
        self, model: ImageModel, widths: Widths | None = None, *, compiled: bool = False, cache: Path | None = None
    ) -> None:
        """`cache` stores compiled code. Raises `ModelError` for a UNet without SDXL's layout."""
        self.model = model
        networks = on_torch(model)
        self.denoiser, self.phases = networks.denoiser, networks.phases
        self.kernels = KernelIdentity()
        self.costs = PhaseCosts()
        self.widths = widths or Widths()
        self._timer = PhaseTimer(model, self.costs, self.denoiser)
        self._executables = CompiledCache(self.phases, compiled=compiled and model.device.type == "cpu", cache=cache)
        self.fixed_shapes = self._executables.enabled

    def plan(self, group: BatchGroup, rows: int, *, live: bool = False) -> ExecutionPlan:
        phase, size, mode, _, chunks, _ = group
        eager = self.phases[phase]
        if mode:
            bucket = fixed_rows(phase, self.widths.deterministic_rows)
            fixed = self._executables.find(ExecutableKey(phase, bucket, size)) if mode == COMPILED else None
            return planned(self, group, bucket, fixed or eager, fixed is not None)
        best = planned(self, group, rows, eager)
        for bucket in self._executables.buckets(phase, size) if chunks == 1 else ():
            if bucket < rows:
                continue
            executable = self._executables.find(ExecutableKey(phase, bucket, size))
            if executable is not None:
                plan = planned(self, group, bucket, executable, True)
                # An executable without a measured time is used once, to measure it.
                if bucket not in self.costs.curve(phase, size, True).measured or plan.seconds < best.seconds:
                    best = plan
            break
        return best

    def deterministic_mode(
        self, size: tuple[int, int], depth: str, decode: str, chunks: int = 1, *, controlled: bool = False
    ) -> str:
        """Return compiled, if all that it needs is compiled by now; of longer texts, and with controls, nothing is."""
        phases = (DEEP, SHALLOW[depth], decode) if depth else (DEEP, decode)
        keys = [ExecutableKey(phase, fixed_rows(phase, self.widths.deterministic_rows), size) for phase in phases]
        return (
            EAGER if controlled or chunks > 1 or any(self._executables.find(key) is None for key in keys) else COMPILED
        )

    def executable(self, mode: str) -> str:
        return mode or (f"{EAGER} or {COMPILED}" if self._executables.enabled else EAGER)

    def prepare(self, size: tuple[int, int] | None = None, *, measure_s: float = 0.0) -> None:
        size, widths = size or (self.model.native, self.model.native), self.widths.descending
        steps = [(phase, rows) for phase in (DEEP, SHALLOW[AUTO.depth]) for rows in widths]
        decodes = [(phase, rows) for phase in DECODES.values() if phase in self.phases for rows in (1, VAE_ROWS)]
        for phase, rows in [*steps, *decodes]:
            self._executables.want(ExecutableKey(phase, rows, size), self._timer.example(phase, rows, size))
        until = time.monotonic() + measure_s
        for key in timed(widths, size, (VAE_ROWS,), tiny=VAE_TINY in self.phases):
            if not self._timer(key, self.phases[key.phase], False, until=until):
                return
            executable = self._executables.find(key)
            if executable is not None and not self._timer(key, executable, True, until=until):
                return

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._executables.wait(timeout_s)

    def close(self) -> None:
        self._executables.close()
