"""Quantization and normalizations: within rounding of 64-bit PyTorch, over all widths, to floats and to bytes."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.kernels.cpu.program import Program
from core.kernels.cpu.token_program import TokenProgram
from core.quant.dynamic import quantize_rows
from core.quant.linear import quantize
from tests.core.quant.stage import (
    Few,
    Many,
    Seed,
    Several,
    as_bytes,
    called,
    check,
    check_close,
    kernels,
    normal,
    threads,
)

few = settings(max_examples=60)


def filled(norm: Any) -> Any:
    """With weights and biases."""
    for seed, parameter in enumerate(norm.requires_grad_(False).parameters()):
        parameter.copy_(normal(8 + seed, *parameter.shape))
    return norm


def exact_group_norm(x: Tensor, norm: nn.GroupNorm, images: int) -> Tensor:
    """[images · pixels, channels] in 64 bits."""
    maps = x.double().view(images, -1, x.shape[-1]).transpose(1, 2)
    made = F.group_norm(maps, norm.num_groups, norm.weight.double(), norm.bias.double(), norm.eps)
    return made.transpose(1, 2).reshape(x.shape)


@few
@given(...)
def test_quantize_is_pytorchs(
    rows: Many, channels: Many, scale: Annotated[float, st.sampled_from((1e-30, 1e-3, 1.0, 300.0))], seed: Seed
) -> None:
    """By scales of channels, and by each row's largest."""
    x, inverse = normal(seed, rows, channels), normal(seed + 1, channels, scale=scale)
    assert torch.equal(called(lambda p: p.quantize(x, inverse)), as_bytes(quantize(x, inverse)))
    x = scale * x * normal(seed + 1, rows, 1).exp()
    x[::3] = 0
    levels, scales = quantize_rows(x)
    assert torch.equal(called(lambda p: p.quantize_rows(x)[0]), as_bytes(levels))
    assert torch.equal(called(lambda p: p.quantize_rows(x)[1]), scales[:, 0])


@few
@given(...)
def test_rows_of_named_images_are_scaled_into_the_range_of_bytes(
    named: Annotated[list[int], st.lists(st.integers(0, 2), min_size=1, max_size=4)], tokens: Several,
    channels: Many, seed: Seed,
) -> None:  # fmt: skip
    rows = len(named) * tokens
    inverse = 50 * normal(seed + 1, channels).abs() + 1
    x = normal(seed, rows, channels) * normal(seed + 2, rows, 1).exp()
    within = inverse, torch.tensor(named, dtype=torch.int32)
    levels, scales = (called(lambda p, part=part: p.quantize_rows(x, within)[part]) for part in (0, 1))
    beyond = (x * inverse).abs().amax(dim=1) / 127
    applies = torch.tensor(named).repeat_interleave(tokens) != 0
    wanted = torch.where(applies, beyond.clamp(min=1), torch.ones(rows))
    assert torch.allclose(scales, wanted, rtol=1e-6) and torch.equal(scales == 1, wanted == 1)
    plain = called(lambda p: p.quantize(x, inverse))
    assert torch.equal(levels[scales == 1], plain[scales == 1])
    given = (levels.int() - 128) * scales[:, None] / inverse
    assert ((given - x).abs() <= (0.5001 * scales[:, None] / inverse))[applies].all(), "nothing is cut off"


def test_a_named_row_of_nan_harms_no_other() -> None:
    x = torch.ones(4, 19)
    x[1, 3] = torch.nan
    within = torch.ones(19), torch.ones(2, dtype=torch.int32)
    levels, scales = (called(lambda p, part=part: p.quantize_rows(x, within)[part])[[0, 2, 3]] for part in (0, 1))
    assert levels.eq(129).all() and scales.eq(1).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 18])
def test_the_scale_of_a_row_that_is_not_finite_is_nan(bad: float, place: int) -> None:
    x = torch.ones(3, 19)
    x[1, place] = bad
    assert called(lambda p: p.quantize_rows(x)[1]).isnan().tolist() == [False, True, False]


