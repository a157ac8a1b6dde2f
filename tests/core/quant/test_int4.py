"""Weights of 4 bits: packed and unpacked, rounded within half a step, scaled by calibration, stored as they are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Annotated

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.ops.fused import FusedLayer
from core.quant import int4, store
from core.quant.convert import Recipe, RecipeError, Rule, quantize_
from core.quant.int4 import Int4Linear
from core.quant.search import chosen, search
from tests.core.quant.blocks import TWO, block, observed, observed_two, squared_error
from tests.core.quant.blocks import recipe as of_block
from tests.core.quant.stage import Seed, Several, TwoLayers, normal

few = settings(max_examples=30, deadline=None)


def inputs(seed: int = 0) -> Tensor:
    return normal(seed, 400, 12) @ normal(99, 12, 300) * (3 * normal(1, 300)).exp()


@few
@given(...)
def test_words_hold_every_level(n: Several, depth: Annotated[int, st.integers(1, 600)], seed: Seed) -> None:
    levels = torch.randint(-8, 8, (n, depth), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    words = int4.pack(levels)
    assert words.dtype == torch.int16 and words.shape == (n, 64 * -(-depth // 256))
    assert torch.equal(int4.unpack(words, depth), levels)
    column, row = (depth - 1) % 256, n - 1
    word = int(words[row, (depth - 1) // 256 * 64 + column % 64]) & 0xFFFF
    assert (word >> 4 * (column // 64)) & 15 == int(levels[row, depth - 1]) + 8  # as the kernels read it


@few
@given(...)
def test_a_weight_is_off_by_half_a_step_of_its_group(
    n: Several, depth: Annotated[int, st.integers(1, 300)],
    size: Annotated[float, st.sampled_from((1e-6, 1e-2, 1.0, 1e3))], seed: Seed,
) -> None:  # fmt: skip
    weight = normal(seed, n, depth) * size
    layer = Int4Linear.of_taps(weight[:, None], None)
    groups = torch.arange(depth) // 128
    largest = torch.stack([weight[:, groups == group].abs().amax(1) for group in groups.unique()], dim=1)
    step = (largest / 7).clamp_min(2.0**-14)[:, groups]
    assert ((layer.dense() - weight).abs() <= 0.502 * step).all()


def test_a_layer_computes_what_its_levels_say() -> None:
    layer = Int4Linear.of_taps(normal(0, 5, 1, 300), normal(1, 300).exp())
    layer.bias = normal(2, 5)
    layer.zero = torch.arange(20, dtype=torch.int8).view(5, 4) % 15 - 8
    x = normal(3, 2, 3, 300)
    groups = torch.arange(300) // 128
    weight = (int4.unpack(layer.weight, 300).double() - layer.zero.double()[:, groups]) * layer.scale.double()[
        :, groups
    ]
    assert layer.bias is not None
    expected = (x.double() * layer.inverse.double()) @ weight.T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-4)
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16 and layer.scale.dtype == torch.float16


def test_scales_of_inputs_are_proportions() -> None:
    """Their geometric mean is 1, so that scaled inputs are as large as they were; equal ones are none."""
    inverse = normal(1, 300).exp() * 1e4
    scaled = Int4Linear.of(torch.nn.Linear(300, 5), inverse).inverse
    assert scaled is not None
    torch.testing.assert_close(scaled / scaled[0], inverse / inverse[0])
    assert abs(float(scaled.log().mean())) < 1e-4
    assert Int4Linear.of(torch.nn.Linear(300, 5), torch.full((300,), 7.0)).inverse is None


def test_scales_of_inputs_searched_scales_and_gptq_each_lower_the_error() -> None:
    model, found = TwoLayers(), {}
    seen = observed_two(model, inputs())
    searched = chosen(TWO, search(model, TWO, seen, scheme="w4a16"))
    plain = Recipe("plain", (Rule("first|second"),))
    for name, recipe, gptq in (("plain", plain, False), ("scaled", TWO, False), ("searched", searched, False),
                               ("gptq", plain, True), ("both", searched, True)):  # fmt: skip
        quantized = copy.deepcopy(model)
        report = quantize_(quantized, recipe, seen, scheme="w4a16", gptq=gptq)
        assert report.changed == ["first", "second"] and bool(report.compensated) == gptq
        assert (quantized.first._buffers["inverse"] is None) == (recipe is plain)
        found[name] = squared_error(quantized, model, inputs(7))
    assert found["scaled"] < 0.9 * found["plain"] and found["searched"] <= found["scaled"] * 1.001
    assert found["gptq"] < 0.7 * found["plain"] and found["both"] < found["searched"]


@pytest.mark.parametrize(("part", "tensor", "said"), [
    ("weight", torch.zeros(40, 128), "weight is torch.float32, not torch.int16"),
    ("scale", torch.zeros(40, 2, dtype=torch.float16), "scale is [40, 2], not [40, 4]"),
    ("zero", torch.zeros(40, 4), "zero is torch.float32, not torch.int8"),
])  # fmt: skip
def test_stored_parts_of_other_types_and_shapes_are_refused(
    tmp_path: Path, part: str, tensor: Tensor, said: str
) -> None:
    model = TwoLayers()
    quantized = copy.deepcopy(model)
    report = quantize_(quantized, TWO, observed_two(model, inputs()), scheme="w4a16")
    quantized.first._buffers[part] = tensor
    manifest = store.Manifest("w4a16", "two", "", dict.fromkeys(report.changed, "Int4Linear"), report.skipped, {})
    store.save(quantized, tmp_path, manifest)
    with pytest.raises(store.QuantizedStoreError, match="layer first does not fit") as raised:
        store.load_(copy.deepcopy(model), tmp_path)
    assert said in str(raised.value)


def test_other_networks_than_decoders_refuse_it_by_name() -> None:
    with pytest.raises(RecipeError, match="conv: w4a16 has no convolutions"):
        quantize_(model := block(), of_block(), observed(model), scheme="w4a16")
    with pytest.raises(ValueError, match="do not support Int4Linear"):
        FusedLayer([Int4Linear.of(nn.Linear(8, 8), None)], torch.bfloat16)
