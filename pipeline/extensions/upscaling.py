"""Upscaling of finished images, tile by tile: networks from the files of one folder, and a request's tiles."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from contract.errors import Invalid
from contract.upscale import FIELD
from pipeline.backends.phases import UPSCALE
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import esrgan
from pipeline.extensions.asset_cache import ReadFile
from pipeline.extensions.asset_folder import AssetFolder
from pipeline.extensions.esrgan import RRDBNet, Shape
from pipeline.extensions.extension import Extension
from pipeline.finite import all_finite, dtype_name
from pipeline.pixels.vae import to_host

if TYPE_CHECKING:
    from PIL.Image import Image

    from contract.image import ImageParameters
    from core.config import Settings
    from pipeline.backends.backend import ImageBackend
    from pipeline.families.family import ImageModel

_MAX_FILE_BYTES = 2**30
_KEPT = 4  # networks in memory
_TILES = {"cpu": 128}  # the side of a tile in pixels: one is an iteration, and others wait for it
_TILE = 512
_MARGIN = 16  # pixels around a tile that the network sees too
_SMALLEST = 16
_FORWARD_BYTES = {"cpu": 2**29}  # that a tile may take while it is computed: of large networks tiles are smaller
_MOST_FORWARD_BYTES = 2**32


@dataclass(frozen=True, slots=True, eq=False)
class Upscaler:
    """A file's network. `digest` is the file's SHA-256."""

    name: str
    digest: str
    network: RRDBNet

    @property
    def factor(self) -> int:
        return self.network.shape.factor

    def size_bytes(self, width: int, height: int) -> int:
        """Return the size of an image of these sides, enlarged."""
        return 3 * width * height * self.factor**2


class UpscalerFolder(AssetFolder[Upscaler]):
    """The networks of one folder."""

    kind = "upscaler"
    missing = "there is no {} in the folder of upscalers"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _KEPT, most_bytes=_MAX_FILE_BYTES)

    def _read(self, key: str) -> ReadFile[Upscaler]:
        data = self._data(key)
        digest = hashlib.sha256(data).hexdigest()
        return ReadFile(Upscaler(key, digest, esrgan.read(key, data)), digest, 1)


def corners(width: int, height: int, device: torch.device, side: int | None = None) -> list[tuple[int, int]]:
    """List the upper left corner of each of a picture's tiles, (y, x); `side`: of others than the device's largest."""
    side = _TILES.get(device.type, _TILE) if side is None else side
    return [(top, left) for top in range(0, height, side) for left in range(0, width, side)]


def tile_side(shape: Shape, device: torch.device, dtype: torch.dtype) -> int:
    """Return a tile's side in pixels: the device's largest, halved until a forward of this network fits its budget."""
    side = _TILES.get(device.type, _TILE)
    budget = _FORWARD_BYTES.get(device.type, _MOST_FORWARD_BYTES)
    while side > _SMALLEST and shape.forward_bytes(side + 2 * _MARGIN, dtype.itemsize) > budget:
        side //= 2
    return side


@dataclass(slots=True, eq=False)
class TiledUpscale:
    """One image that is being enlarged: `done` of its `tiles` are in `canvas`."""

    upscaler: Upscaler
    pixels: Tensor  # uint8 [H, W, 3], on the CPU
    device: torch.device
    dtype: torch.dtype
    size: tuple[int, int] | None = None  # of the whole picture; None: as the network enlarges it
    done: int = 0
    side: int = field(init=False)  # of a tile
    canvas: Tensor = field(init=False)  # uint8 [factor · H, factor · W, 3], on the CPU

    def __post_init__(self) -> None:
        self.side = tile_side(self.upscaler.network.shape, self.device, self.dtype)
        factor, (height, width, _) = self.upscaler.factor, self.pixels.shape
        self.canvas = torch.empty(height * factor, width * factor, 3, dtype=torch.uint8)

    @property
    def tiles(self) -> list[tuple[int, int]]:
        height, width, _ = self.pixels.shape
        return corners(width, height, self.device, self.side)

    @property
    def left(self) -> int:
        return len(self.tiles) - self.done

    @torch.inference_mode()
    def compute(self) -> None:
        """Write the next tile onto the canvas; to be repeated until `done` is raised. Raises `Invalid`."""
        (top, left), side, factor = self.tiles[self.done], self.side, self.upscaler.factor
        above, before = max(0, top - _MARGIN), max(0, left - _MARGIN)
        seen = self.pixels[above : top + side + _MARGIN, before : left + side + _MARGIN]
        x = seen.permute(2, 0, 1)[None].to(self.device, self.dtype) / 255
        enlarged = self.upscaler.network.to(self.device, self.dtype)(x)[0].float()
        finite = all_finite([enlarged])
        levels = to_host(enlarged.clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0))
        if not bool(finite):
            raise Invalid(FIELD, f"the {dtype_name(self.dtype)} upscaler {self.upscaler.name} returned NaN or infinity")
        top, left, above, before = (factor * at for at in (top, left, above, before))
        target = self.canvas[top : top + factor * side, left : left + factor * side]
        target.copy_(levels[top - above :, left - before :][: target.shape[0], : target.shape[1]])

    def image(self) -> Image:
        """Return the whole picture, reduced to `size` with the Lanczos filter where that is less."""
        from PIL import Image

        image = Image.fromarray(self.canvas.numpy())
        return image if self.size in (None, image.size) else image.resize(self.size, Image.Resampling.LANCZOS)


class UpscaleExtension(Extension[UpscalerFolder]):
    """Upscalers, whose leases are the networks themselves, which requests keep from their check on."""

    field, card_field, printed_as = FIELD, "upscalers", "upscaler"
    unconfigured = "no folder of upscalers is configured (--upscalers-dir, or DIPTYCH_UPSCALERS_DIR)"
    finishes = True

    @classmethod
    def open(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> Self:
        folder = UpscalerFolder(Path(settings.upscalers_dir)) if settings.upscalers_dir else None
        return cls(model, backend, folder)

    def is_requested(self, request: ImageParameters) -> bool:
        return request.upscale is not None and not request.upscale.is_filter  # that the finished `Picture` applies

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

    def finish(self, request: ImageParameters, lease: Upscaler, pixels: torch.Tensor) -> TiledUpscale:
        assert request.upscale is not None
        device = self.model.device
        dtype = torch.float32 if device.type == "cpu" else self.model.dtype
        size = request.upscale.size(request.width, request.height, lease.factor)
        return TiledUpscale(lease, pixels, device, dtype, size)

    def _used(self, lease: Upscaler) -> Iterable[Upscaler]:
        return (lease,)
