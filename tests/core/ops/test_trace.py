"""A trace is what the lowerings do: the same operations with the same layers, and arrays of the same shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from contract.plan import DEPTHS
from core.ops.cpu import CpuOps
from core.ops.cuda import CudaOps
from core.ops.ops import bind
from core.ops.packed import PackedLayers
from core.ops.reference import TorchOps
from core.ops.trace import Trace, TracedCall, trace
from tests.core.quant.stage import Few, Several, kernels, normal
from tests.unet_opt.shapes import UNETS, quantized, unet, vae
from tests.unet_opt.test_vae import CONFIGS
from unet_opt import unet as network
from unet_opt.deepcache import input_shapes, select_features
from unet_opt.vae import decode

TRACED = {"linear", "biases", "gated", "conv", "upsample", "group_norm", "layer_norm", "attend"}


class Seen:
    """Operations that compute, as a trace has them."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.calls: list[TracedCall] = []

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._ops, name)
        if name not in TRACED:
            return own

        def seen(x: Any, *rest: Any, **options: Any) -> Any:
            given_shape, made = shape(x), own(x, *rest, **options)
            layers = tuple(each for each in rest if isinstance(each, nn.Module))
            self.calls.append(TracedCall(name, layers, given_shape, shape(made)))
            return made

        return seen


def shape(x: Any) -> tuple[int, ...]:
    """Of an array of any lowering, of two that are read as one too."""
    if isinstance(x, tuple):
        first, second = map(shape, x)
        return (*first[:-1], first[-1] + second[-1])
    return tuple(x.shape)


def on_torch(walk: Callable[..., Any], *shapes: tuple[int, ...]) -> Trace:
    ops = Seen(TorchOps())
    return _trace(ops, walk(ops, *(normal(0, *each) for each in shapes)))


def fused(walk: Callable[..., Any], *shapes: tuple[int, ...]) -> Trace:
    ops = Seen(CudaOps(torch.float32, shapes[0][0]))
    return _trace(ops, walk(ops, *(normal(0, *each) for each in shapes)))


def programs(model: nn.Module) -> Callable[..., Trace]:
    def on_cpu(walk: Callable[..., Any], *shapes: tuple[int, ...]) -> Trace:
        own = CpuOps(kernels(), PackedLayers(kernels(), model))
        ops = Seen(own)
        return _trace(ops, walk(ops, *map(own.input, shapes)))

    return on_cpu


def _trace(ops: Seen, found: Any) -> Trace:
    outputs = found if isinstance(found, tuple) and not hasattr(found, "_fields") else (found,)
    return Trace(ops.calls, tuple(map(shape, outputs)))


def check(model: nn.Module, walk: Callable[..., Any], *shapes: tuple[int, ...], only_torch: bool = False) -> Trace:
    wanted = trace(walk, *shapes)
    assert wanted.calls
    with torch.inference_mode():
        for run in (on_torch,) if only_torch else (on_torch, programs(model), fused):
            found = run(walk, *shapes)
            assert found.outputs == wanted.outputs
            for own, told in zip(found.calls, wanted.calls, strict=True):
                assert own == told, own.operation
    return wanted


@pytest.mark.quick
@pytest.mark.parametrize("scheme", ["floats", "int8"])
@pytest.mark.parametrize("name", UNETS)
def test_of_a_unet(name: str, scheme: str) -> None:
    """Whole, and its shallow ends on features of the shapes that the whole returns; and its keys and values."""
    one = unet(name) if scheme == "floats" else quantized(unet(name))
    one_row = input_shapes(one, 8, 12)
    given_shapes = [(3, *row[1:]) for row in one_row[:3]] + [(3, 7, one_row[3][-1])]
    whole = check(one, bind(network.deep, one), *given_shapes)
    out, *features = whole.outputs
    assert out == (3, 8, 12, one.config.out_channels)
    for depth in DEPTHS:
        read = select_features(features, depth)

        def shallow(ops: Any, sample: Any, time: Any, added: Any, *features: Any) -> Any:
            return network.shallow(ops, one, sample, time, added, None, *features)

        assert check(one, shallow, *given_shapes[:3], *read).outputs == (out,)
    width = network.cross_attentions(one)[0].to_k.in_features
    assert check(one, bind(network.text_keys, network.cross_attentions(one)), (3, 7, width)).outputs == (
        given_shapes[3],
    )


@settings(max_examples=4)
@given(...)
def test_of_a_unet_whose_sides_are_odd(rows: Few, height: Several, width: Several) -> None:
    one = unet("three-levels")
    one_row = input_shapes(one, height, width)
    check(one, bind(network.deep, one), *((rows, *row[1:]) for row in one_row), only_torch=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_of_a_decoder(name: str) -> None:
    one = vae("plain", **CONFIGS[name])
    (pixels,) = check(one, bind(decode, one), (2, 3, 5, 4)).outputs
    scale = 2 ** (len(one.config.block_out_channels) - 1)
    assert pixels == (2, 3 * scale, 5 * scale, 3)


def test_it_needs_no_weights() -> None:
    with torch.device("meta"):
        layers = nn.Linear(10**6, 10**6), nn.Conv2d(10**6, 10**6, 3, stride=2, padding=0)

    found = trace(lambda ops, x: ops.columns(ops.conv(ops.linear(x, layers[0]), layers[1]), 5, 7), (1, 9, 8, 10**6))
    assert found.outputs == ((1, 4, 4, 7),)
    assert [(call.operation, call.layers) for call in found.calls] == [("linear", layers[:1]), ("conv", layers[1:])]
