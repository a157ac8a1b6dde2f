"""Dynamic scales: layers that compute what 64 bits do on the same levels, each row of bits by itself."""

from __future__ import annotations

from itertools import product as pairs
from typing import Annotated, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.ops.fused import Reader
from core.quant.dynamic import SMALLEST, Int8DynamicConv2d, Int8DynamicLinear, product, quantize_rows
from core.quant.linear import LEVELS
from tests.core.quant.stage import Many, Seed, Several, normal

few = settings(max_examples=60)
Size = Annotated[float, st.sampled_from((1e-25, 1e-3, 1.0, 1e4, 1e20))]
Height = Annotated[int, st.integers(3, 8)]


def linear(n: int, k: int, bias: bool, seed: int) -> nn.Linear:
    layer = nn.Linear(k, n, bias=bias).requires_grad_(False)
    layer.weight.copy_(normal(seed, n, k) * normal(seed + 1, n, 1).exp())
    return layer


def within(found: Tensor, wanted: Tensor, terms: Tensor) -> bool:
    """Whether fp32 came within a few roundings of the sum of `terms`' magnitudes, in 64 bits."""
    return bool(((found.double() - wanted).abs() <= 3e-6 * terms + 1e-37).all())


@few
@given(...)
def test_a_level_is_off_by_half_a_step_and_the_largest_is_127(rows: Several, k: Many, size: Size, seed: Seed) -> None:
    x = normal(seed, rows, k) * normal(seed + 1, rows, 1).exp() * size
    levels, scale = quantize_rows(x)
    assert levels.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (rows, 1)
    assert (levels.abs().amax(-1) == LEVELS).all()
    off = (levels.double() * scale.double() - x.double()).abs()
    assert (off <= 0.5001 * scale).all()


def test_rows_of_zeros_and_of_what_is_no_number() -> None:
    levels, scale = quantize_rows(torch.tensor([[0.0, -0.0], [1e-45, 0.0], [SMALLEST, 0.0], [float("nan"), 1.0]]))
    assert levels[:3].tolist() == [[0, 0], [0, 0], [127, 0]] and torch.isfinite(scale[:3]).all()
    layer = Int8DynamicLinear.of(linear(3, 2, True, 0), None)
    made = layer(torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [1.0, 2.0]]))
    assert torch.equal(made[0], layer.bias) and torch.isfinite(made[3]).all()  # type: ignore[arg-type]
    assert torch.isnan(made[1]).all() and not torch.isfinite(made[2]).any()


@few
@given(...)
def test_a_linear_layer_is_that_of_64_bits_and_near_the_one_it_replaces(
    rows: Several, k: Many, n: Many, bias: bool, size: Size, seed: Seed
) -> None:
    x, layer = normal(seed, rows, k) * size, linear(n, k, bias, seed + 2)
    made = Int8DynamicLinear.of(layer, None)
    levels, scale = quantize_rows(x)
    a, b = levels.double() * scale.double(), made.weight.double() * made.scale.double()[:, None]
    add = torch.zeros(n).double() if layer.bias is None else layer.bias.double()
    assert within(made(x), F.linear(a, b, add), F.linear(a.abs(), b.abs(), add.abs()))
    rounding = scale * layer.weight.abs().sum(1) + x.abs().sum(1, keepdim=True) * made.scale + k * scale * made.scale
    wanted = F.linear(x.double(), layer.weight.double(), add)
    assert ((made(x).double() - wanted).abs() <= 0.51 * rounding + 1e-6 * add.abs()).all()