def test_quantize_rounds_half_to_even_and_clamps_what_no_integer_holds() -> None:
    x = torch.tensor([[0.5, 1.5, -0.5, -2.5, 127.5, 1e10, -1e10, torch.inf, -torch.inf, 3e38, torch.nan]])
    found = called(lambda p: p.quantize(x, torch.ones(11)))
    assert (found.int() - 128).tolist() == [[0, 2, 0, -2, 127, 127, -127, 127, -127, 127, -127]]


@settings(max_examples=120)
@given(...)
def test_layer_norm(
    images: Few, tokens: Several, channels: Many, mean: Annotated[float, st.sampled_from((0.0, 50.0))],
    eps: Annotated[float, st.sampled_from((1e-5, 1e-2))], affine: bool, scaled: bool, added: bool, floats: bool,
    seed: Seed,
) -> None:  # fmt: skip
    """With and without parameters, times a scale for each image, plus a residual."""
    x, residual = normal(seed, images * tokens, channels, scale=3) + mean, normal(seed + 3, images * tokens, channels)
    row_scale = normal(seed + 2, images, channels + 2)[:, 2:] if scaled and not mean else None
    inverse = None if floats or mean else normal(seed + 1, channels, scale=20)
    norm = filled(nn.LayerNorm(channels, eps, elementwise_affine=affine))

    def write(p: Program) -> Tensor:
        return p.layer_norm(x, norm, inverse, row_scale=row_scale, residual=residual if added else None)

    parameters = (norm.weight.double(), norm.bias.double()) if affine else (None, None)
    wanted = F.layer_norm(x.double(), (channels,), *parameters, eps)
    wanted = wanted if row_scale is None else wanted * row_scale.double().repeat_interleave(tokens, 0)
    wanted = wanted + residual.double() if added else wanted
    if mean:  # one channel is its own mean: what is left of it after rounding is divided by the root of eps
        check_close(called(write), wanted, relative=2e-5, least=4e-3)
    else:
        check(called(write), wanted, inverse, relative=1e-5)


@few
@given(...)
def test_group_norm(
    images: Few, pixels: Annotated[int, st.integers(2, 40)], size: Several, groups: Several,
    second: Annotated[int, st.integers(0, 40)], silu: bool, floats: bool, seed: Seed,
) -> None:  # fmt: skip
    """Of one input and of two side by side, whose border may lie within a group."""
    channels = size * groups
    c2 = min(second, channels - 1)
    whole = normal(seed, images * pixels, channels) * 3 + normal(seed + 1, channels)
    x, y = whole[:, : channels - c2].contiguous(), whole[:, channels - c2 :].contiguous()
    norm, inverse = filled(nn.GroupNorm(groups, channels)), None if floats else normal(seed + 2, channels, scale=20)
    found = called(lambda p: p.group_norm(x, y if c2 else None, norm, images=images, silu=silu, inverse=inverse))
    wanted = exact_group_norm(whole, norm, images)
    check(found, F.silu(wanted) if silu else wanted, inverse, relative=1e-5)


@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_group_norm_of_a_large_mean_is_as_good_as_torchs(mean: float) -> None:
    """E[x²] − E[x]² would lose all digits at a mean of 10⁴."""
    x, norm = normal(0, 2 * 256, 64) + mean, nn.GroupNorm(8, 64).requires_grad_(False)
    found = called(lambda p: p.group_norm(x, None, norm, images=2, silu=False, inverse=None))
    wanted = exact_group_norm(x, norm, 2)
    torchs = F.group_norm(x.view(2, 256, 64).transpose(1, 2), 8).transpose(1, 2).reshape(x.shape)
    error = (found - wanted).abs().max()
    assert error <= min(1e-6 * mean**0.5, (torchs - wanted).abs().max())


