"""Encodes the source image of image-to-image and inpainting, adds noise, and restores the kept region.

Follows diffusers' image-to-image and inpainting pipelines of SDXL, the latter with UNets of four and of nine channels;
with a soft mask Differential Diffusion (Levin and Fried, 2023), which begins as image-to-image.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from contract.image import ImageParameters
from pipeline.families.family import ImageModel
from pipeline.pixels import vae
from pipeline.sampling.denoise import InpaintMask
from pipeline.sampling.sigmas import SamplerTable


class EncodedSource(NamedTuple):
    """The source of an edit as the steps read it.

    image: its latents, fp32 [1, C, h, w]; None where nothing of it is in the first sample or put back.
    masked: for a denoiser that inpaints, the mask and the latents of the image outside of it, fp32 [1, 1 + C, h, w].
    """

    image: torch.Tensor | None
    masked: torch.Tensor | None


def encode(model: ImageModel, parameters: ImageParameters, generator: torch.Generator) -> EncodedSource:
    """Encode the source to latents. The VAE's noise is the first that an edit draws from its seed.

    A denoiser that inpaints reads the masked image's latents too, whose noise diffusers draws after the starting noise:
    it is drawn here from a copy of the generator.
    """
    assert parameters.edit is not None
    scale, channels = model.vae_scale, model.latent_channels
    shape = (1, channels, parameters.height // scale, parameters.width // scale)
    pixels = _pixels(parameters)[None]
    image = None
    if not model.inpaints or parameters.edit.strength < 1:
        image = vae.encode(model, pixels, torch.randn(shape, generator=generator))
    if not model.inpaints:
        return EncodedSource(image, None)
    ahead = generator.clone_state()
    torch.randn(shape, generator=ahead)  # the starting noise
    mask = _mask(parameters)
    return EncodedSource(
        image, with_mask(mask, vae.encode(model, pixels, torch.randn(shape, generator=ahead), blank=mask))
    )


def with_mask(mask: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """Return what a denoiser that inpaints reads beside the sample, [1, 1 + C, h, w].

    `mask` [H, W] is true where it is repainted; `masked` are the masked image's latents [1, C, h, w].
    """
    return torch.cat([_reduced(mask, masked), masked], dim=1)


def begin(
    parameters: ImageParameters,
    table: SamplerTable,
    source: EncodedSource,
    noise: torch.Tensor,
    generator: torch.Generator,
) -> tuple[torch.Tensor, InpaintMask | None]:
    """Return the sample before the first step, and the kept region if there is a mask and a denoiser that ignores it.

    `noise` is of unit variance, fp32 [1, C, h, w].
    """
    assert parameters.edit is not None
    image, soft = source.image, parameters.edit.soft_mask
    if parameters.edit.mask is not None and not soft:
        # Of the masked image's latents: diffusers draws it even for a UNet of four channels, which does not read them.
        torch.randn(noise.shape, generator=generator)
    if image is None or (parameters.edit.mask is not None and parameters.edit.strength == 1 and not soft):
        x = noise * table.init_noise_sigma  # nothing of the image is left where it is repainted
    else:
        signal, level = table.levels[0].tolist()
        x = signal * image + level * noise
    if parameters.edit.mask is None or source.masked is not None:
        return x, None
    assert image is not None
    if soft:
        return x, InpaintMask(_reduced(_values(parameters) / 255, image, mode="area"), image, noise, table.steps)
    return x, InpaintMask(_reduced(_mask(parameters), image), image, noise)


def _reduced(mask: torch.Tensor, latents: torch.Tensor, mode: str = "nearest") -> torch.Tensor:
    """Return the mask [H, W] at the size of latents, fp32 [1, 1, h, w] on their device."""
    return F.interpolate(mask.float()[None, None].to(latents.device), size=latents.shape[-2:], mode=mode)


def finish(parameters: ImageParameters, pixels: torch.Tensor) -> torch.Tensor:
    """Return the image, uint8 [H, W, 3] on the CPU, with the source's own pixels outside the mask.

    Where a mask that is not soft is between 0 and one half, both are blended, in shares of twice its value, as in
    AUTOMATIC1111's web UI: an edge that was blurred.
    """
    if parameters.edit is None or parameters.edit.mask is None:
        return pixels
    repainted, source = _mask(parameters), _pixels(parameters)
    image = torch.where(repainted[..., None], pixels, source)
    edge = (_values(parameters) > 0) & ~repainted  # none where the mask is soft
    if edge.any():
        shares = 2 * _values(parameters)[edge].int()[:, None]
        blended = shares * pixels[edge].int() + (255 - shares) * source[edge].int()
        image[edge] = torch.div(blended + 127, 255, rounding_mode="floor").to(torch.uint8)
    return image


def _pixels(parameters: ImageParameters) -> torch.Tensor:
    assert parameters.edit is not None and isinstance(parameters.edit.image, bytes)
    # A copy: torch warns of read-only buffers.
    return torch.frombuffer(bytearray(parameters.edit.image), dtype=torch.uint8).view(
        parameters.height, parameters.width, 3
    )


def _mask(parameters: ImageParameters) -> torch.Tensor:
    """Return where the image is repainted, bool [H, W]; of a soft mask, in any step."""
    assert parameters.edit is not None
    return _values(parameters) > (0 if parameters.edit.soft_mask else 127)


def _values(parameters: ImageParameters) -> torch.Tensor:
    """Return the mask as the request has it, uint8 [H, W]."""
    assert parameters.edit is not None and isinstance(parameters.edit.mask, bytes)
    return torch.frombuffer(bytearray(parameters.edit.mask), dtype=torch.uint8).view(
        parameters.height, parameters.width
    )
