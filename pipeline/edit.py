"""Image-to-image and inpainting: encodes the source image, adds noise, and restores the kept region.

Follows diffusers' image-to-image and inpainting pipelines of SDXL.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from contract.image import ImageParameters
from pipeline import vae
from pipeline.denoise import InpaintMask
from pipeline.families.family import ImageModel
from pipeline.sigmas import SamplerTable


def latents(model: ImageModel, wanted: ImageParameters, generator: torch.Generator) -> torch.Tensor:
    """The image's latents, fp32 [1, C, h, w]. The VAE's noise is the first that an edit draws from its seed."""
    scale, channels = model.vae_scale, model.latent_channels
    noise = torch.randn((1, channels, wanted.height // scale, wanted.width // scale), generator=generator)
    return vae.encode(model, _pixels(wanted)[None], noise)


def begin(
    wanted: ImageParameters, table: SamplerTable, image: torch.Tensor, noise: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, InpaintMask | None]:
    """The sample before the first step, and the kept region if there is a mask.

    `image` are the source's latents, `noise` is of unit variance; both fp32 [1, C, h, w].
    """
    assert wanted.edit is not None
    signal, level = table.levels[0].tolist()
    x = signal * image + level * noise
    if wanted.edit.mask is None:
        return x, None
    if wanted.edit.strength == 1:
        x = noise * table.init_noise_sigma  # nothing of the image is left where it is repainted
    # diffusers encodes the masked image too, which a UNet of four channels does not read: but its noise is drawn.
    torch.randn(noise.shape, generator=generator)
    mask = _mask(wanted).float()[None, None].to(image.device)  # [1, 1, H, W]
    return x, InpaintMask(F.interpolate(mask, size=image.shape[-2:]), image, noise)


def finish(wanted: ImageParameters, pixels: torch.Tensor) -> torch.Tensor:
    """The image, uint8 [H, W, 3] on the CPU, with the source's own pixels outside the mask."""
    if wanted.edit is None or wanted.edit.mask is None:
        return pixels
    return torch.where(_mask(wanted)[..., None], pixels, _pixels(wanted))


def _pixels(wanted: ImageParameters) -> torch.Tensor:
    assert wanted.edit is not None
    # A copy: torch warns of read-only buffers.
    return torch.frombuffer(bytearray(wanted.edit.image), dtype=torch.uint8).view(wanted.height, wanted.width, 3)


def _mask(wanted: ImageParameters) -> torch.Tensor:
    """bool [H, W]: where it is repainted."""
    assert wanted.edit is not None and wanted.edit.mask is not None
    return torch.frombuffer(bytearray(wanted.edit.mask), dtype=torch.uint8).view(wanted.height, wanted.width) > 127
