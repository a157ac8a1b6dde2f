"""The UNet in two: deep is the UNet, shallow on fresh features is deep, on torch and on the CPU kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contract.plan import BLOCK, DEPTHS, RESNET
from core.ops.cpu import CpuLowering
from core.ops.reference import TorchLowering
from tests.core.quant.stage import check_close
from tests.unet_opt.shapes import UNETS, Inputs, deep, in_8_bits, inputs, of_sdxl, on_kernels, stock, unet
from tests.unet_opt.test_fused_unet import BASE, DEVICE, on_fused, placed
from unet_opt import deepcache
from unet_opt.deepcache import Features, SplitUNet, select_features, shapes


def on_torch(of: torch.nn.Module) -> SplitUNet:
    return SplitUNet(TorchLowering(torch.float32), of)


@torch.inference_mode()
def shallow(split: SplitUNet, depth: str, features: Features, given: Inputs, kv: Tensor | None = None) -> Tensor:
    (out,) = split.shallow(depth, given.of_denoiser(kv), features)
    return out


def own(features: Features) -> Features:
    """Not in buffers that the next call writes to."""
    return tuple(feature.clone() for feature in features)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("on", "name", "scheme"),
    [(on, name, "floats") for on in ("torch", "kernels", "fused") for name in UNETS]
    + [("kernels", name, "int8") for name in ("three-levels", "conv1x1", "distilled")]
    + [("fused", name, "int8") for name in ("three-levels", "two-resnets", "conv1x1")]
    + [("fused", "three-levels", "fp8")],
)  # fmt: skip
def test_shallow_on_fresh_features_has_the_bits_of_deep(on: str, name: str, scheme: str) -> None:
    one = unet(name) if scheme == "floats" else in_8_bits(name, scheme)
    given = inputs(one, 3, 8, 4)
    if on == "fused":
        split, given = on_fused(one.to(DEVICE, BASE), rows=5), placed(given)
    else:
        split = on_torch(one) if on == "torch" else on_kernels(one, half=scheme == "int8")
    out, *views = deep(split, given)
    eps, features = out.clone(), own(views)
    others = inputs(one, 5, 8, 4, seed=7)
    deep(split, placed(others) if on == "fused" else others)  # which use the buffers meanwhile
    for depth in DEPTHS:
        read = select_features(features, depth)
        assert [map_.shape[1:] for map_ in read] == [torch.Size(shape) for shape in shapes(one, depth, 8, 4)]
        assert torch.equal(shallow(split, depth, read, given), eps)


def test_shapes_of_features_are_found_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission asks for them several times a picture, and the engine's thread waits."""
    one = unet("plain")
    split = on_torch(one)
    wanted = {(depth, size): shapes(one, depth, *size) for depth in DEPTHS for size in ((8, 8), (4, 12))}
    assert all(split.feature_shapes(depth, *size) == found for (depth, size), found in wanted.items())
    monkeypatch.setattr(deepcache, "trace", None)
    assert all(split.feature_shapes(depth, *size) == found for (depth, size), found in wanted.items())


@pytest.mark.parametrize("depth", DEPTHS)
def test_on_old_features_kernels_and_torch_agree_and_differ_from_the_whole(depth: str) -> None:
    """What a shallow step is for: another sample and another time on features of the step before."""
    one = unet("three-levels")
    split, programs = on_torch(one), on_kernels(one)
    before, now = inputs(one, 4, 8, 8), inputs(one, 4, 8, 8)
    now = now._replace(sample=now.sample * 0.9 + 0.3, timestep=now.timestep - 20)
    of_torch = select_features(deep(split, before)[1:], depth)
    of_kernels = own(select_features(deep(programs, before)[1:], depth))
    for ours, theirs in zip(of_kernels, of_torch, strict=True):
        assert (ours - theirs).abs().max() <= 2e-5
    wanted = shallow(split, depth, of_torch, now)
    found = shallow(programs, depth, of_kernels, now)
    assert (found - wanted).abs().max() <= 2e-5
    whole = stock(one, now)
    assert (wanted - whole).abs().max() > 1e-3, "features of another step must matter"
    far = (wanted - whole).norm() / whole.norm()
    assert far < 1, "and yet be near"


def test_no_weight_is_copied() -> None:
    """The shallow end of the programs packs nothing that the whole has not packed."""
    one = unet("plain")
    split, given = on_kernels(one), inputs(one, 2, 8, 8)
    features = own(deep(split, given)[1:])
    assert isinstance(split.lowering, CpuLowering)
    before = split.lowering.layers.size_bytes
    for depth in DEPTHS:
        shallow(split, depth, select_features(features, depth), given)
    assert split.lowering.layers.size_bytes == before


@pytest.mark.parametrize("lowering", ["torch", "kernels"])
def test_a_last_block_with_attention_reads_the_text_again(lowering: str) -> None:
    """SDXL's has none; smaller models of its layout have."""
    one = unet("attention-last")
    split, given = (on_torch if lowering == "torch" else on_kernels)(one), inputs(one, 3, 8, 8)
    eps, *features = deep(split, given)
    check_close(eps, stock(one, given), relative=1e-5)
    features = list(own(tuple(features)))
    with torch.inference_mode():
        kv, others = split.prepare_text(given.hidden), split.prepare_text(given.hidden + 1)
    for depth in DEPTHS:
        read = select_features(features, depth)
        assert torch.equal(shallow(split, depth, read, given, kv), eps)
        assert not torch.equal(shallow(split, depth, read, given, others), eps)
        with pytest.raises(ValueError, match="keys and values must be "):
            shallow(split, depth, read, given, kv[:2])


def test_the_depths_read_what_the_submission_says() -> None:
    """SDXL at 1024²: two residuals of 320 and an input of 640 channels at 128×128 (FACTS of MLPerf's submission)."""
    sdxl = of_sdxl()
    assert shapes(sdxl, BLOCK, 128, 128) == [(128, 128, 640), (128, 128, 320), (128, 128, 320)]
    assert shapes(sdxl, RESNET, 128, 128) == [(128, 128, 320)]


def test_a_unet_of_another_build_is_refused() -> None:
    one = unet("plain")
    del one.down_blocks[0].resnets[-1]
    with pytest.raises(ValueError, match="cannot be split"):
        on_torch(one)
