"""Quantized layers: integers and scales that mean the layer, within the error that eight bits must have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.quant.fp8 import E4M3_MAX, Fp8Linear, available, to_e4m3
from core.quant.linear import LEVELS, Int8Conv2d, Int8Linear, quantize, quantize_weight
from core.quant.smoothing import inverse_scales, smoothing
from tests.core.quant.stage import Many, Seed, Several, normal

few = settings(max_examples=60)


def scales(x: Tensor, weight: Tensor, alpha: float | None = None) -> Tensor:
    """`inverse` for inputs x [rows, K]."""
    activations = x.abs().amax(0)
    largest = weight.detach().abs().flatten(2).amax((0, 2)) if weight.dim() == 4 else weight.detach().abs().amax(0)
    return inverse_scales(activations, None if alpha is None else smoothing(activations, largest, alpha))


def bound(x: Tensor, weight: Tensor, inverse: Tensor, scale: Tensor) -> Tensor:
    """The most that rounding x [rows, K] and weight [N, K] to their levels can do to each of x · wᵀ, [rows, N]."""
    folded_x, folded_w = (x * inverse).double(), (weight / inverse).double()
    off_x, off_w = 0.5, 0.5 * scale.double()
    return (
        off_x * folded_w.abs().sum(1) + folded_x.abs().sum(1, keepdim=True) * off_w + off_x * off_w * x.shape[1]
    ) * 1.001


@few
@given(...)
def test_a_linear_layers_error_is_within_the_bound_of_rounding(
    rows: Several, k: Many, n: Many, bias: bool, alpha: Annotated[float | None, st.sampled_from((None, 0.5, 0.8))],
    seed: Seed,
) -> None:  # fmt: skip
    x = normal(seed, rows, k) * normal(seed + 1, k).exp()
    layer = nn.Linear(k, n, bias=bias).requires_grad_(False)
    layer.weight.copy_(normal(seed + 2, n, k))
    inverse = scales(x, layer.weight, alpha)
    made = Int8Linear.of(layer, inverse)
    assert made.weight.dtype == torch.int8 and made.weight.abs().max() <= LEVELS
    error = (
        made(x).double() - F.linear(x.double(), layer.weight.double(), None if not bias else layer.bias.double())
    ).abs()
    assert (error <= bound(x, layer.weight, inverse, made.scale) + 1e-5).all()


@few
@given(...)
def test_a_convolutions_error_is_within_the_bound_of_rounding(
    c: Several, n: Several, kernel: Literal[1, 3],
    stride: Literal[1, 2], padding: Literal[0, 1],
    size: Annotated[int, st.integers(3, 8)], bias: bool, seed: Seed,
) -> None:  # fmt: skip
    x = normal(seed, 2, c, size, size + 1)
    layer = nn.Conv2d(c, n, kernel, stride, padding, bias=bias).requires_grad_(False)
    inverse = scales(x.permute(0, 2, 3, 1).reshape(-1, c), layer.weight)
    made = Int8Conv2d.of(layer, inverse)
    assert made.weight.shape == (n, kernel, kernel, c) and made.weight.dtype == torch.int8
    found, wanted = made(x), layer(x)
    assert found.shape == wanted.shape
    # Every output as a row of its inputs: the bound is then the linear layer's.
    rows = F.unfold(x, kernel, padding=padding, stride=stride).transpose(1, 2).flatten(0, 1)
    weight, spread = layer.weight.flatten(1), inverse.repeat_interleave(kernel * kernel)
    most = bound(rows, weight, spread, made.scale).view(2, -1, n).transpose(1, 2).view(found.shape)
    assert ((found - wanted).abs() <= most + 1e-5).all()


def test_integers_times_scales_is_what_a_layer_computes() -> None:
    """Exactly, in integers: what kernels are held against."""
    x, layer = normal(0, 7, 24), nn.Linear(24, 10).requires_grad_(False)
    made = Int8Linear.of(layer, scales(x, layer.weight, 0.5))
    sums = quantize(x, made.inverse).long() @ made.weight.long().t()
    assert torch.equal(made(x), sums.float() * made.scale + layer.bias)
    assert repr(made) == "Int8Linear(in_features=24, out_features=10, bias=True)"


def test_types_and_shapes_go_through() -> None:
    layer, x = nn.Linear(8, 6), normal(0, 2, 3, 8)
    made = Int8Linear.of(layer, scales(x.view(-1, 8), layer.weight))
    assert made(x).shape == (2, 3, 6) and made(x.bfloat16()).dtype == torch.bfloat16
    assert made(x[0, 0]).shape == (6,)
    assert not [*made.parameters()] and {*made.state_dict()} == {"weight", "scale", "inverse", "bias"}


@pytest.mark.parametrize("kind", [Int8Linear, Int8Conv2d, Fp8Linear])
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float64, torch.float16])
def test_scales_and_integers_keep_their_types_when_a_model_is_cast(kind: Any, cast: torch.dtype) -> None:
    layer = nn.Conv2d(16, 16, 3) if kind is Int8Conv2d else nn.Linear(16, 16)
    model = nn.Sequential(kind.of(layer, torch.rand(16) + 0.5), nn.LayerNorm(16))
    before = {name: (tensor.dtype, tensor.clone().view(torch.uint8)) for name, tensor in model[0].state_dict().items()}
    model.to(cast)
    assert model[1].weight.dtype == cast
    for name, tensor in model[0].state_dict().items():
        assert tensor.dtype == before[name][0] and torch.equal(tensor.view(torch.uint8), before[name][1])
    assert {buffer.device.type for buffer in model[0].to("meta").buffers()} == {"meta"}


@few
@given(...)
def test_weights_are_rounded_by_row(
    n: Several, k: Many, size: Annotated[float, st.floats(1e-6, 1e6)], seed: Seed
) -> None:
    weight = normal(seed, n, k, scale=size)
    found, scale = quantize_weight(weight)
    assert (found.abs().amax(1) == LEVELS).all()
    assert ((found * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()


def test_rows_of_nothing_stay_nothing() -> None:
    weight = torch.tensor([[0.0, -0.0], [1e-45, -1e-45], [1.0, -2.0]])
    found, scale = quantize_weight(weight)
    assert found.tolist() == [[0, 0], [0, 0], [64, -127]] and scale.tolist()[:2] == [1, 1] and scale.isfinite().all()


@pytest.mark.parametrize(
    "options",
    [{"groups": 2}, {"dilation": 2}, {"stride": (1, 2)}, {"padding": (0, 1)}, {"padding": "same"},
     {"padding": 1, "padding_mode": "reflect"}],
)  # fmt: skip
def test_only_plain_convolutions_are_quantized(options: Any) -> None:
    with pytest.raises(ValueError, match="only plain convolutions are quantized"):
        Int8Conv2d.of(nn.Conv2d(4, 4, 3, **options), torch.ones(4))


@few
@given(...)
def test_fp8_is_within_the_error_of_three_bits_of_mantissa(
    rows: Several, k: Many, n: Many, bias: bool, seed: Seed
) -> None:
    x = normal(seed, rows, k)
    layer = nn.Linear(k, n, bias=bias).requires_grad_(False)
    inverse = scales(x, layer.weight, 0.5)
    made = Fp8Linear.of(layer, inverse)
    assert made.weight.dtype == torch.float8_e4m3fn and made.weight.float().isfinite().all()
    assert (x * made.inverse).abs().max() <= E4M3_MAX * 1.001
    terms = (x.double()[:, None] * layer.weight.double()).abs().sum(-1)  # each product is off by 2⁻⁴ and 2⁻⁴ at most
    least = (1 / made.inverse).abs().amax() * 2**-9 * layer.weight.abs().sum(1)  # of what is less than normal numbers
    assert (
        (made(x) - layer(x)).abs()
        <= 0.13 * terms + 2 * least + made.scale * 2**-9 * (x * made.inverse).abs().sum(1)[:, None] + 1e-6
    ).all()


def test_fp8_clamps_where_its_cast_would_make_nan() -> None:
    assert to_e4m3(torch.tensor([500.0, -1e6, 448.0])).float().tolist() == [448.0, -448.0, 448.0]
    assert not available(torch.device("cpu"))
