"""The VAE's encoder written down once, near diffusers' on torch and on the CPU kernels."""

from __future__ import annotations

import pytest
import torch

from core.ops.cpu import CpuLowering
from core.ops.reference import TorchLowering
from tests.core.quant.stage import check_close, kernels, normal
from tests.unet_opt.shapes import vae
from tests.unet_opt.test_vae import CONFIGS
from unet_opt.vae import VaeEncoder


@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "no-post-quant"])
@torch.inference_mode()
def test_its_distribution_is_that_of_diffusers(name: str, backend: str) -> None:
    one = vae("plain", **CONFIGS[name])
    lowering = TorchLowering(torch.float32) if backend == "torch" else CpuLowering(kernels(), one)
    encoder, scale = VaeEncoder(lowering, one), 2 ** (len(one.config.block_out_channels) - 1)
    for rows, height, width in ((1, 4, 4), (3, 5, 2)):
        pixels = normal(rows, rows, height * scale, width * scale, 3)
        expected = one.encode(pixels.permute(0, 3, 1, 2)).latent_dist
        for found, wanted in zip(encoder(pixels), (expected.mean, expected.std), strict=True):
            assert found.shape == wanted.shape and wanted.std() > 1e-4
            check_close(found, wanted, relative=1e-5)
