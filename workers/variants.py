"""Finds the quantized variant of the settings' image model, or creates it in the cache."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from contract.precision import Scheme, is_quantized
from core.config import Settings
from pipeline.checkpoints.folder import ModelError

if TYPE_CHECKING:
    from pipeline.checkpoints.load import ImageModel
    from pipeline.quantization.variant_cache import CachedVariant

log = logging.getLogger(__name__)

Say = Callable[[str], None]
Count = Callable[[str, int, int], None]
"""Told what is counted, how many are done, and of how many."""
Open = Callable[[], "tuple[ImageModel, ctypes.CDLL | None]"]


def unet_of(
    settings: Settings, device: str, name: str, plain: str, open_model: Open, say: Say, count: Count | None
) -> Path | None:
    """The folder of a quantized denoiser outside the model's own folder, created in the cache if there is none at all.

    `name` is the precision to load the model in, the rest as for `cached` and `quantize_into`. Raises `ModelError`.
    """
    if settings.unet:
        return Path(settings.unet)
    # With LoRAs a variant must hold only scales, but the cache's holds weights: so there is none, as `load` reports.
    if not is_quantized(name) or settings.lora or has_own(settings, name):
        return None
    place = cached(settings, device, cast(Scheme, name), plain)
    if not place.exists:
        quantize_into(place, settings, open_model, say, count)
    return place.denoiser


def has_own(settings: Settings, scheme: str) -> bool:
    """Return whether a quantized denoiser is named, or exists in the model's own folder."""
    from pipeline.checkpoints.load import family_of
    from pipeline.quantization import quantized_parts

    try:
        family, where = family_of(settings.model_name, settings.variant)
        quantized_parts.variant(where, scheme, family.quantized, Path(settings.unet) if settings.unet else None)
    except ModelError:
        return False
    return True


def cached(settings: Settings, device: str, scheme: Scheme, plain: str) -> CachedVariant:
    """The cache path for the variant of the settings' model, calibrated in the precision `plain`.

    Raises `ModelError` if there is no model.
    """
    from pipeline.checkpoints.load import defaults_of, family_of, weights_digest
    from pipeline.quantization import variant_cache

    source = weights_digest(settings.model_name, variant=settings.variant, device=device)
    family, _ = family_of(settings.model_name, settings.variant)
    defaults = defaults_of(settings.model_name, settings.variant)
    return variant_cache.find(settings.cache_dir.expanduser(), source, family, scheme, plain, defaults)


def quantize_into(
    place: CachedVariant,
    settings: Settings,
    open_model: Open,
    say: Say = log.info,
    count: Count | None = None,
) -> None:
    """Quantize the model into its place in the cache, unless it exists. Raises `ModelError`.

    `open_model` loads the unquantized model and the CPU's kernels, if any. Without `count`, `say` receives the
    progress.
    """
    import torch

    name = settings.model_name
    doing = f"quantizing {Path(name).name if Path(name).is_dir() else name} to {place.scheme}"

    def opened() -> tuple[ImageModel, ctypes.CDLL | None]:
        say(f"{doing}, once, into {place.folder}")
        return open_model()

    def tell(done: int, total: int) -> None:
        if count is None:
            say(f"{doing}: {done} of {total} prompts")
        else:
            count(doing, done, total)

    place.make(opened, tell=tell, wait=lambda: say(f"{doing}: waiting for another process that is already doing it"))
    gc.collect()  # free the unquantized model before the quantized one is loaded
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
