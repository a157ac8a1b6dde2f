"""Generates images from prompts and collects the input ranges of the layers of a model's denoiser and VAE.

Used by `diptych quantize`, for variants created while a model is loaded, and by benchmarks.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch

from contract.card import ImageDefaults
from core.ops.cpu import CpuLowering
from core.quant.statistics import Statistics
from pipeline.backends.phases import Networks, on_kernels, on_torch
from pipeline.checkpoints.folder import ModelError
from pipeline.drawing import Denoiser
from pipeline.families.family import Family, ImageModel
from pipeline.pixels.vae import unscale
from unet_opt.calibrate import Around, CalibrationSettings, Observe, calibrate, observe_modules, observe_programs
from unet_opt.calibrate import CalibrationPart as Watched

log = logging.getLogger(__name__)

_DECODED = 2  # latents decoded together: a decoder at 1024² needs 5 GiB for each
_PROMPTS = Path(__file__).resolve().with_name("calibration_prompts.txt")


@cache
def default_prompts() -> tuple[str, ...]:
    """Return the bundled captions, for models quantized without prompts of their own."""
    return tuple(_PROMPTS.read_text("utf-8").splitlines())


def settings_of(family: Family, defaults: ImageDefaults) -> CalibrationSettings:
    """Return the family's settings, or all steps of a student as it is drawn."""
    if not defaults.student:
        return CalibrationSettings(**family.calibration)
    return CalibrationSettings(steps=defaults.steps, watched_steps=defaults.steps, guidance=defaults.guidance_scale)


def collect(
    model: ImageModel,
    layers: Mapping[str, Sequence[str]],
    prompts: Sequence[str],
    *,
    settings: CalibrationSettings | None = None,
    kernels: ctypes.CDLL | None = None,
    checkpoints: Mapping[str, Path] | None = None,
    sampled: Mapping[str, Sequence[str]] | None = None,
    tell: Callable[[int], None] = lambda count: None,
) -> dict[str, Statistics]:
    """Collect statistics of these layers over the prompts, run in the model's dtype on its device, at native size.

    Of `sampled` layers rows are kept as well.
    Without layers of the VAE only the observed steps are run. With `kernels` an fp32 model runs on the CPU's kernels if
    they support its layout. The model is not changed. Raises what `calibrate` raises, and
    `Invalid` for a prompt that the model does not read, before any is drawn.
    """
    settings = settings or settings_of(model.family, model.defaults)
    until = settings.steps if "vae" in layers else settings.watched_steps
    networks, observe = observed(model, kernels)
    denoiser = model.family.denoiser
    drawing = Denoiser(model, networks.denoiser, guidance=settings.guidance, steps=settings.steps)
    drawing.check(prompts)

    def run(batch: Sequence[str], around: Around) -> None:
        latents = drawing.latents(
            batch, [seed(prompt) for prompt in batch], until=until,
            around=lambda step: around(denoiser, step) if step < settings.watched_steps else nullcontext(),
        )  # fmt: skip
        if "vae" in layers:
            with around("vae", 0), torch.inference_mode():
                for part in latents.split(_DECODED):
                    networks.decoder(unscale(part.to(model.vae.dtype), model.vae.config))

    parts: dict[str, Watched] = {
        name: Watched(names, observe[name], (checkpoints or {}).get(name), (sampled or {}).get(name, ()))
        for name, names in layers.items()
    }
    return calibrate(parts, prompts, run, digest=model.digest, settings=settings, tell=tell)


def seed(prompt: str) -> int:
    """Derive a seed from the prompt's text: independent of its batch."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4])


def observed(model: ImageModel, kernels: ctypes.CDLL | None) -> tuple[Networks, Mapping[str, Observe]]:
    """Return the model's networks, and how the layers of each are observed."""
    name = model.family.denoiser
    if kernels is not None and model.dtype is torch.float32 and model.device.type == "cpu":
        try:
            networks = on_kernels(model, kernels)
        except ModelError as error:
            log.warning("calibration runs on torch: %s", error)
        else:
            lowerings = networks.denoiser.lowering, networks.decoder.lowering
            assert all(isinstance(lowering, CpuLowering) for lowering in lowerings)
            return networks, dict(zip((name, "vae"), map(observe_programs, lowerings), strict=True))
    return on_torch(model), {name: observe_modules(model.denoiser), "vae": observe_modules(model.vae)}
