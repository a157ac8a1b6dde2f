"""The decoder on the CPU kernels: equal to diffusers' in floats, near it in INT8, bits of a picture its own."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.ops.cpu import CpuLowering
from core.ops.cuda import CudaLowering
from core.ops.reference import TorchLowering
from core.quant.convert import quantize_
from core.quant.statistics import Statistics
from tests.core.quant.stage import check_close, kernels, normal, threads
from tests.unet_opt.shapes import KNOWN, row_errors, vae
from unet_opt import recipe
from unet_opt.layout import check_decoder
from unet_opt.vae import VaeDecoder


@torch.inference_mode()
def stock(of: Any, latents: Tensor) -> Tensor:
    """[B, H, W, 3] as diffusers decodes."""
    return of.decode(latents, return_dict=False)[0].permute(0, 2, 3, 1)  # type: ignore[no-any-return]


def on_kernels(of: Any, *, half: bool = False) -> VaeDecoder:
    return VaeDecoder(CpuLowering(kernels(), of, half=half), of)


def latents(rows: int, height: int, width: int, seed: int = 0) -> Tensor:
    return normal(seed, rows, 4, height, width, scale=4)


def quantized(of: Any, scheme: Any = "int8") -> Any:
    made, statistics = recipe.decoder(of), Statistics("digest")
    layers = made.targets(of)
    for seed in range(3):
        with statistics.observe(of, layers, 0):
            stock(of, latents(2, 4, 4, seed))
    quantize_(of, made, statistics, scheme=scheme)
    return of


# As SDXL's: attention in the middle. As ours: none. And one without a convolution behind the latents.
CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {"mid_block_add_attention": True},
    "ours": {},
    "two-resnets": {"layers_per_block": 2, "block_out_channels": (8, 16, 16, 48)},
    "no-post-quant": {"use_post_quant_conv": False},
    "two-blocks": {"block_out_channels": (16, 32), "up_block_types": ("UpDecoderBlock2D",) * 2,
                   "down_block_types": ("DownEncoderBlock2D",) * 2},
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("on", ["torch", "cpu"])
@pytest.mark.parametrize("name", [*CONFIGS, *KNOWN])
def test_in_floats_it_equals_diffusers(name: str, on: str) -> None:
    one = vae("plain", **CONFIGS[name]) if name in CONFIGS else vae(name)
    decoder = on_kernels(one) if on == "cpu" else VaeDecoder(TorchLowering(torch.float32), one)
    for rows, height, width in ((1, 4, 4), (3, 5, 2), (2, 1, 7), (3, 5, 2)):
        x = latents(rows, height, width, rows)
        wanted = stock(one, x)
        assert wanted.std() > 0.05
        check_close(decoder(x), wanted, relative=1e-5)


@pytest.mark.parametrize(("heads", "width"), [(4, 64), (2, 32), (1, 272)])
def test_a_middle_may_have_several_heads_or_a_wide_one(heads: int, width: int) -> None:
    """One so wide that a GPU's scores are materialized."""
    one, x = vae("plain", mid_block_add_attention=True, block_out_channels=(8, 16, 16, width)), latents(2, 4, 6)
    alone = stock(one, x)
    one.decoder.mid_block.attentions[0].heads = heads
    wanted = stock(one, x)
    assert heads == 1 or (wanted - alone).abs().max() > 1e-4, "it would prove nothing"
    for lowering in (CpuLowering(kernels(), one), CudaLowering(torch.float32, 4)):
        check_close(VaeDecoder(lowering, one)(x), wanted, relative=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_in_int8_it_equals_the_quantized_modules_and_is_near_the_model(name: str) -> None:
    plain = vae("plain", **CONFIGS[name])
    one = quantized(copy.deepcopy(plain))
    x = latents(16, 2, 2, seed=50)  # small: a value on the edge of two levels may fall either way, and few do here
    found, modules, wanted = on_kernels(one)(x), stock(one, x), stock(plain, x)

    assert row_errors(found, modules).median() < 1e-5
    assert row_errors(found, modules).max() < 1.5 * row_errors(modules, wanted).max()
    assert row_errors(found, wanted).max() < 0.2  # eight random channels, of which each counts


@pytest.mark.parametrize("scheme", ["floats", "int8", "half"])
def test_a_pictures_bits_depend_on_nothing_but_its_latents(scheme: str) -> None:
    one = vae("plain", mid_block_add_attention=True)
    programs = on_kernels(quantized(one) if scheme == "int8" else one, half=scheme == "half")
    x = latents(4, 4, 6)
    together = programs(x)
    for which in ([0], [3], [2, 1], [3, 3, 0]):
        assert torch.equal(programs(x[which]), together[which])
    with threads(2):
        assert torch.equal(programs(x), together)


def test_other_decoders_are_refused() -> None:
    one = vae("plain")
    other: Any = SimpleNamespace(config=SimpleNamespace(**one.config), decoder=one.decoder)
    check_decoder(other)
    other.config.up_block_types = ["UpDecoderBlock2D", "AttnUpDecoderBlock2D"]
    with pytest.raises(ValueError, match="vae: unsupported blocks: AttnUpDecoderBlock2D"):
        check_decoder(other)
    other.config.up_block_types = ["UpDecoderBlock2D"]
    for name in ("act_fn", "norm_type"):
        setattr(other.config, name, "other")
        with pytest.raises(ValueError, match=f"vae: {name} is 'other'; supported is "):
            check_decoder(other)
        delattr(other.config, name)
    with pytest.raises(ValueError, match="vae: is a SimpleNamespace; supported is AutoencoderKL"):
        check_decoder(SimpleNamespace(config=SimpleNamespace(), decoder=nn.Identity()))


def test_a_head_that_is_no_multiple_of_16_is_refused() -> None:
    one = vae("plain", mid_block_add_attention=True, block_out_channels=(8, 8, 16, 24))
    with pytest.raises(ValueError, match=r"vae decoder\.mid_block\.attentions\.0: heads of width 24 are no multiple"):
        on_kernels(one)
    with pytest.raises(ValueError, match=r"vae decoder\.mid_block\.attentions\.0: heads of width 24 are no multiple"):
        VaeDecoder(CudaLowering(torch.float32, 1), one)


def test_latents_of_other_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="vae: latents have 1 channels, not 4"):
        on_kernels(vae("plain"))(torch.zeros(1, 1, 4, 4))
