"""NVFP4: its table of values, rounding to the nearest, and the published layouts against plain loops."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.quant.fp4 import Fp4Linear, nearest_codes, values
from core.quant.fp4_layouts import Fp4Layout
from tests.core.quant.published import draw_fp4
from tests.core.quant.stage import Few, Seed, Several, normal

few = settings(max_examples=20, deadline=None)


def test_codes_stand_for_the_published_values() -> None:
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    codes = torch.arange(16, dtype=torch.uint8)
    assert values(codes).tolist() == expected
    assert torch.equal(nearest_codes(values(codes))[1:8], codes[1:8])
    assert torch.equal(nearest_codes(values(codes))[9:], codes[9:])


@few
@given(...)
def test_numbers_become_the_nearest_value_and_ties_the_even_code(
    numbers: Annotated[list[float], st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=50)],
) -> None:
    x = torch.tensor([*numbers, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    table = values(torch.arange(8, dtype=torch.uint8))
    for number, code in zip(x.tolist(), nearest_codes(x).tolist(), strict=True):
        distances = [abs(abs(number) - value) for value in table.tolist()]
        nearest = [i for i, distance in enumerate(distances) if distance == min(distances)]
        assert code % 8 == min(nearest, key=lambda i: i % 2) and (code >= 8) == (number < 0)


@few
@given(...)
def test_a_weight_is_off_by_a_sixth_of_the_largest_of_its_sixteen(
    n: Several, depth: Annotated[int, st.integers(1, 300)], size: Annotated[float, st.sampled_from((1e-6, 1.0, 1e3))],
    seed: Seed,
) -> None:  # fmt: skip
    weight = normal(seed, n, depth) * size
    layer = Fp4Linear.of_taps(weight[:, None], None)
    largest = torch.stack([part.abs().amax(1) for part in weight.split(16, dim=1)], 1)[:, torch.arange(depth) // 16]
    # Half of the widest gap between values (4 and 6), and of an E4M3 scale's, subnormal ones included.
    slack = 2.0**-10 * weight.abs().max() / 448
    assert ((layer.dense() - weight).abs() <= largest * (1 / 6 + 1 / 16) + slack).all()


@few
@given(...)
def test_a_layer_is_what_its_published_layout_says(
    method: Literal["compressed-tensors", "modelopt"], n: Few, blocks: Several, seed: Seed
) -> None:
    layout = Fp4Layout(method)
    parts, weight = draw_fp4(layout, n, 16 * blocks, seed=seed)
    expected = layout.parts(n, 16 * blocks)
    assert parts.keys() <= expected.keys() and expected.keys() - parts.keys() <= layout.optional
    layer = layout.layer(n, 16 * blocks, parts, None)
    torch.testing.assert_close(layer.dense(), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("byte", [0x7F, 0x81, 0xFF])  # NaN, a negative, and its NaN
def test_scales_that_are_no_positive_numbers_are_refused(byte: int) -> None:
    layout = Fp4Layout("modelopt")
    parts, _ = draw_fp4(layout, 2, 32, seed=0)
    parts["weight_scale"].view(torch.uint8)[1, 1] = byte
    with pytest.raises(ValueError, match="scales are not all finite and positive"):
        layout.layer(2, 32, parts, None)
    with pytest.raises(ValueError, match="40 inputs are no multiple of 16"):
        layout.parts(2, 40)
