"""ControlNet-Unions and T2I-Adapters: parity with diffusers, alone and among requests with other controls and none."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from contract.image import ImageParameters
from contract.plan import AUTO
from pipeline.checkpoints.tiny import SDXLShape
from tests.pipeline import worlds
from tests.pipeline.controls import (
    adapter,
    control,
    controlnet,
    save,
    stock_adapted,
    stock_controlled,
    stock_union,
    union,
)
from tests.pipeline.extensions.checks import check_bits, refusal
from tests.pipeline.worlds import Crank, Watching, apart, model, options_of, shared_lane, solo, stock_picture, together

TWO, THREE = "kinds", "kinds of three levels"
SHAPES = {
    TWO: SDXLShape(channels=(16, 32), heads=(1, 2)),
    THREE: SDXLShape(native=64, channels=(16, 32, 48), transformers=(1, 1, 2), heads=(1, 2, 3)),
}


@pytest.fixture(scope="module", autouse=True)
def shapes() -> None:
    worlds.MORE |= SHAPES


@pytest.fixture(scope="module")
def nets() -> dict[str, dict[str, Any]]:
    makers = {"net": controlnet, "union": union, "adapter": adapter}
    return {shape: {kind: make(model(shape)) for kind, make in makers.items()} for shape in SHAPES}


@pytest.fixture(scope="module")
def folders(nets: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for shape, kinds in nets.items():
        found[shape] = tmp_path_factory.mktemp("controls")
        for kind, net in kinds.items():
            save(net, found[shape], kind)
    return found


def runner_of(folder: Path, shape: str = TWO, **options: Any) -> Watching:
    return Watching(model(shape), lane=shared_lane(), controls=folder, **options)


def wanted(shape: str, kind: str, *options: dict[str, Any], seed: int = 1, **more: Any) -> ImageParameters:
    """A picture with a control for each of these options, all of one network."""
    side = SHAPES[shape].native
    controls = tuple(control(kind, side, seed + n, **one) for n, one in enumerate(options))
    return ImageParameters("a red cat", seed, side, side, **{"steps": 5, **more}, control=controls)


def mixture(shape: str) -> list[ImageParameters]:
    return [
        wanted(shape, "union", {"mode": 0}, seed=1),
        wanted(shape, "union", {"mode": 3, "strength": 0.5}, seed=2, guidance_scale=1.0),
        wanted(shape, "union", {"mode": 1, "strength": 0.7}, {"mode": 2, "strength": 1.2}, seed=3, guidance_scale=6.0),
        wanted(shape, "adapter", {}, seed=4),
        wanted(shape, "adapter", {"strength": 0.6, "end": 0.6}, seed=5, guidance_scale=1.0),
        wanted(shape, "none", seed=6),
        wanted(shape, "net", {"strength": 0.8}, seed=7),
        wanted(shape, "union", {"mode": 2, "start": 0.2, "end": 0.8}, seed=8, steps=6),
        wanted(shape, "adapter", {}, seed=9, negative_prompt="blue", guidance_scale=7.0),
    ]


def expected(shape: str, nets: dict[str, Any], one: ImageParameters) -> np.ndarray:
    if not one.control:
        return stock_picture(shape, one)
    kind = one.control[0].model
    if kind == "net":
        return stock_controlled(shape, (nets[kind],), one)
    return (stock_union if kind == "union" else stock_adapted)(shape, nets[kind], one)


@pytest.mark.quick(0, 2, 3)
@pytest.mark.parametrize(("shape", "backend"), [(TWO, "torch"), (THREE, "torch"), (THREE, "kernels"), (TWO, "layers")])
def test_each_picture_equals_diffusers_alone_and_among_others(
    shape: str, backend: str, kernels: ctypes.CDLL, nets: dict[str, dict[str, Any]], folders: dict[str, Path]
) -> None:
    runner, asked = runner_of(folders[shape], shape, **options_of(backend, kernels)), mixture(shape)
    for one, picture in zip(asked, together(runner, asked), strict=True):
        theirs = expected(shape, nets[shape], one)
        assert apart(picture, theirs) <= 1, one
        plain = stock_picture(shape, replace(one, control=()))
        assert not one.control or apart(theirs, plain) > 3, "it would prove nothing"
    assert any({"0", "3", "5", "6"} <= riders for riders in runner.companions)
    for one in asked[::3]:
        assert apart(solo(runner, one), expected(shape, nets[shape], one)) <= 1, one


def test_bits_depend_on_no_companion(kernels: ctypes.CDLL, folders: dict[str, Path]) -> None:
    mixed = wanted(THREE, "union", {"mode": 1, "end": 0.5}, {"mode": 2}, seed=10)
    both = replace(mixed, control=(*mixed.control, *wanted(THREE, "adapter", {}).control), seed=11)
    asked = [*mixture(THREE), mixed, both, replace(both, deepcache=AUTO, seed=12)]
    check_bits(runner_of(folders[THREE], THREE, kernels=kernels), asked)


def test_adapters_of_fewer_maps_share_forwards_with_those_of_all(
    kernels: ctypes.CDLL, nets: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    save(nets[THREE]["adapter"], tmp_path, "whole")
    save(adapter(model(THREE), 5, channels=[*model(THREE).denoiser.config.block_out_channels]), tmp_path, "fewer")
    runner = runner_of(tmp_path, THREE, kernels=kernels)
    fewer, whole = wanted(THREE, "fewer", {}, seed=2), wanted(THREE, "whole", {}, seed=3)
    both = replace(whole, control=(*fewer.control, *whole.control), seed=4)
    asked = [fewer, whole, both, replace(both, control=both.control[::-1], seed=5)]
    check_bits(runner, asked)
    steps = runner.companions
    assert any({"0", "1", "2", "3"} <= riders for riders in steps)
    assert len(steps) <= 5 * (1 + len(asked)), "a batch failed, and its requests were run one by one"


def test_refusals_name_the_field(folders: dict[str, Path]) -> None:
    runner = runner_of(folders[TWO])
    for one, field, words in (
        (wanted(TWO, "union", {}), "control.mode", "must be from 0 to 3"),
        (wanted(TWO, "union", {"mode": 4}), "control.mode", "must be from 0 to 3"),
        (wanted(TWO, "net", {"mode": 0}), "control.mode", "is for ControlNet-Unions"),
        (wanted(TWO, "adapter", {"mode": 0}), "control.mode", "is for ControlNet-Unions"),
    ):
        error = refusal(runner, one)
        assert error.field == field and words in error.message
    odd = ImageParameters("a cat", 1, 40, 32, control=(control("adapter", 32),))
    odd = replace(odd, control=(replace(odd.control[0], image=bytes(3 * 40 * 32)),))
    error = refusal(runner, odd)
    assert error.field == "size" and "multiples of 16" in error.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapter_type": "full_adapter", "downscale_factor": 8}, "it makes maps of (channels, side)"),
        ({"channels": [16, 24]}, "it makes maps of (channels, side)"),
        ({"in_channels": 2}, "in_channels is 2"),
    ],
)
def test_an_adapter_of_another_model_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    save(adapter(model(TWO), **changes), tmp_path, "adapter")
    error = refusal(runner_of(tmp_path), wanted(TWO, "adapter", {}))
    assert error.field == "control.model" and words in error.message


def test_an_adapter_of_one_channel_reads_what_pillow_makes_grey(tmp_path: Path) -> None:
    net = adapter(model(TWO), in_channels=1)
    save(net, tmp_path, "adapter")
    one = wanted(TWO, "adapter", {})
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    one = replace(one, control=(replace(one.control[0], image=pixels.tobytes()),))
    crank = Crank(runner_of(tmp_path))
    request = crank.submit("x", one)
    crank.turn()
    (found,) = request.work.extensions["control"].controls.adapters
    grey = np.asarray(Image.fromarray(pixels).convert("L")).astype(np.float32)
    with torch.inference_mode():
        expected = net(torch.from_numpy(grey / 255)[None, None])
    for own, other in zip(found.features, expected, strict=True):
        assert (own.permute(0, 3, 1, 2) - other).abs().max() < 0.02  # at most one level of a pixel apart
