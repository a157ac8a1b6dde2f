"""W4A8: every level fits INT8, and a layer computes bit for bit what an INT8 one does, on CPU kernels too."""

from __future__ import annotations

import copy
from typing import Annotated

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from core.ops.fused import FusedLayer
from core.ops.packed import PackedLayers
from core.quant.gptq import compensate_
from core.quant.int4 import unpack_codes
from core.quant.linear import Int8Linear
from core.quant.w4a8 import W4A8Linear, in_int8
from tests.core.quant.stage import Seed, Several, kernels, normal

few = settings(max_examples=30, deadline=None)


@few
@given(...)
def test_a_weight_is_off_by_half_a_step_and_every_level_fits_int8(
    n: Several, depth: Annotated[int, st.integers(1, 400)], size: Annotated[float, st.sampled_from((1e-6, 1.0, 1e3))],
    shift: Annotated[float, st.sampled_from((0.0, -3.0, 5.0))], seed: Seed,
) -> None:  # fmt: skip
    weight = (normal(seed, n, depth) + shift) * size
    layer = W4A8Linear.of_taps(weight[:, None], None)
    step, zero = (layer.group & 15).long() + 1, (layer.group >> 4).long()
    assert (-zero * step >= -127).all() and ((15 - zero) * step <= 127).all()  # GPTQ may choose any
    codes, groups = unpack_codes(layer.weight, depth).long(), torch.arange(depth) // 128
    assert torch.equal(in_int8(layer).weight.long(), (codes - zero[:, groups]) * step[:, groups])
    assert torch.equal(in_int8(layer).weight.long(), layer.levels.long() * step[:, groups])
    # Half a step of 15, and half a unit of the first level.
    assert ((layer.dense() - weight).abs() <= 8.1 * weight.abs().amax(1, keepdim=True) / 112).all()


def test_a_layer_computes_bit_for_bit_what_its_int8_layer_does() -> None:
    dense = nn.Linear(300, 24).requires_grad_(False)
    x = normal(1, 2, 3, 300)
    layer = W4A8Linear.of(dense, 127 / x.abs().amax((0, 1)))
    eight = in_int8(layer)
    assert type(eight) is Int8Linear and torch.equal(layer(x), eight(x))
    assert (layer(x) - dense(x)).norm() < 0.15 * dense(x).norm()
    fused = FusedLayer([layer], torch.float32)
    assert fused.kind == torch.int8 and torch.equal(fused.weight, eight.weight)
    model = nn.ModuleDict({"four": layer, "eight": eight})
    packed = PackedLayers(kernels(), model)
    assert torch.equal(packed(layer).weights.packed, packed(eight).weights.packed)
    assert torch.equal(packed(layer).inverse, packed(eight).inverse) and packed(layer).widths == (24,)  # type: ignore[arg-type]


def test_gptq_rounds_within_the_levels_of_each_group() -> None:
    dense, mix = nn.Linear(200, 16).requires_grad_(False), normal(0, 6, 200)
    rows = normal(1, 600, 6) @ mix + 0.05 * normal(2, 600, 200)
    layer = W4A8Linear.of(dense, 127 / rows.abs().amax(0))
    after = copy.deepcopy(layer)
    assert compensate_(after, dense, rows) and torch.equal(after.group, layer.group)
    low, high = after.level_range
    assert ((low <= after.levels) & (after.levels <= high)).all()
    other = normal(3, 200, 6) @ mix
    assert (after(other) - dense(other)).norm() < 0.75 * (layer(other) - dense(other)).norm()
