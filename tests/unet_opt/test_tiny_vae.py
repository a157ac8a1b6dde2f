"""The tiny decoder on every lowering: within a level of diffusers' pixels, and a picture's bits its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.ops.cpu import CpuLowering
from core.ops.cuda import CudaLowering
from core.ops.ops import Lowering
from core.ops.reference import TorchLowering
from core.ops.trace import trace
from tests.core.quant.stage import check_close, kernels, normal, threads
from tests.unet_opt.shapes import tiny_vae as tiny
from unet_opt.tiny_vae import TinyDecoder, decode

LEVEL = 1 / 255  # of a pixel; the range is twice as wide


def lowering(name: str, of: Any) -> Lowering:
    if name == "cpu":
        return CpuLowering(kernels(), of)
    return TorchLowering(torch.float32) if name == "torch" else CudaLowering(torch.float32, 4)


@torch.inference_mode()
def stock(of: Any, latents: Tensor) -> Tensor:
    """[B, H, W, 3] as diffusers decodes."""
    return of.decode(latents, return_dict=False)[0].permute(0, 2, 3, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["torch", "cpu", "cuda"])
@settings(max_examples=12)
@example(width=64, blocks=(3, 3, 3, 1), channels=4, rows=2, height=8, across=6, seed=1)  # TAESD's own
@given(
    width=st.sampled_from([4, 16, 24, 64]), blocks=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    channels=st.sampled_from([4, 16]), rows=st.integers(1, 3), height=st.integers(1, 5), across=st.integers(1, 5),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_it_equals_diffusers(
    name: str, width: int, blocks: tuple[int, ...], channels: int, rows: int, height: int, across: int, seed: int
) -> None:
    """At any width and number of blocks, on maps of odd sides too; latents may be far beyond the clamp."""
    of, latents = tiny(width, blocks, channels, seed), normal(seed, rows, channels, height, across, scale=4)
    wanted = stock(of, latents)
    with torch.inference_mode():
        found = TinyDecoder(lowering(name, of), of)(latents)
    assert found.shape == wanted.shape and wanted.std() > 0.05
    check_close(found, wanted, relative=1e-5)
    assert (found.clamp(-1, 1) - wanted.clamp(-1, 1)).abs().max() < LEVEL


def test_a_pictures_bits_depend_on_nothing_but_its_latents() -> None:
    one, x = tiny(), normal(3, 4, 4, 4, 6)
    programs = TinyDecoder(CpuLowering(kernels(), one), one)
    together = programs(x)
    for which in ([0], [3], [2, 1], [3, 3, 0]):
        assert torch.equal(programs(x[which]), together[which])
    with threads(2):
        assert torch.equal(programs(x), together)


def test_the_walk_is_the_papers() -> None:
    """Each convolution once, in order; doubled where the layout says so."""
    one = tiny(blocks=(2, 0, 1))
    calls, (made,) = trace(lambda ops, z: decode(ops, one.decoder, z), (1, 2, 3, 4))
    wanted = [layer for layer in one.decoder.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert [call.layers[0] for call in calls] == wanted and made == (1, 8, 12, 3)
    assert [call.operation for call in calls].count("upsample") == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"act_fn": "gelu"}, "vae-tiny: act_fn is 'gelu'; supported is 'relu'"),
        ({"upsample_fn": "bilinear"}, "vae-tiny: upsample_fn is 'bilinear'; supported is 'nearest'"),
        ({"upsampling_scaling_factor": 4}, "vae-tiny: upsampling_scaling_factor is 4; supported is 2"),
        ({"out_channels": 4}, "vae-tiny: out_channels is 4; supported is 3"),
        ({"decoder_block_out_channels": [16, 8]}, r"decoder_block_out_channels is \[16, 8\]; supported is one width"),
        ({"num_decoder_blocks": None}, "vae-tiny: is a SimpleNamespace; supported is AutoencoderTiny"),
    ],
)
def test_other_layouts_are_refused(changes: dict[str, Any], said: str) -> None:
    one = tiny()
    other = SimpleNamespace(config=SimpleNamespace(**{**one.config, **changes}), decoder=one.decoder)
    with pytest.raises(ValueError, match=said):
        TinyDecoder(TorchLowering(torch.float32), other)


def test_latents_of_other_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="vae-tiny: latents have 1 channels, not 4"):
        TinyDecoder(TorchLowering(torch.float32), tiny())(torch.zeros(1, 1, 4, 4))
