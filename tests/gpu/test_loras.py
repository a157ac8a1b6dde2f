"""LoRAs of requests on a GPU: as torch computes them, the same bits in any company, replayed as launched one by one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from core.cuda_graphs import CapturedGraph, CudaRecorder
from core.ops import cuda_branches
from core.ops.branches import LowRank
from core.ops.cuda import CudaLowering
from core.quant.convert import swap_
from core.quant.linear import Int8Conv2d, Int8Linear, ScaledConv2d, ScaledLinear
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel, load
from tests.gpu.conftest import add_variant
from tests.gpu.test_recording import WIDTHS
from tests.pipeline import loras
from tests.pipeline.extensions.test_adapted import companions, mixed
from tests.pipeline.worlds import Watching, levels, solo
from unet_opt import recipe
from unet_opt.deepcache import SplitUNet
from unet_opt.inputs import DenoiserInputs

LAYERS = (  # that have shares: attention's, and all but keys and values of the text
    r".*\.(attn1\.to_[kv]|attn[12]\.to_(q|out\.0))",
    r"(?!.*(\.attn2\.to_[kv]|cond_proj)$).*",
)
KINDS = [("bf16", False), ("int8", False), ("int8", True), ("fp8", False), ("fp8", True)]
PRECISIONS = pytest.mark.parametrize(("precision", "folds"), KINDS, indirect=["folds"])
DEEP = tiny.SDXLShape(
    channels=(64, 128, 256), transformers=(1, 2, 3), heads=(1, 2, 4), resnets=2, groups=32, text_width=32
)


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """The model with both variants of 8 bits."""
    add_variant(folder, "fp8")
    return folder


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """LoRAs of all its layers, and of keys and values alone."""
    made, model = tmp_path_factory.mktemp("loras"), load(str(folder))
    loras.write(model, made, "a")
    loras.write(model, made, "b", 1, rank=3, alpha=2.0)
    attn2 = f"{loras.ATTENTION}.attn2"
    loras.write(model, made, "keys", 2, layers={"unet": (f"{attn2}.to_k", f"{attn2}.to_v")}, loud=1.0)
    yield made


@pytest.fixture
def folds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether 8-bit products add shares themselves."""
    monkeypatch.setattr(cuda_branches, "FOLDS", request.param)
    return bool(request.param)


@cache
def model(folder: Path, precision: str) -> ImageModel:
    return load(str(folder), precision=precision, device="cuda")


def runner_of(folder: Path, precision: str, files: Path | None, *, fused: bool = True) -> Watching:
    options: dict[str, Any] = {"max_rows": 8, "buckets": WIDTHS} if fused else {}
    return Watching(model(folder, precision), loras=files, fused=fused, **options)


def wanted_of(**more: Any) -> dict[str, Any]:
    left_out = ("edit", "weighted")
    return {
        name: replace(one, width=64, height=64, **more) for name, one in companions().items() if name not in left_out
    }


@PRECISIONS
def test_deterministic_requests_are_equal_to_the_byte(folder: Path, files: Path, precision: str, folds: bool) -> None:
    """Alone and beside others with LoRAs and without; those without as on a server that has none."""
    wanted = wanted_of(deterministic=True)
    served, again, without = (runner_of(folder, precision, own) for own in (files, files, None))
    for runner in (served, again, without):
        runner.recording.close()  # or some would find graphs, whose bits may be others
    together = mixed(served, wanted)
    for name, one in wanted.items():
        alone = solo(again if one.lora else without, one)
        assert together[name].png() == alone.png(), name


@PRECISIONS
def test_pictures_are_those_of_torch(folder: Path, files: Path, precision: str, folds: bool) -> None:
    """Within what 8 bits, and another order of sums in bf16, cost a picture without a LoRA."""
    wanted = wanted_of()
    served, reference = runner_of(folder, precision, files), runner_of(folder, "bf16", files, fused=False)
    together = mixed(served, wanted)
    off = {name: np.abs(levels(together[name]) - levels(solo(reference, one))).mean() for name, one in wanted.items()}
    plain = max(off[name] for name, one in wanted.items() if not one.lora)
    assert all(each < 2 * plain + 4 for each in off.values()), off
    changed = np.abs(levels(together["one"]) - levels(solo(reference, replace(wanted["one"], lora="")))).mean()
    # E4M3 alone moves these pictures of random weights by 12 of 255.
    assert changed > (1.3 if precision == "fp8" else 2) * off["one"], f"it would prove nothing: {off['one']}"


