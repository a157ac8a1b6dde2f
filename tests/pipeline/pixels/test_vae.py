"""Decoding and previews: equal to diffusers' pixels; a preview that resembles what the decoder will draw."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.checkpoints.load import load
from pipeline.pixels import vae
from tests.pipeline.worlds import model, stock


@pytest.mark.parametrize("batch", [1, 3])
def test_pixels_equal_diffusers(batch: int) -> None:
    latents = torch.randn(batch, 4, 4, 6, generator=torch.Generator().manual_seed(batch))
    pipeline = stock("plain")
    with torch.inference_mode():
        pixels = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor).sample
    expected = np.stack([np.asarray(image) for image in pipeline.image_processor.postprocess(pixels)])
    found = vae.decode(model("plain"), latents)[0].numpy()
    assert found.shape == (batch, 32, 48, 3)
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1


def test_latents_mean_and_std_are_honoured() -> None:
    config = SimpleNamespace(scaling_factor=0.5, latents_mean=[1.0, 2.0], latents_std=[3.0, 4.0])
    latents = torch.ones(1, 2, 1, 1)
    assert vae.unscale(latents, config).flatten().tolist() == [1 * 3 / 0.5 + 1, 1 * 4 / 0.5 + 2]
    assert vae.unscale(latents, SimpleNamespace(scaling_factor=0.5)).flatten().tolist() == [2.0, 2.0]


def test_a_decoder_that_overflows_in_fp16_is_run_in_fp32() -> None:
    half, whole = load("random:tiny", precision="fp16"), load("random:tiny")
    assert half.vae.config.force_upcast and half.vae.dtype is torch.float32 and half.denoiser.dtype is torch.float16
    latents = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    difference = vae.decode(half, latents.half())[0].int() - vae.decode(whole, latents)[0].int()
    assert difference.abs().max() <= 3  # the weights went through fp16, the arithmetic did not


class LinearDecoder(torch.nn.Module):
    """Mixes a latent's channels into a colour and paints its 8×8 pixels with it."""

    config = SimpleNamespace(latent_channels=4, scaling_factor=0.5, block_out_channels=(1, 1, 1, 1))
    dtype = torch.float32

    def decode(self, z: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        mix = torch.tensor([[0.1, 0.0, 0.05], [0.0, 0.1, 0.0], [0.0, -0.05, 0.1], [0.05, 0.0, -0.1]])
        colours = torch.einsum("bchw,cd->bdhw", z, mix) + torch.tensor([0.0, 0.1, -0.1]).view(1, 3, 1, 1)
        return (F.interpolate(colours, scale_factor=8, mode="nearest"),)


def test_a_preview_of_a_linear_decoder_is_exact() -> None:
    linear = model("plain").with_parts(vae=LinearDecoder())
    latents = 0.5 * torch.randn(1, 4, 3, 5, generator=torch.Generator().manual_seed(7))
    preview = vae.LinearPreview(linear)(latents)
    assert preview.shape == (3, 5, 3) and preview.dtype == np.uint8
    assert preview.std() > 10
    assert np.abs(preview.astype(int) - vae.decode(linear, latents)[0][0, ::8, ::8].numpy().astype(int)).max() <= 2


@pytest.mark.parametrize(
    ("size", "most", "wanted"), [((6, 4), 8, (6, 4)), ((8, 8), 8, (8, 8)), ((32, 16), 8, (8, 4)), ((5, 40), 8, (1, 8))]
)
def test_a_picture_is_reduced_to_its_areas_means(size: tuple[int, int], most: int, wanted: tuple[int, int]) -> None:
    pixels = torch.randint(0, 256, (1, *size, 3), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    found = vae.reduced(pixels, most)
    assert found.shape == (*wanted, 3) and found.dtype == np.uint8
    means = F.interpolate(pixels.permute(0, 3, 1, 2).float(), size=wanted, mode="area")[0].permute(1, 2, 0)
    assert np.abs(found - means.numpy()).max() <= 0.5
