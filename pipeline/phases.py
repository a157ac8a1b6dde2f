"""Names an image's phases and provides their implementations: torch, fused layers on a GPU, or the CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from contract.plan import AUTO, BLOCK, DEPTHS, RESNET
from core.graphs import ExecutableKey
from pipeline import denoise, encode, vae
from pipeline.folder import ModelError
from pipeline.load import ImageModel
from unet_opt.decoder import DecoderPrograms
from unet_opt.deepcache import SplitUNet, shapes
from unet_opt.fused.decoder import FusedDecoder
from unet_opt.fused.network import FusedUNet
from unet_opt.program import UNetPrograms

ENCODE, DEEP, VAE = "encode", "deep", "vae"
IMAGE = "image"  # encodes an edit's source image
SHALLOW = {BLOCK: "shallow", RESNET: "shallow-resnet"}  # by depth
STEPS = (DEEP, *SHALLOW.values())  # the phases that take a request one step further
VAE_ROWS = 4  # decoding gains nothing from width, and a wide batch delays everyone
VAE_WIDTHS = (1, 2, VAE_ROWS)  # of graphs
TEXT = "text"  # the encoders' part of `ENCODE`
KEYS = "keys"  # its other part: keys and values of cross-attention
TEXT_WIDTHS = (1, 2, 4, 8, 16, 32)


def fixed_rows(phase: str, rows: int) -> int:
    """The rows of every forward of a deterministic request, where a row's bits depend on them; `rows` in steps."""
    return rows if phase in STEPS else 1


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


def timed(buckets: Sequence[int], size: tuple[int, int], decodes: Sequence[int]) -> list[ExecutableKey]:
    """What is timed at start-up, the most likely widths first; other depths than DeepCache's default last. `decodes`
    are the VAE's widths beside a single picture.
    """
    shallow = SHALLOW[AUTO.depth]
    others = [phase for phase in SHALLOW.values() if phase != shallow]
    steps = [(phase, rows) for phase in (DEEP, shallow) for rows in buckets]
    wide = [(VAE, rows) for rows in decodes]
    rare = [(phase, rows) for phase in others for rows in buckets]
    return [ExecutableKey(*one, size) for one in [(VAE, 1), (DEEP, 2), (shallow, 2), *steps, *wide, *rare]]


Phases = dict[str, Callable[..., Any]]
"""A callable for `KEYS`, `TEXT`, `VAE` and each of `STEPS`.

`KEYS`: embeddings [B, T, D] to keys and values [B, T, `kv_width`]. `TEXT`: token ids [B, T] of each encoder to
embeddings [B, T, D] and [B, P]. `VAE`: finished latents [B, C, h, w] to pixels, uint8 [B, H, W, 3]. Steps: see
`SplitUNet`.
"""


def kv_width(model: ImageModel) -> int:
    """Numbers in a token's keys and values, of all cross-attention layers."""
    layers = (model.unet.get_submodule(name.removesuffix(".processor")) for name in model.unet.attn_processors)
    return sum(2 * layer.to_k.out_features for layer in layers if layer.is_cross_attention)


def feature_shapes(
    model: ImageModel, depth: str, size: tuple[int, int], *, channels_last: bool
) -> list[tuple[int, int, int]]:
    """The shape of one row of each feature map that a shallow step of this depth reads, as `deep` returns it."""
    found = shapes(model.unet, depth, size[1] // model.vae_scale, size[0] // model.vae_scale)
    return [(height, width, channels) if channels_last else (channels, height, width)
            for channels, height, width in found]  # fmt: skip


def on_torch(model: ImageModel) -> Phases:
    """Raises `ModelError` for a UNet without SDXL's layout."""
    keys = denoise.PackedKeys(model.unet)
    try:
        split = SplitUNet(model.unet)
    except ValueError as error:
        raise ModelError(str(error)) from error
    shallow = {SHALLOW[depth]: partial(split.shallow, depth) for depth in DEPTHS}
    return {
        KEYS: keys,
        TEXT: partial(encode.embed, model),
        DEEP: split.deep,
        **shallow,
        VAE: lambda latents: vae.decode(model, latents),
    }


def on_gpu(model: ImageModel, rows: int) -> Phases:
    """Raises `ModelError` for parts that the fused layers do not support."""
    try:
        unet, decoder = FusedUNet(model.unet, rows=rows), FusedDecoder(model.vae)
    except ValueError as error:
        raise ModelError(str(error)) from error
    # Constants as existing tensors: graphs cannot copy any from the host.
    none = torch.zeros(1, model.vae.config.latent_channels, 1, 1, device=model.device)
    shift = vae.unscale(none, model.vae.config)
    gain = vae.unscale(none + 1, model.vae.config) - shift
    shallow = {SHALLOW[depth]: partial(unet.shallow, depth) for depth in DEPTHS}
    return {
        KEYS: torch.inference_mode()(unet.keys),
        TEXT: partial(encode.embed, model),
        DEEP: unet,
        **shallow,
        VAE: lambda latents: vae.levels(decoder(latents * gain + shift)),
    }


def packed(model: ImageModel, kernels: ctypes.CDLL) -> tuple[UNetPrograms, DecoderPrograms]:
    """Raises `ModelError` for parts that the CPU kernels do not support."""
    half = model.precision != "fp32"
    try:
        return UNetPrograms(kernels, model.unet, half=half), DecoderPrograms(kernels, model.vae, half=half)
    except ValueError as error:
        raise ModelError(str(error)) from error


def on_kernels(model: ImageModel, unet: UNetPrograms, decoder: DecoderPrograms) -> Phases:
    shallow = {SHALLOW[depth]: partial(unet.shallow, depth) for depth in DEPTHS}
    return {
        KEYS: unet.keys,
        TEXT: partial(encode.embed, model),
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