@PRECISIONS
def test_recorded_graphs_draw_what_their_kernels_do_one_by_one(
    folder: Path, files: Path, precision: str, folds: bool
) -> None:
    served, wanted = runner_of(folder, precision, files), wanted_of()
    first = mixed(served, wanted)
    assert served.recording.wait(300) and not served.backend.graphs.failed
    known = served.backend.graphs._graphs._known
    assert {phase for phase, (*_, variant) in known if variant is not None} >= {"deep"}  # type: ignore[misc]
    again = mixed(served, wanted)
    for name in wanted:
        assert np.abs(levels(first[name]) - levels(again[name])).mean() < 3, name


def random_unet(device: torch.device) -> Any:
    """A UNet in INT8 as the recipe has it, with random weights and scales; what is in floats is bf16."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    with device:
        unet = UNet2DConditionModel(**DEEP.unet()).eval().requires_grad_(False).to(torch.bfloat16)
    rules = recipe.unet(unet)
    scales, layers = dict[str, torch.Tensor](), dict[str, nn.Module]()
    for name, layer in unet.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d) or rules.rule(name).reason:
            continue
        channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        by = scales.setdefault(rules.shares(name), (20 + 10 * torch.rand(channels)).to(layer.weight.device))
        layers[name] = Int8Linear.of(layer, by) if isinstance(layer, nn.Linear) else Int8Conv2d.of(layer, by)
    swap_(unet, layers)
    return unet


def factors(unet: Any, layers: str, seed: int) -> dict[str, LowRank]:
    """A LoRA of rank 8 for the layers whose names match."""
    generator, shares = torch.Generator().manual_seed(seed), {}
    for name, layer in unet.named_modules():
        if isinstance(layer, ScaledLinear):
            shape: tuple[int, ...] = (layer.out_features, layer.in_features)
        elif isinstance(layer, ScaledConv2d):
            shape = (layer.out_channels, layer.in_channels, *layer.kernel_size)
        else:
            continue
        if re.fullmatch(layers, name):
            down = torch.randn(8, *shape[1:], generator=generator) / math.prod(shape[1:]) ** 0.5
            up = torch.randn(shape[0], 8, *[1] * (len(shape) - 2), generator=generator)
            shares[name] = LowRank(down, up, 0.1)
    return shares


@torch.inference_mode()
@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_rows_of_a_forward_do_not_meet(folds: bool, recorded: bool) -> None:
    """In INT8, with layers of Hopper's kernels: a row's bits beside seven other LoRAs are those beside none."""
    device, count = torch.device("cuda"), 16
    unet = random_unet(device)
    lowering = CudaLowering(torch.bfloat16, count, unet)
    network, generator = SplitUNet(lowering, unet), torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    conditioning = {"kv": random(count, 77, network.text_width), "pooled": random(count, 24)}
    conditioning["time_ids"] = torch.ones(count, 6, device=device)
    inputs = DenoiserInputs(random(count, 4, 32, 32), torch.full((count,), 500.0, device=device), conditioning)
    for layers in LAYERS:
        packed = [lowering.pack_branches(factors(unet, layers, seed)) for seed in range(8)]
        rows = [[(packed[row // 2], 0.8)] for row in range(count)]
        outputs = []
        for adapted in ([], rows, [rows[0], *[[]] * (count - 1)]):
            with lowering.adapted(adapted):
                lowering.folds = folds
                step: Callable[[], Any] = partial(network.deep, inputs)
                if recorded:
                    step = CapturedGraph(step, (), {}, CudaRecorder(device))
                outputs.append(step()[0].clone())
        without, every, first = outputs
        assert torch.equal(every[0], first[0]) and torch.equal(without[1:], first[1:]), layers
        assert (every != without).flatten(1).any(1).all(), layers
