"""Generates images from prompts and collects the input ranges of the layers of a model's denoiser and VAE.

Used by `diptych quantize`, for variants created while a model is loaded, and by benchmarks.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.quant.statistics import Statistics
from pipeline.drawing import Denoiser
from pipeline.families.family import ImageModel, Prepare
from pipeline.vae import unscale
from unet_opt.calibrate import Around, CalibrationSettings, Observe, calibrate, observe_modules, observe_programs
from unet_opt.calibrate import CalibrationPart as Watched
from unet_opt.decoder import DecoderPrograms
from unet_opt.program import UNetPrograms

log = logging.getLogger(__name__)

_DECODED = 2  # latents decoded together: a decoder at 1024² needs 5 GiB for each
_PROMPTS = Path(__file__).resolve().with_name("calibration_prompts.txt")


@cache
def default_prompts() -> tuple[str, ...]:
    """The bundled captions, for models quantized without prompts of their own."""
    return tuple(_PROMPTS.read_text("utf-8").splitlines())


def collect(
    model: ImageModel,
    layers: Mapping[str, Sequence[str]],
    prompts: Sequence[str],
    *,
    settings: CalibrationSettings | None = None,
    kernels: ctypes.CDLL | None = None,
    checkpoints: Mapping[str, Path] | None = None,
    tell: Callable[[int], None] = lambda count: None,
) -> dict[str, Statistics]:
    """Statistics of these layers over the prompts, run in the model's own dtype on its device, at its native size.

    Without layers of the VAE only the observed steps are run. With `kernels` an fp32 model runs on the CPU's kernels if
    they support its layout. The model is not changed. Raises what `calibrate` raises.
    """
    settings = settings or CalibrationSettings()
    until = settings.steps if "vae" in layers else settings.watched_steps
    denoiser = model.family.denoiser
    with _network(model, kernels) as network:
        drawing = Denoiser(model, network.prepare, guidance=settings.guidance, steps=settings.steps)

        def run(batch: Sequence[str], around: Around) -> None:
            latents = drawing.latents(
                batch, [seed(prompt) for prompt in batch], forward=network.denoiser, until=until,
                around=lambda step: around(denoiser, step) if step < settings.watched_steps else nullcontext(),
            )  # fmt: skip
            if "vae" in layers:
                with around("vae", 0), torch.inference_mode():
                    for some in latents.split(_DECODED):
                        network.decode(unscale(some.to(model.vae.dtype), model.vae.config))

        parts: dict[str, Watched] = {
            name: Watched(names, network.observe[name], (checkpoints or {}).get(name)) for name, names in layers.items()
        }
        return calibrate(parts, prompts, run, digest=model.digest, settings=settings, tell=tell)


def seed(prompt: str) -> int:
    """A seed derived from the prompt's text: independent of its batch."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4])


@dataclass(frozen=True)
class _Network:
    """A model's forwards: `prepare` and `denoiser` as `Denoiser` takes them, `decode` of unscaled latents."""

    prepare: Prepare
    denoiser: Callable[..., Any]
    decode: Callable[[Tensor], Any]
    observe: Mapping[str, Observe]


@contextmanager
def _network(model: ImageModel, kernels: ctypes.CDLL | None) -> Iterator[_Network]:
    if kernels is not None and model.dtype is torch.float32 and model.device.type == "cpu":
        try:
            unet, decoder = UNetPrograms(kernels, model.denoiser), DecoderPrograms(kernels, model.vae)
        except ValueError as error:
            log.warning("calibration runs on torch: %s", error)
        else:
            observe = {model.family.denoiser: observe_programs(unet), "vae": observe_programs(decoder)}
            yield _Network(unet.keys, unet, decoder, observe)
            return
    if model.device.type == "cuda":  # cuDNN's half precision kernels read convolution weights in this layout
        model.denoiser.to(memory_format=torch.channels_last)
        model.vae.to(memory_format=torch.channels_last)
    processors = dict(model.denoiser.attn_processors)
    try:
        yield _Network(
            model.family.prepare(model),
            model.denoiser,
            lambda latents: model.vae.decode(latents, return_dict=False),
            {model.family.denoiser: observe_modules(model.denoiser), "vae": observe_modules(model.vae)},
        )
    finally:
        model.denoiser.set_attn_processor(processors)
