"""Decodes latents to pixels, encodes pixels to latents, and previews unfinished latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from pipeline.finite import all_finite, finite_rows
from pipeline.pixels import tiling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipeline.families.family import ImageModel


class VaeModel(Protocol):
    """A loaded model, as far as its decoder is concerned."""

    @property
    def vae(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...


def unscale(latents: torch.Tensor, config: Any) -> torch.Tensor:
    """Undo diffusion's latent scaling: [B, C, h, w], by the VAE's config."""
    scale = float(config.scaling_factor)
    mean, std = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if mean is None or std is None:
        shift = getattr(config, "shift_factor", None)
        return latents / scale if shift is None else latents / scale + shift
    mean, std = (torch.tensor(v, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1) for v in (mean, std))
    return latents * std / scale + mean


def scale(latents: torch.Tensor, config: Any) -> torch.Tensor:
    """Apply diffusion's latent scaling, the inverse of `unscale`."""
    factor = float(config.scaling_factor)
    mean, std = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if mean is None or std is None:
        return (latents - (getattr(config, "shift_factor", None) or 0)) * factor
    mean, std = (torch.tensor(v, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1) for v in (mean, std))
    return (latents - mean) * factor / std


@torch.inference_mode()
def encode(
    model: ImageModel, pixels: torch.Tensor, noise: torch.Tensor, blank: torch.Tensor | None = None
) -> torch.Tensor:
    """Encode images, uint8 [B, H, W, 3] to fp32 [B, C, h, w], drawn from the VAE's posterior with this `noise`.

    As in diffusers' pipelines: a sample, not the mean. Where `blank` is true, bool [H, W], all channels are halfway
    between black and white.
    """
    values = pixels.permute(0, 3, 1, 2).float() / 255 * 2 - 1
    if blank is not None:
        values = values.masked_fill(blank, 0)
    posterior = tiling.posterior(model, values.to(model.device, model.vae.dtype))
    sample = posterior.mean + posterior.std * noise.to(model.device, model.vae.dtype)
    # All latents have this memory format: convolutions of others round differently.
    return scale(sample.float(), model.vae.config).contiguous()


@torch.inference_mode()
def decode(model: VaeModel, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode finished latents [B, C, h, w] on torch, as the phase `VAE`: uint8 [B, H, W, 3] and bool [B].

    In the VAE's own precision, which is fp32 for a `force_upcast` one in an fp16 model.
    """
    unscaled = unscale(latents.to(model.vae.dtype), model.vae.config)
    pixels: torch.Tensor = model.vae.decode(unscaled, return_dict=False)[0]
    return levels(pixels.permute(0, 2, 3, 1)), finite_rows(pixels)


def levels(pixels: torch.Tensor) -> torch.Tensor:
    """Quantize pixels in about [-1, 1] to uint8 as diffusers does: to [0, 1], clamped, in fp32, half to even.

    NaN becomes black and infinity white: `finite_rows` of the pixels tells.
    """
    return (pixels.float() * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)


def reduced(pixels: torch.Tensor, max_side: int) -> NDArray[np.uint8]:
    """Average one picture, uint8 [1, H, W, 3], over areas so that no side is longer than `max_side`: [h, w, 3]."""
    height, width = pixels.shape[1:3]
    share = min(1.0, max_side / max(height, width))
    if share < 1:
        size = max(1, round(height * share)), max(1, round(width * share))
        means = F.adaptive_avg_pool2d(pixels.permute(0, 3, 1, 2).float(), size)
        pixels = means.round().to(torch.uint8).permute(0, 2, 3, 1)
    image: NDArray[np.uint8] = pixels[0].cpu().numpy().copy()
    return image


def to_host(pixels: torch.Tensor) -> torch.Tensor:
    """Copy to the CPU; from a GPU through pinned memory."""
    if not pixels.is_cuda:
        return pixels
    host = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
    host.copy_(pixels, non_blocking=True)
    torch.cuda.current_stream(pixels.device).synchronize()
    return host


class LinearPreview:
    """A linear map that computes small previews from latents, fitted once to the model's own VAE.

    A latent's four channels nearly determine the mean colour of its 8×8 pixels, so least squares over a few decoded
    latents gives a usable preview at hardly any cost. Pass the estimate of the finished latent. There are no previews
    of latents that are not finite, nor of a VAE whose pictures are not.
    """

    _SAMPLES = 8
    _SIDE = 16

    def __init__(self, model: VaeModel, pictures: tiling.Decode | None = None) -> None:
        """`pictures` is the phase `VAE`; default: the model's own VAE, on torch."""
        generator = torch.Generator().manual_seed(0)
        channels = model.vae.config.latent_channels
        coarse = torch.randn((self._SAMPLES, channels, 4, 4), generator=generator)
        latents = F.interpolate(coarse, size=(self._SIDE, self._SIDE), mode="bicubic").to(model.device)
        levels, finite = decode(model, latents) if pictures is None else pictures(latents)
        self._usable = bool(finite.all())
        pixels = levels.float().permute(0, 3, 1, 2) / 255
        colours = F.adaptive_avg_pool2d(pixels, (self._SIDE, self._SIDE))
        inputs = self._flat(latents).double().cpu()
        self._map = torch.linalg.lstsq(inputs, colours.permute(0, 2, 3, 1).reshape(-1, 3).double().cpu()).solution

    def __call__(self, x0: torch.Tensor) -> NDArray[np.uint8] | None:
        """Map one latent estimate [1, C, h, w] to uint8 [h, w, 3]; None: it is not finite, or cannot be shown."""
        height, width = x0.shape[-2:]
        colours = self._flat(x0).double().cpu() @ self._map
        if not (self._usable and bool(all_finite([colours]))):
            return None
        image: NDArray[np.uint8] = colours.clamp(0, 1).mul(255).round().to(torch.uint8).numpy()
        return image.reshape(height, width, 3)

    @staticmethod
    def _flat(latents: torch.Tensor) -> torch.Tensor:
        rows = latents.permute(0, 2, 3, 1).flatten(0, 2)  # [B·h·w, C]
        return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
