"""Names an image's phases and provides them on each lowering: torch, fused layers on a GPU, or the CPU kernels."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from contract.card import FULL, TINY
from contract.plan import AUTO, BLOCK, DEPTHS, RESNET
from core.graphs import ExecutableKey
from core.ops.cpu import CpuLowering
from core.ops.cuda import CudaLowering
from core.ops.ops import Lowering
from core.ops.reference import TorchLowering
from pipeline.checkpoints.folder import ModelError
from pipeline.families.family import ImageModel, Network
from pipeline.pixels import tiling, vae
from unet_opt.tiny_vae import TinyDecoder
from unet_opt.vae import VaeDecoder

ENCODE, DEEP, VAE = "encode", "deep", "vae"
VAE_TINY = "vae-tiny"  # decodes in place of `VAE`, where a model has a tiny decoder and the request asks for it
DECODES = {FULL: VAE, TINY: VAE_TINY}  # by what a request calls the decoder
IMAGE = "image"  # encodes an edit's source image
UPSCALE = "upscale"  # enlarges a tile of a finished image
SHALLOW = {BLOCK: "shallow", RESNET: "shallow-resnet"}  # by depth
STEPS = (DEEP, *SHALLOW.values())  # the phases that take a request one step further
VAE_ROWS = 4  # decoding gains nothing from width, and a wide batch delays everyone
VAE_WIDTHS = (1, 2, VAE_ROWS)  # of graphs
TEXT = "text"  # the encoders' part of `ENCODE`
KEYS = "keys"  # its other part: keys and values of cross-attention
TEXT_WIDTHS = (1, 2, 4, 8, 16, 32)


def fixed_rows(phase: str, rows: int) -> int:
    """Return the rows of each forward of a deterministic request, where its bits depend on them; `rows` in steps."""
    return rows if phase in STEPS else 1


def likeliest(buckets: Sequence[int], size: tuple[int, int]) -> list[ExecutableKey]:
    """Return every graph of this size: first those for one image, then the widest, for a busy server; other depths than
    DeepCache's default and tiny decoders last. `buckets` are the widths of steps.
    """
    shallow = SHALLOW[AUTO.depth]
    single_image = [
        ExecutableKey(TEXT, 2, (0, 0)),
        ExecutableKey(VAE, 1, size),
        ExecutableKey(DEEP, 2, size),
        ExecutableKey(shallow, 2, size),
    ]
    busy = [ExecutableKey(phase, max(buckets), size) for phase in (DEEP, shallow)]
    decodes, tiny = ([ExecutableKey(phase, rows, size) for rows in reversed(VAE_WIDTHS)] for phase in DECODES.values())
    texts = [ExecutableKey(TEXT, rows, (0, 0)) for rows in TEXT_WIDTHS]
    phases = dict.fromkeys((DEEP, shallow, *SHALLOW.values()))
    steps = [ExecutableKey(phase, rows, size) for phase in phases for rows in sorted(buckets, reverse=True)]
    return [*single_image, *busy, *decodes, *texts, *steps, *tiny]


def timed(buckets: Sequence[int], size: tuple[int, int], decodes: Sequence[int], *, tiny: bool) -> list[ExecutableKey]:
    """Return what is timed at start-up, the most likely widths first; other depths than DeepCache's default last, and a
    tiny decoder, if there is one. `decodes` are decoders' widths beside a single picture.
    """
    shallow = SHALLOW[AUTO.depth]
    other_phases = [phase for phase in SHALLOW.values() if phase != shallow]
    steps = [(phase, rows) for phase in (DEEP, shallow) for rows in buckets]
    wide_decodes = [(VAE, rows) for rows in decodes]
    rare = [(phase, rows) for phase in other_phases for rows in buckets]
    rare += [(VAE_TINY, rows) for rows in (1, *decodes) if tiny]
    return [ExecutableKey(*pair, size) for pair in [(VAE, 1), (DEEP, 2), (shallow, 2), *steps, *wide_decodes, *rare]]


Phases = dict[str, Callable[..., Any]]
"""A callable for `KEYS`, `TEXT`, `VAE`, each of `STEPS`, and `VAE_TINY` if the model has such a decoder.

