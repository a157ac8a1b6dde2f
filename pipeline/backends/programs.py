"""The backend of a CPU's own kernels: UNet and VAE as programs, one per number of rows."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection

from pipeline.backends.backend import BatchGroup, ExecutionPlan, ImageBackend, Widths, planned
from pipeline.backends.timing import PhaseCosts, PhaseTimer
from pipeline.fingerprint import KernelIdentity
from pipeline.load import ImageModel
from pipeline.phases import DEEP, SHALLOW, VAE_ROWS, on_kernels, on_torch, packed, timed

KERNELS = "kernels"


class ProgramBackend(ImageBackend):
    """Deterministic requests share forwards with all others, unpadded."""

    batch_invariant = True
    channels_last = True

    def __init__(
        self,
        model: ImageModel,
        kernels: ctypes.CDLL,
        widths: Widths | None = None,
        *,
        release: Collection[str] = (),
    ) -> None:
        """`kernels` are those of `core.kernels.cpu`. `release`: of "unet" and "vae" the model's own weights are dropped
        once they are packed. Raises `ModelError` for a model that the kernels do not support.
        """
        self.model = model
        phases = on_torch(model)
        self._unet, self._decoder = packed(model, kernels)
        self.phases = phases | on_kernels(model, self._unet, self._decoder)
        self.kernels = KernelIdentity.on_cpu(kernels)
        self.costs = PhaseCosts()
        self.widths = widths or Widths()
        self._timer = PhaseTimer(model, self.costs, channels_last=self.channels_last)
        for name, programs in (("unet", self._unet), ("vae", self._decoder)):
            if name in release:
                programs.layers.release()

    def plan(self, group: BatchGroup, rows: int, *, live: bool = False) -> ExecutionPlan:
        return planned(self, group, rows, self.phases[group.phase])

    def deterministic_mode(self, size: tuple[int, int], depth: str) -> str:
        return KERNELS

    def executable(self, mode: str) -> str:
        return KERNELS

    def prepare(self, size: tuple[int, int] | None = None, *, measure_s: float = 0.0) -> None:
        until = time.monotonic() + measure_s
        for key in timed(self.widths.descending, size or (self.model.native, self.model.native), (VAE_ROWS,)):
            if not self._timer(key, self.phases[key.phase], False, until=until):
                return

    def held_bytes(self) -> dict[str, int]:
        """Of packed weights, and of each program's buffers.

        Programs of one network share buffers: together they use what the largest needs.
        """
        weights, buffers = self._unet.size_bytes
        held = {
            f"{SHALLOW[depth] if depth else DEEP} × {rows}, latents {w}x{h}": size
            for (depth, rows, h, w), size in buffers.items()
        }
        return {"unet weights": weights, "vae weights": self._decoder.size_bytes, **held}
