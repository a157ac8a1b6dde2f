"""ESRGAN's network: a plain restatement's pictures in every key layout, and files that are none, refused by their keys.

Measured once against spandrel 0.4.2's own network (with torchvision stubbed): difference 0 for 23, 6, 3 and 2 blocks,
factors 1, 2, 4 and 8, with and without pixel unshuffle, in all three layouts.
"""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import esrgan
from pipeline.extensions.esrgan import Shape
from tests.pipeline.upscalers import LAYOUTS, TINY, State, enlarged, weights

SHAPES = [
    TINY, Shape(8, 4, 1, 1), Shape(8, 4, 1, 3), Shape(8, 4, 1, 0), Shape(8, 4, 2, 2, 2), Shape(8, 4, 1, 2, 4),
]  # fmt: skip


def data_of(state: State) -> bytes:
    return save({key: tensor.contiguous() for key, tensor in state.items()})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_network_of_the_papers(shape: Shape, layout: str) -> None:
    state = weights(shape)
    network = esrgan.read("net", data_of(LAYOUTS[layout](state, shape)))
    assert network.shape == shape and not network.training
    x = torch.rand(1, 3, 12, 8, generator=torch.Generator().manual_seed(1))
    expected = enlarged(state, shape, x)
    assert expected.shape == (1, 3, 12 * shape.factor, 8 * shape.factor) and expected.std() > 0.01
    assert (network(x) - expected).abs().max() < 1e-5


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(SHAPES))
def test_sides_that_the_unshuffling_does_not_divide_are_kept(height: int, width: int, shape: Shape) -> None:
    network = esrgan.read("net", data_of(weights(shape)))
    assert network(torch.rand(1, 3, height, width)).shape == (1, 3, height * shape.factor, width * shape.factor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_halves_and_8_bits_are_read_in_full(dtype: torch.dtype) -> None:
    state = {key: tensor.to(dtype) for key, tensor in weights().items()}
    network = esrgan.read("net", data_of(state))
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert all(torch.equal(own, state[key].float()) for key, own in network.state_dict().items())


def changed(**changes: Any) -> bytes:
    """The tiny network's file with these tensors: None takes one out."""
    state = {**weights(), **{name.replace("__", "."): value for name, value in changes.items()}}
    return data_of({name: tensor for name, tensor in state.items() if tensor is not None})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pickle.dumps({}), "is a pickle"),
        (data_of(weights())[:-8], "is damaged"),
        (data_of({}), "conv_first.weight is missing: it is no ESRGAN network"),
        # SwinIR, SPAN, Real-ESRGAN's compact network, ESRGAN+ and a UNet
        (data_of({"layers.0.residual_group.blocks.0.norm1.weight": torch.ones(4)}), "layers.0.residual_group"),
        (data_of({"block_1.c1_r.sk.weight": torch.ones(4)}), "block_1.c1_r.sk.weight is no part of an ESRGAN"),
        (data_of({"body.0.weight": torch.ones(4)}), "body.0.weight is no part"),
        (changed(model__1__sub__0__RDB1__conv1x1__weight=torch.ones(4)), "model.1.sub.0.RDB1.conv1x1.weight is no"),
        (data_of({"model.diffusion_model.input_blocks.0.0.weight": torch.ones(4)}), "model.diffusion_model.input"),
        (changed(conv_hr__bias=None), "conv_hr.bias is missing"),
        (changed(body__1__rdb2__conv3__weight=None), "body.1.rdb2.conv3.weight is missing"),
        (changed(body__3__rdb2__conv3__weight=torch.ones(1)), "body.2.rdb1.conv1.weight is missing"),
        (changed(conv_up5__weight=torch.ones(8, 8, 3, 3)), "conv_up3.weight is missing"),
        (changed(conv_up5__bias=torch.ones(8)), "conv_up5.bias is more than the network has"),
        (changed(conv_last__weight=torch.ones(4, 8, 3, 3)), "conv_last.weight is torch.float32 [4, 8, 3, 3]"),
        (changed(conv_last__weight=torch.ones(3, 8, 3, 3, dtype=torch.int8)), "conv_last.weight is torch.int8"),
        (changed(conv_last__bias=torch.full((3,), torch.nan)), "conv_last.bias holds what is no finite number"),
        (changed(conv_first__weight=torch.ones(8, 1, 3, 3)), "conv_first.weight reads 1 channels, and not RGB"),
        (changed(conv_first__weight=torch.ones(8)), "conv_first.weight is [8], and no convolution"),
        (changed(trunk_conv__weight=torch.ones(8)), "are the same layer"),
        (changed(conv_first__weight=torch.ones(8, 48, 3, 3), conv_up2__weight=None), "it enlarges 0.5 times"),
    ],
)  # fmt: skip
def test_what_is_no_such_network_is_refused_by_name(data: bytes, said: str) -> None:
    with pytest.raises(ModelError) as caught:
        esrgan.read("net", data)
    assert str(caught.value).startswith("upscaler net: ") and said in str(caught.value)


def test_a_header_that_begins_like_a_pickle_is_read() -> None:
    """Safetensors begin with their header's length, whose lowest byte may be any multiple of 8."""
    for padding in range(64):
        data = save(weights(), metadata={"note": "x" * 8 * padding})
        if data[0] == 0x80:
            assert esrgan.read("net", data).shape == TINY
            return
    pytest.fail("no length begins so")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations made and that are still there; `most` at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0

    def _gone(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made._base is None:
            self.live += made.nbytes
            self.most = max(self.most, self.live)
            weakref.finalize(made, self._gone, made.nbytes)
        return made


@pytest.mark.parametrize(
    "shape", [*SHAPES, Shape(64, 32, 2), Shape(64, 32, 1, 3), Shape(16, 100, 1, 0), Shape(32, 8, 1, 3, 4)]
)
def test_what_a_forward_holds_is_known_before_it_runs(shape: Shape) -> None:
    """On shapes alone, without memory."""
    with torch.device("meta"):
        network = esrgan.RRDBNet(shape).eval().requires_grad_(False)
        x = torch.empty(1, 3, 96, 96)
    with torch.no_grad(), LiveBytes() as live:
        network(x)
    assert 0.4 * shape.forward_bytes(96, 4) <= live.most <= shape.forward_bytes(96, 4)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (Shape(257, 4, 1), "it has 257 filters, 4 more in each layer and 1 blocks; at most 256, 256 and 64 are"),
        (Shape(4, 257, 1), "it has 4 filters, 257 more"),
        (Shape(1, 1, 65), "1 more in each layer and 65 blocks"),
    ],
)
def test_networks_beyond_any_budget_are_refused(shape: Shape, said: str) -> None:
    with pytest.raises(ModelError, match=f"^upscaler net: .*{said}"):
        esrgan.read("net", data_of(weights(shape)))