`KEYS`: embeddings [B, T, D] to what the denoiser reads of them, [B, T, width]. `TEXT`: token ids [B, T] of each
encoder to embeddings [B, T, D] and [B, P]. `VAE` and `VAE_TINY`: finished latents [B, C, h, w] to pixels, uint8
[B, H, W, 3], and bool [B]: which pictures were finite. Steps: see `Network`.
"""


class Networks(NamedTuple):
    """A model's denoiser and decoders on one lowering each, and the phases that they run."""

    denoiser: Network
    decoder: VaeDecoder
    phases: Phases
    tiny: TinyDecoder | None


def on_torch(model: ImageModel) -> Networks:
    """Build the networks on torch. Raises `ModelError` for a UNet without SDXL's layout."""
    return _networks(model, TorchLowering(model.dtype), TorchLowering(model.vae.dtype), TorchLowering(model.dtype))


def on_gpu(model: ImageModel, rows: int) -> Networks:
    """Build the networks on fused layers, at most so many rows at a time. Raises `ModelError` for unsupported parts."""
    denoiser, decoder = (
        CudaLowering(dtype, rows, part) for dtype, part in ((model.dtype, model.denoiser), (model.vae.dtype, model.vae))
    )
    tiny = CudaLowering(model.dtype, rows)
    # Constants as existing tensors: graphs cannot copy any from the host.
    none = torch.zeros(1, model.vae.config.latent_channels, 1, 1, device=model.device)
    shift = vae.unscale(none, model.vae.config)
    gain = vae.unscale(none + 1, model.vae.config) - shift
    return _networks(model, denoiser, decoder, tiny, lambda latents: latents * gain + shift)


def on_kernels(model: ImageModel, kernels: ctypes.CDLL) -> Networks:
    """Build the networks on the CPU kernels. Raises `ModelError` for unsupported parts."""
    half = model.precision != "fp32"
    denoiser, decoder = (CpuLowering(kernels, part, half=half) for part in (model.denoiser, model.vae))
    tiny = None if model.tiny_vae is None else CpuLowering(kernels, model.tiny_vae.network)
    return _networks(model, denoiser, decoder, tiny)


Unscale = Callable[[torch.Tensor], torch.Tensor]


def _networks(
    model: ImageModel,
    denoiser_on: Lowering,
    decoder_on: Lowering,
    tiny_on: Lowering | None,
    unscale: Unscale | None = None,
) -> Networks:
    """`tiny_on` is for a tiny decoder, if the model has one. `unscale` turns latents into what the VAE's decoder reads;
    default: `vae.unscale`, in the decoder's type.
    """
    try:
        network, decoder = model.family.network(denoiser_on, model.denoiser), VaeDecoder(decoder_on, model.vae)
        tiny = None if model.tiny_vae is None or tiny_on is None else TinyDecoder(tiny_on, model.tiny_vae.network)
    except ValueError as error:
        raise ModelError(str(error)) from error
    unscale = unscale or (lambda latents: vae.unscale(latents.to(decoder_on.dtype), model.vae.config))
    shallow = {SHALLOW[depth]: partial(network.shallow, depth) for depth in DEPTHS}
    phases: Phases = {
        KEYS: torch.inference_mode()(network.prepare_text),
        TEXT: model.embed or partial(model.family.embed, model),
        DEEP: network.deep,
        **shallow,
        VAE: tiling.decoder(model, lambda latents: decoder(unscale(latents)), vae.levels),
    }
    if tiny is not None:
        phases[VAE_TINY] = tiling.decoder(model, tiny, vae.levels)
    return Networks(network, decoder, phases, tiny)


def decoder_in_fp32(model: ImageModel, phase: str) -> tiling.Decode | None:
    """Return this phase, one that decodes, in fp32 on torch; None: the model's weights have all of fp32's range.

    Only fp16 has less, and models in fp16 have their weights: no kernels pack them.
    """
    tiny = phase == VAE_TINY
    own = model.tiny_vae.network if tiny and model.tiny_vae is not None else model.vae
    if own.dtype is not torch.float16:
        return None
    whole, lowering = copy.deepcopy(own).float(), TorchLowering(torch.float32)
    if tiny:
        return tiling.decoder(model, TinyDecoder(lowering, whole), vae.levels)
    decoder = VaeDecoder(lowering, whole)
    return tiling.decoder(model, lambda latents: decoder(vae.unscale(latents.float(), whole.config)), vae.levels)


def drop_text_input(denoiser: Network, phase: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Remove the text input from a shallow step that does not read it: its graph would hold a copy. Other phases are
    unchanged.
    """
    if denoiser.shallow_reads_text or phase not in SHALLOW.values():
        return run
    return lambda inputs, features, **rest: run(inputs.without_text(), features, **rest)
