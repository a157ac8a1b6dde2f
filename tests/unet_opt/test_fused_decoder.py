"""The fused decoder: equal to diffusers in floats, as near to it as the quantized modules in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.ops.cuda import CudaLowering
from core.quant.convert import quantize_
from core.quant.statistics import Statistics
from tests.core.quant.stage import check_close
from tests.unet_opt.shapes import KNOWN, vae
from tests.unet_opt.test_fused_unet import BASE, CUDA, DEVICE, error
from tests.unet_opt.test_vae import CONFIGS, latents, stock
from unet_opt import recipe
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
    floats, statistics = stock(of, x), Statistics("digest")
    made = recipe.decoder(of)
    for seed in range(3):
        with statistics.observe(of, made.targets(of), 0):
            stock(of, latents(2, 4, 4, seed))
    quantize_(of, made, statistics, scheme=scheme)  # type: ignore[arg-type]
    wanted = stock(of, x)
    assert error(fused(of, x), floats) < 1.6 * error(wanted, floats) + 0.005


@pytest.mark.skipif(CUDA, reason="parity in fp32")
@pytest.mark.parametrize("heads", [1, 2])
def test_attention_in_the_middle_at_any_width(heads: int) -> None:
    """With several heads, and with one so wide that its scores are materialized."""
    channels = {1: (8, 16, 16, 272), 2: (8, 16, 16, 32)}[heads]
    of, x = vae("plain", mid_block_add_attention=True, block_out_channels=channels), latents(2, 4, 6)
    of.decoder.mid_block.attentions[0].heads = heads
    check_close(fused(of, x), stock(of, x), relative=1e-5)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_head_that_is_no_multiple_of_16_is_refused(heads: int) -> None:
    of = vae("plain", mid_block_add_attention=True, block_out_channels=(8, 8, 16, 24 * heads))
    of.decoder.mid_block.attentions[0].heads = heads
    with pytest.raises(ValueError, match=r"vae decoder\.mid_block\.attentions\.0: heads of width 24 are no multiple"):
        fused(of, latents(1, 2, 2))
