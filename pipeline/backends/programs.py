"""The backend of a CPU's own kernels: UNet and VAE as programs, one per number of rows."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from core.ops.branches import LowRank, PackedBranches
from core.ops.cpu import CpuLowering
from pipeline.backends.backend import BatchGroup, ExecutionPlan, ImageBackend, Widths, planned
from pipeline.backends.phases import SHALLOW, VAE_ROWS, VAE_TINY, on_kernels, timed
from pipeline.backends.timing import PhaseCosts, PhaseTimer
from pipeline.extensions.adapters import ScaledAdapter
from pipeline.families.family import ImageModel
from pipeline.fingerprint import KernelIdentity

KERNELS = "kernels"


class ProgramBackend(ImageBackend):
    """A backend in which all requests share forwards, unpadded: deterministic ones, and those with LoRAs too."""

    batch_invariant = True
    packs = True

    def __init__(
        self,
        model: ImageModel,
        kernels: ctypes.CDLL,
        widths: Widths | None = None,
        *,
        release: Collection[str] = (),
    ) -> None:
        """`kernels` are those of `core.kernels.cpu`. `release`: parts whose own weights are dropped once
        they are packed. Raises `ModelError` for a model that the kernels do not support.
        """
        self.model = model
        self._library = kernels
        networks = on_kernels(model, kernels)
        self.denoiser, self.phases = networks.denoiser, networks.phases
        self.kernels = KernelIdentity.on_cpu(kernels)
        self.costs = PhaseCosts(skip_first=True)
        self.widths = widths or Widths()
        self._timer = PhaseTimer(model, self.costs, self.denoiser)
        self._lowerings: dict[str, CpuLowering] = {}
        lowerings = {model.family.denoiser: networks.denoiser.lowering, "vae": networks.decoder.lowering}
        if networks.tiny is not None:
            lowerings[VAE_TINY] = networks.tiny.lowering
        for name, lowering in lowerings.items():
            assert isinstance(lowering, CpuLowering)
            self._lowerings[name] = lowering
        for name in release:
            self._lowerings[name].layers.release()

    def plan(self, group: BatchGroup, rows: int, *, live: bool = False) -> ExecutionPlan:
        return planned(self, group, rows, self.phases[group.phase])

    def lowering_for(self, network: Any) -> CpuLowering:
        return CpuLowering(self._library, network, half=self.model.precision != "fp32")

    def deterministic_mode(
        self, size: tuple[int, int], depth: str, decode: str, chunks: int = 1, *, controlled: bool = False
    ) -> str:
        return KERNELS

    def executable(self, mode: str) -> str:
        return KERNELS

    def prepare(self, size: tuple[int, int] | None = None, *, measure_s: float = 0.0) -> None:
        until = time.monotonic() + measure_s
        size, tiny = size or (self.model.native, self.model.native), VAE_TINY in self.phases
        for key in timed(self.widths.descending, size, (VAE_ROWS,), tiny=tiny):
            if not self._timer(key, self.phases[key.phase], False, until=until):
                return

    def adapt(self, owners: Sequence[tuple[ScaledAdapter, ...]], *, apart: bool) -> AbstractContextManager[None]:
        rows = [[(use.packed, use.scale) for use in uses if isinstance(use.packed, PackedBranches)] for uses in owners]
        return self._denoiser_lowering.adapted(rows)

    def pack_adapter(self, factors: Mapping[str, LowRank]) -> PackedBranches:
        return self._denoiser_lowering.pack_branches(factors)

    def forget_adapters(self) -> None:
        self._denoiser_lowering.clear_branches()

    @property
    def _denoiser_lowering(self) -> CpuLowering:
        return self._lowerings[self.model.family.denoiser]

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of packed weights, and of each program's buffers.

        Programs of one network share buffers: together they use what the largest needs.
        """
        weights = {f"{part} weights": lowering.size_bytes[0] for part, lowering in self._lowerings.items()}
        _, buffers = self._denoiser_lowering.size_bytes
        buffer_bytes = {
            f"{SHALLOW.get(name, name)} × {shape[0]}, {_sides(shape)}": size for (name, shape), size in buffers.items()
        }
        return {**weights, **buffer_bytes}


def _sides(shape: tuple[int, ...]) -> str:
    """Describe an input's shape: latents' sides, or tokens."""
    return f"latents {shape[2]}x{shape[1]}" if len(shape) == 4 else f"{shape[1]} tokens"
