"""Names an image's phases and provides them on each lowering: torch, fused layers on a GPU, or the CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from contract.plan import AUTO, BLOCK, DEPTHS, RESNET
from core.graphs import ExecutableKey
from core.ops.cpu import CpuLowering
from core.ops.cuda import CudaLowering
from core.ops.ops import Lowering
from core.ops.reference import TorchLowering
from pipeline import encode, vae
from pipeline.folder import ModelError
from pipeline.load import ImageModel
from unet_opt.deepcache import SplitUNet
from unet_opt.layout import check_recorded
from unet_opt.vae import VaeDecoder

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


class Networks(NamedTuple):
    """A model's UNet and VAE decoder on one lowering each, and the phases that they run."""

    unet: SplitUNet
    decoder: VaeDecoder
    phases: Phases


def on_torch(model: ImageModel) -> Networks:
    """Raises `ModelError` for a UNet without SDXL's layout."""
    return _networks(model, TorchLowering(model.dtype), TorchLowering(model.vae.dtype))


def on_gpu(model: ImageModel, rows: int) -> Networks:
    """On fused layers, at most so many rows at a time. Raises `ModelError` for parts that these do not support."""
    try:
        check_recorded(model.unet)
    except ValueError as error:
        raise ModelError(str(error)) from error
    unet, decoder = CudaLowering(model.dtype, rows), CudaLowering(model.vae.dtype, rows)
    # Constants as existing tensors: graphs cannot copy any from the host.
    none = torch.zeros(1, model.vae.config.latent_channels, 1, 1, device=model.device)
    shift = vae.unscale(none, model.vae.config)
    gain = vae.unscale(none + 1, model.vae.config) - shift
    made = _networks(model, unet, decoder, lambda latents: latents * gain + shift)
    made.phases[TEXT] = lambda ids: encode.embed(model, ids)
    return made


def on_kernels(model: ImageModel, kernels: ctypes.CDLL) -> Networks:
    """Raises `ModelError` for parts that the CPU kernels do not support."""
    half = model.precision != "fp32"
    unet, decoder = (CpuLowering(kernels, part, half=half) for part in (model.unet, model.vae))
    return _networks(model, unet, decoder)


Unscale = Callable[[torch.Tensor], torch.Tensor]


def _networks(model: ImageModel, unet_on: Lowering, decoder_on: Lowering, unscale: Unscale | None = None) -> Networks:
    """`unscale` turns latents into what the decoder reads; default: `vae.unscale`, in the decoder's type."""
    try:
        unet, decoder = SplitUNet(unet_on, model.unet), VaeDecoder(decoder_on, model.vae)
    except ValueError as error:
        raise ModelError(str(error)) from error
    unscale = unscale or (lambda latents: vae.unscale(latents.to(decoder_on.dtype), model.vae.config))
    shallow = {SHALLOW[depth]: partial(unet.shallow, depth) for depth in DEPTHS}
    phases: Phases = {DEEP: unet.deep, **shallow, VAE: lambda latents: vae.levels(decoder(unscale(latents)))}
    return Networks(unet, decoder, phases)


def without_text(phase: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Remove the text input from a shallow step, which does not read it and whose graph would hold a copy. Other phases
    are unchanged.
    """
    if phase not in SHALLOW.values():
        return run
    return lambda features, sample, timestep, encoder_hidden_states, **rest: run(features, sample, timestep, **rest)
