"""Scaled weights of 8 bits: each is its bits times its scale, whatever its keys are called; others are unchanged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoints.scaled_weights import unscaled

TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(
    shape=SHAPES, kind=st.sampled_from(TYPES), each=st.booleans(), newer=st.booleans(), mark=st.booleans(),
    layer=st.sampled_from(["a", "unet.time_embed.0", "model.scaled_fp8x"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_weight_is_its_bits_times_its_scale(
    shape: list[int], kind: torch.dtype, each: bool, newer: bool, mark: bool, layer: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = (20 * torch.randn(shape, generator=generator)).to(kind)
    scale = torch.rand(shape[0] if each else (), generator=generator) / 100
    other = torch.randn(3, generator=generator)
    state = {
        f"{layer}.weight": bits,
        f"{layer}.bias": other,
        f"{layer}.{'weight_scale' if newer else 'scale_weight'}": scale,
    }
    state |= {f"{layer}.{'input_scale' if newer else 'scale_input'}": torch.ones(())} if each else {}
    state |= {"model.scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)} if mark else {}
    result = unscaled(state)
    assert result.keys() == {f"{layer}.weight", f"{layer}.bias"} and torch.equal(result[f"{layer}.bias"], other)
    factors = scale.view(-1, *[1] * (len(shape) - 1)) if each else scale
    assert torch.equal(result[f"{layer}.weight"], (bits.float() * factors).half())


@given(shape=SHAPES, kind=st.sampled_from((*TYPES[:2], torch.float16, torch.bfloat16, torch.float32, torch.int64)))
def test_a_weight_without_a_scale_stays(shape: list[int], kind: torch.dtype) -> None:
    weight = torch.ones(shape).to(kind)
    (found,) = unscaled({"a.weight": weight}).values()
    assert torch.equal(found.double(), weight.double())
    assert found.dtype == (torch.float16 if kind in TYPES else kind)


@pytest.mark.parametrize(
    ("key", "scale", "told"),
    [
        ("a.scale_weight", torch.ones(3), r"a.scale_weight is \[3\], for a weight \[2, 4\]"),
        ("a.weight_scale", torch.ones(2, 2), r"is \[2, 2\], for a weight"),
        ("a.weight_scale", torch.ones((), dtype=torch.int8), "for a weight"),
        ("b.scale_weight", torch.ones(()), "b.weight, which is not there"),
        ("a.weight_scale_2", torch.ones(()), "scale of blocks"),
        ("a.comfy_quant", torch.frombuffer(bytearray(b'{"format": "mxfp8"}'), dtype=torch.uint8), "format mxfp8"),
    ],
)
def test_other_scales_are_refused_by_key(key: str, scale: torch.Tensor, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        unscaled({"a.weight": torch.ones(2, 4).to(TYPES[0]), key: scale})
