"""The fused decoder: equal to diffusers in floats, as near to it as the quantized modules in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.ops.cuda import CudaLowering
from tests.core.quant.stage import check_close, error
from tests.unet_opt.shapes import KNOWN, vae
from tests.unet_opt.test_fused_unet import BASE, CUDA, DEVICE
from tests.unet_opt.test_vae import CONFIGS, latents, quantized, stock
from unet_opt.vae import VaeDecoder


@torch.inference_mode()
def fused(of: Any, x: Tensor) -> Tensor:
    return VaeDecoder(CudaLowering(BASE, 4), of.to(DEVICE, BASE))(x.to(DEVICE)).float().cpu()


@pytest.mark.parametrize("name", [*CONFIGS, *KNOWN])
def test_in_floats_it_is_diffusers(name: str) -> None:
    of = vae("plain", **CONFIGS[name]) if name in CONFIGS else vae(name)
    for rows, height, width in ((1, 4, 4), (3, 6, 2)):
        x = latents(rows, height, width, rows)
        wanted = stock(of.float().cpu(), x)
        rounded = stock(of.to(DEVICE, BASE), x.to(DEVICE, BASE)).float().cpu()
        found = fused(of, x)
        assert wanted.std() > 0.05
        if CUDA:  # as far from fp32 as diffusers in the same type is, whose sums are rounded elsewhere
            assert error(found, wanted) < 1.3 * error(rounded, wanted) + 0.002
        else:
            check_close(found, wanted, relative=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_in_8_bits_it_is_as_far_from_floats_as_the_quantized_modules(name: str, scheme: str) -> None:
    """Or half as far again: the summed taps of three upsampling convolutions are rounded once more."""
    of, x = vae("plain", **CONFIGS[name]), latents(2, 4, 4)
    floats = stock(of, x)
    wanted = stock(quantized(of, scheme), x)
    assert error(fused(of, x), floats) < 1.6 * error(wanted, floats) + 0.005
