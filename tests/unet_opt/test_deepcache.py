"""The UNet in two: deep is the UNet, shallow on fresh features is the UNet too, in torch and in the CPU kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.plan import BLOCK, DEPTHS, RESNET
from pipeline.denoise import PackedKeys
from tests.core.quant.stage import kernels
from tests.unet_opt.shapes import UNETS, Inputs, inputs, quantized, stock, unet
from unet_opt.deepcache import SplitUNet, kept, shapes
from unet_opt.program import UNetPrograms


def _call(function: Any, given: Inputs, hidden: Tensor, *first: Any) -> tuple[Tensor, ...]:
    with torch.inference_mode():
        added = {"text_embeds": given.pooled, "time_ids": given.time_ids}
        return function(  # type: ignore[no-any-return]
            *first, given.sample, given.timestep, hidden, timestep_cond=given.time_cond, added_cond_kwargs=added
        )


@pytest.mark.parametrize("name", UNETS)
@pytest.mark.parametrize("size", [(8, 8), (4, 12), (6, 5)])
def test_deep_and_shallow_are_the_stock_unet_exactly(name: str, size: tuple[int, int]) -> None:
    one = unet(name)
    split, given = SplitUNet(one), inputs(one, 3, *size)
    wanted = stock(one, given)
    eps, *features = _call(split.deep, given, given.hidden)
    assert torch.equal(eps, wanted)
    for depth in DEPTHS:
        read = kept(features, depth)
        assert [map_.shape[1:] for map_ in read] == [torch.Size(shape) for shape in shapes(one, depth, *size)]
        (again,) = _call(split.shallow, given, given.hidden, depth, read)
        assert torch.equal(again, wanted)


@pytest.mark.parametrize("scheme", ["floats", "int8"])
@pytest.mark.parametrize("name", UNETS)
def test_in_the_kernels_shallow_on_fresh_features_has_the_bits_of_deep(name: str, scheme: str) -> None:
    one = unet(name) if scheme == "floats" else quantized(unet(name))
    programs, given = UNetPrograms(kernels(), one, half=scheme == "int8"), inputs(one, 3, 8, 4)
    hidden = PackedKeys(copy.deepcopy(one))(given.hidden)
    eps, *views = _call(programs, given, hidden)
    features = [view.clone() for view in views]
    for depth in DEPTHS:
        read = kept(features, depth)
        assert [map_.shape[1:] for map_ in read] == [
            torch.Size((height, width, channels)) for channels, height, width in shapes(one, depth, 8, 4)
        ]
        (again,) = _call(programs.shallow, given, hidden, depth, read)
        assert torch.equal(again, eps)


@pytest.mark.parametrize("depth", DEPTHS)
def test_on_old_features_kernels_and_torch_agree_and_differ_from_the_whole(depth: str) -> None:
    """What a shallow step is for: another sample and another time on features of the step before."""
    one = unet("three-levels")
    split, programs = SplitUNet(one), UNetPrograms(kernels(), one)
    before, now = inputs(one, 4, 8, 8), inputs(one, 4, 8, 8)
    now = now._replace(sample=now.sample * 0.9 + 0.3, timestep=now.timestep - 20)
    packed = PackedKeys(copy.deepcopy(one))(now.hidden)
    of_torch = kept(_call(split.deep, before, before.hidden)[1:], depth)
    of_kernels = [view.clone() for view in kept(_call(programs, before, packed)[1:], depth)]
    for ours, theirs in zip(of_kernels, of_torch, strict=True):
        assert (ours.permute(0, 3, 1, 2) - theirs).abs().max() <= 2e-5
    (wanted,) = _call(split.shallow, now, now.hidden, depth, of_torch)
    (found,) = _call(programs.shallow, now, packed, depth, tuple(of_kernels))
    assert (found - wanted).abs().max() <= 2e-5
    whole = stock(one, now)
    assert (wanted - whole).abs().max() > 1e-3, "features of another step must matter"
    far = (wanted - whole).norm() / whole.norm()
    assert far < 1, "and yet be near"


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_shallow_rows_bits_depend_on_nothing_but_the_row(depth: str) -> None:
    one = quantized(unet("three-levels"))
    programs, given = UNetPrograms(kernels(), one, half=True), inputs(one, 5, 8, 8)
    hidden = PackedKeys(copy.deepcopy(one))(given.hidden)
    features = [view.clone() for view in kept(_call(programs, given, hidden)[1:], depth)]
    (together,) = _call(programs.shallow, given, hidden, depth, tuple(features))
    for which in ([0], [4], [2, 3], [4, 3, 2, 1, 0], [1, 1, 3]):
        some = tuple(feature[which] for feature in features)
        (alone,) = _call(programs.shallow, given.rows(which), hidden[which], depth, some)
        assert torch.equal(alone, together[which])


def test_no_weight_is_copied() -> None:
    """The shallow end of the programs packs nothing that the whole has not packed."""
    one = unet("plain")
    programs, given = UNetPrograms(kernels(), one), inputs(one, 2, 8, 8)
    hidden = PackedKeys(copy.deepcopy(one))(given.hidden)
    features = [view.clone() for view in _call(programs, given, hidden)[1:]]
    before = programs.layers.size_bytes
    for depth in DEPTHS:
        _call(programs.shallow, given, hidden, depth, kept(features, depth))
    assert programs.layers.size_bytes == before


def test_the_depths_read_what_the_submission_says() -> None:
    """SDXL at 1024²: two residuals of 320 and an input of 640 channels at 128×128 (FACTS of MLPerf's submission)."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        sdxl = UNet2DConditionModel.from_config(_SDXL)
    assert shapes(sdxl, BLOCK, 128, 128) == [(640, 128, 128), (320, 128, 128), (320, 128, 128)]
    assert shapes(sdxl, RESNET, 128, 128) == [(320, 128, 128)]


def test_a_unet_of_another_build_is_refused() -> None:
    one = unet("plain")
    del one.down_blocks[0].resnets[-1]
    with pytest.raises(ValueError, match="cannot be split"):
        SplitUNet(one)


_SDXL = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}
