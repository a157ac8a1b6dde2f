"""Names an image's phases and provides their implementations: torch, fused layers on a GPU, or the CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from contract.plan import AUTO, BLOCK, DEPTHS, RESNET
from core.graphs import ExecutableKey
from pipeline import vae
from pipeline.families.family import ImageModel
from pipeline.families.sdxl.conditioning import embed
from pipeline.folder import ModelError
from unet_opt.decoder import DecoderPrograms
from unet_opt.deepcache import SplitUNet
from unet_opt.fused.decoder import FusedDecoder
from unet_opt.fused.network import FusedUNet
from unet_opt.program import UNetPrograms

KERNELS = "kernels"  # our own, on a CPU
GRAPHS = "graphs"  # CUDA graphs of fused layers
LAYERS = "layers"  # the same without graphs, kernel by kernel
ENCODE, DEEP, VAE = "encode", "deep", "vae"
IMAGE = "image"  # encodes an edit's source image
SHALLOW = {BLOCK: "shallow", RESNET: "shallow-resnet"}  # by depth
STEPS = (DEEP, *SHALLOW.values())  # the phases that take a request one step further
VAE_ROWS = 4  # decoding gains nothing from width, and a wide batch delays everyone
VAE_WIDTHS = (1, 2, VAE_ROWS)  # of graphs
TEXT = "text"  # the encoders' part of `ENCODE`
TEXT_WIDTHS = (1, 2, 4, 8, 16, 32)


def likeliest(buckets: Sequence[int], size: tuple[int, int]) -> list[ExecutableKey]:
    """Every graph of this size: first those for one image, then the widest, for a busy server; other depths than
    DeepCache's default last. `buckets` are the widths of steps.
    """
    shallow = SHALLOW[AUTO.depth]
    one = [
        ExecutableKey(TEXT, 2, (0, 0)),
        ExecutableKey(VAE, 1, size),
        ExecutableKey(DEEP, 2, size),
        ExecutableKey(shallow, 2, size),
    ]
    busy = [ExecutableKey(phase, max(buckets), size) for phase in (DEEP, shallow)]
    decodes = [ExecutableKey(VAE, rows, size) for rows in reversed(VAE_WIDTHS)]
    texts = [ExecutableKey(TEXT, rows, (0, 0)) for rows in TEXT_WIDTHS]
    phases = dict.fromkeys((DEEP, shallow, *SHALLOW.values()))
    steps = [ExecutableKey(phase, rows, size) for phase in phases for rows in sorted(buckets, reverse=True)]
    return [*one, *busy, *decodes, *texts, *steps]


Phases = dict[str, Callable[..., Any]]


def on_torch(model: ImageModel) -> Phases:
    """Raises `ModelError` for a UNet without SDXL's layout."""
    try:
        split = SplitUNet(model.denoiser)
    except ValueError as error:
        raise ModelError(str(error)) from error
    shallow = {SHALLOW[depth]: partial(split.shallow, depth) for depth in DEPTHS}
    return {DEEP: split.deep, **shallow, VAE: lambda latents: vae.decode(model, latents)}


def on_gpu(model: ImageModel, rows: int) -> tuple[FusedUNet, Phases]:
    """Raises `ModelError` for parts that the fused layers do not support."""
    try:
        unet, decoder = FusedUNet(model.denoiser, rows=rows), FusedDecoder(model.vae)
    except ValueError as error:
        raise ModelError(str(error)) from error
    # Constants as existing tensors: graphs cannot copy any from the host.
    none = torch.zeros(1, model.vae.config.latent_channels, 1, 1, device=model.device)
    shift = vae.unscale(none, model.vae.config)
    gain = vae.unscale(none + 1, model.vae.config) - shift
    shallow = {SHALLOW[depth]: partial(unet.shallow, depth) for depth in DEPTHS}
    return unet, {
        DEEP: unet,
        **shallow,
        VAE: lambda latents: vae.levels(decoder(latents * gain + shift)),
        TEXT: lambda ids: embed(model, ids),
    }


def packed(model: ImageModel, kernels: ctypes.CDLL) -> tuple[UNetPrograms, DecoderPrograms]:
    """Raises `ModelError` for parts that the CPU kernels do not support."""
    half = model.precision != "fp32"
    try:
        return UNetPrograms(kernels, model.denoiser, half=half), DecoderPrograms(kernels, model.vae, half=half)
    except ValueError as error:
        raise ModelError(str(error)) from error


def on_kernels(model: ImageModel, unet: UNetPrograms, decoder: DecoderPrograms) -> Phases:
    shallow = {SHALLOW[depth]: partial(unet.shallow, depth) for depth in DEPTHS}
    return {
        DEEP: unet,
        **shallow,
        VAE: lambda latents: vae.levels(decoder(vae.unscale(latents.float(), model.vae.config))),
    }


def without_text(phase: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Remove the text input from a shallow step, which does not read it and whose graph would hold a copy. Other phases
    are unchanged.
    """
    if phase not in SHALLOW.values():
        return run
    return lambda features, sample, timestep, encoder_hidden_states, **rest: run(features, sample, timestep, **rest)
