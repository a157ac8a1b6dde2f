"""Upscalers of finished pictures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from contract.errors import Invalid
from contract.upscale import FIELD
from pipeline.backends.phases import UPSCALE
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions.extension import Extension
from pipeline.extensions.upscaling import Upscaler, UpscalerFolder, Upscaling, corners

if TYPE_CHECKING:
    from contract.image import ImageParameters
    from core.config import Settings
    from pipeline.backends.backend import ImageBackend
    from pipeline.families.family import ImageModel


class UpscaleExtension(Extension[UpscalerFolder]):
    """Upscalers, whose leases are the networks themselves, which requests keep from their check on."""

    field, card_field, printed_as = FIELD, "upscalers", "upscaler"
    unconfigured = "there is no folder of upscalers (DIPTYCH_UPSCALERS_DIR)"
    finishes = True

    @classmethod
    def open(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> Self:
        folder = UpscalerFolder(Path(settings.upscalers_dir)) if settings.upscalers_dir else None
        return cls(model, backend, folder)

    def costs(self, backend: ImageBackend, sizes: Iterable[tuple[int, int]]) -> dict[str, Any]:
        """Return the seconds of a million pixels, of the slowest measured size; 0.0: none was measured."""
        measured = backend.costs.measured().items()
        tiles = {size: seconds[1] for (phase, size, _), seconds in measured if phase == UPSCALE and 1 in seconds}
        device = self.model.device
        slowest_s = max(
            (1e6 * s * len(corners(width, height, device)) / (width * height) for (width, height), s in tiles.items()),
            default=0.0,
        )
        return {"upscale_megapixel_s": slowest_s}

    def _check_files(self, request: ImageParameters) -> Upscaler:
        assert request.upscale is not None
        try:
            upscaler = self._files.get(request.upscale.model)
        except ModelError as error:
            raise Invalid(self.field, str(error)) from error
        request.upscale.check_factor(request.width, request.height, upscaler.factor)
        return upscaler

    def size_bytes(self, request: ImageParameters, checked: Upscaler, rows: int, chunks: int) -> int:
        return checked.size_bytes(request.width, request.height)

    def finish(self, request: ImageParameters, lease: Upscaler, pixels: torch.Tensor) -> Upscaling:
        assert request.upscale is not None
        device = self.model.device
        dtype = torch.float32 if device.type == "cpu" else self.model.dtype
        size = request.upscale.size(request.width, request.height, lease.factor)
        return Upscaling(lease, pixels, device, dtype, size)

    def _used(self, lease: Upscaler) -> Iterable[Upscaler]:
        return (lease,)