@pytest.mark.parametrize("depth", [1, 1040, 1041, 2080, 2500])
def test_sums_of_levels_are_of_no_more_inputs_than_floats_hold(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many as fp32 holds exactly at the largest levels, and so in any order: no more, and no fewer."""
    linear, depths = F.linear, list[int]()

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        depths.append(x.shape[-1])
        return linear(x, weight)

    monkeypatch.setattr(F, "linear", counted)
    levels, weight = (torch.full((rows, depth), LEVELS, dtype=torch.int8) for rows in (2, 3))
    sums = product(levels, weight)
    most = next(count for count in range(2000, 0, -1) if count * LEVELS**2 <= 2**24)
    assert depths == [most] * (depth // most) + [depth % most] * (depth % most > 0)
    assert torch.equal(sums, torch.full((2, 3), float(torch.tensor(depth * LEVELS**2).float())))


@few
@given(...)
def test_a_convolution_is_that_of_64_bits(
    c: Several, n: Several, kernel: Literal[1, 3],
    stride: Literal[1, 2], padding: Literal[0, 1], height: Height,
    width: Height, bias: bool, seed: Seed,
) -> None:  # fmt: skip
    layer = nn.Conv2d(c, n, kernel, stride=stride, padding=padding, bias=bias).requires_grad_(False)
    check_convolution(layer, seed, height, width)


@pytest.mark.parametrize("kernel", [(1, 3), (3, 1), (2, 4)])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 1)])
def test_a_kernel_need_not_be_square(kernel: tuple[int, int], stride: int, padding: int) -> None:
    layer = nn.Conv2d(5, 3, kernel, stride=stride, padding=padding).requires_grad_(False)
    check_convolution(layer, 0, 6, 9)


def check_convolution(layer: nn.Conv2d, seed: int, height: int, width: int) -> None:
    """Compare a layer with the same products in 64 bits, on pixels of all sizes."""
    c, n, stride, padding = layer.in_channels, layer.out_channels, layer.stride, layer.padding
    assert not isinstance(padding, str)
    layer.weight.copy_(normal(seed, n, c, *layer.kernel_size))
    x = normal(seed + 1, 2, c, height, width) * normal(seed + 2, 2, 1, height, width).exp()
    made = Int8DynamicConv2d.of(layer, None)
    levels, scale = quantize_rows(x.permute(0, 2, 3, 1))
    a = (levels.double() * scale.double()).permute(0, 3, 1, 2)
    b = (made.weight.double() * made.scale.double().view(-1, 1, 1, 1)).permute(0, 3, 1, 2)
    add = None if layer.bias is None else layer.bias.double()
    wanted = F.conv2d(a, b, add, stride, padding)
    terms = F.conv2d(a.abs(), b.abs(), None if add is None else add.abs(), stride, padding)
    assert made(x).shape == layer(x).shape and within(made(x), wanted, terms)


@pytest.mark.parametrize("k", [7, 1040, 1041, 3000])
def test_sums_are_exact_and_a_row_is_the_same_in_every_company(k: int) -> None:
    """All levels at their largest: the largest sums that there are."""
    levels, weight = torch.full((2, k), 127, dtype=torch.int8), torch.full((3, k), -127, dtype=torch.int8)
    found = product(levels, weight)
    assert k > 1040 or found.unique().tolist() == [-127 * 127 * k]
    layer, x = Int8DynamicLinear.of(linear(33, k, True, k), None), normal(k, 37, k)
    with torch.inference_mode():
        together = layer(x)
        for first, count in ((0, 1), (3, 2), (20, 17)):
            assert torch.equal(layer(x[first : first + count]), together[first : first + count])
        assert torch.equal(layer(x.view(1, 37, k))[0], together)


def test_a_picture_has_its_own_bits_and_a_pixel_changes_only_what_reads_it() -> None:
    layer = nn.Conv2d(24, 16, 3, padding=1).requires_grad_(False)
    made, x = Int8DynamicConv2d.of(layer, None), normal(5, 3, 24, 6, 7)
    with torch.inference_mode():
        together = made(x)
        for picture in range(3):
            assert torch.equal(made(x[picture : picture + 1])[0], together[picture])
        x[0, :, 2, 3] *= 1e6
        changed = (made(x) != together).any(1)
    near = {(row, column) for row, column in pairs(range(1, 4), range(2, 5))}
    assert {(row, column) for _, row, column in changed.nonzero().tolist()} == near and not changed[1:].any()


def test_gpus_refuse_it_by_name() -> None:
    with pytest.raises(ValueError, match="the GPU kernels do not support Int8DynamicLinear"):
        Reader.of([Int8DynamicLinear.of(linear(8, 8, True, 0), None)])