def test_group_norm_whose_first_pixel_is_an_outlier() -> None:
    """Sums are taken around the first pixel."""
    x, norm = normal(0, 1024, 32), filled(nn.GroupNorm(8, 32))
    x[0] = 1000
    found = called(lambda p: p.group_norm(x, None, norm, images=1, silu=False, inverse=None))
    check(found, exact_group_norm(x, norm, 1), relative=1e-5)


def test_what_is_nan_stays_so_in_floats() -> None:
    x = normal(0, 6, 20)
    x[2, 3] = torch.nan
    found = called(lambda p: p.layer_norm(x, filled(nn.LayerNorm(20)), None))
    other = called(lambda p: p.group_norm(x, None, filled(nn.GroupNorm(4, 20)), images=3, silu=True, inverse=None))
    assert found[2].isnan().all() and found[[0, 1, 3, 4, 5]].isfinite().all()
    assert other.view(3, 2, 4, 5)[1, :, 0].isnan().all()
    assert other.view(3, 2, 20)[[0, 2]].isfinite().all()


@pytest.mark.parametrize("floats", [True, False])
def test_an_images_bits_depend_neither_on_its_companions_nor_its_place_nor_threads(floats: bool) -> None:
    x, y, scales = normal(0, 5 * 30, 40), normal(1, 5 * 30, 24), normal(2, 5, 40)
    groups, layer = filled(nn.GroupNorm(8, 64)), filled(nn.LayerNorm(40))
    wide, narrow = (None if floats else normal(2, channels, scale=20) for channels in (64, 40))

    def run(first: int, images: int) -> list[Tensor]:
        rows = slice(30 * first, 30 * (first + images))
        a, b, row_scale = x[rows].contiguous(), y[rows].contiguous(), scales[first : first + images]
        return [
            called(lambda p: p.group_norm(a, b, groups, images=images, silu=True, inverse=wide)),
            called(lambda p: p.layer_norm(a, layer, narrow, row_scale=row_scale, residual=a)),
            called(lambda p: p.rms_norm(a, layer.weight, 1e-5, narrow, row_scale=row_scale, residual=a)),
        ]

    together = run(0, 5)
    for image in range(5):
        own = [whole[30 * image : 30 * image + 30] for whole in together]
        assert all(map(torch.equal, run(image, 1), own))
    with threads(2):
        assert all(map(torch.equal, run(0, 5), together))


X, LAYER, GROUPS = torch.zeros(6, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8)
NAMED = torch.ones(8), torch.ones(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("quantize", (X, torch.ones(7)), r"inverse: must be torch.float32 \[8\]"),
        ("quantize", (torch.zeros(8, 3).t(), torch.ones(8)), "x: its memory layout is not the kernels'"),
        ("quantize_rows", (X, NAMED), "6 rows are not those of 4 images"),
        ("layer_norm", (torch.zeros(3, 9), LAYER, None), r"weight: must be torch.float32 \[9\]"),
        ("layer_norm", (X, nn.LayerNorm(8, bias=False), None), "LayerNorm with a weight and no bias"),
        ("layer_norm", (X, LAYER, torch.ones(4)), "inverse: must be"),
        ("group_norm", (X, torch.zeros(5, 8), nn.GroupNorm(2, 16)), r"y: must be torch.float32 \[6, 8\]"),
        ("group_norm", (X, None, nn.GroupNorm(2, 16)), r"weight: must be torch.float32 \[8\]"),
        ("group_norm", (torch.zeros(5, 8), None, GROUPS), "5 pixels of 2 images"),
        ("group_norm", (X, None, nn.GroupNorm(2, 8, affine=False)), "GroupNorm without weight and bias"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, arguments: Any, said: str) -> None:
    options = {"images": 2, "silu": False, "inverse": None} if name == "group_norm" else {}
    with pytest.raises(ValueError, match=said):
        getattr(TokenProgram(kernels()), name)(*arguments, **options)
