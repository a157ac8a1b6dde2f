"""Scaled weights of 8 bits: each is its bits times its scale, whatever its keys are called; others are unchanged."""

from __future__ import annotations

import json
from typing import Any

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
    state = {f"{layer}.weight": bits, f"{layer}.bias": other}
    state |= {f"{layer}.{'weight_scale' if newer else 'scale_weight'}": scale}
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


def config(name: str, **settings: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps({"format": name, **settings}).encode()), dtype=torch.uint8)


NAMES = dict(zip(("float8_e4m3fn", "float8_e5m2", "int8_tensorwise"), TYPES, strict=True))


@given(
    name=st.sampled_from([*NAMES]),
    settings=st.dictionaries(
        st.sampled_from(["full_precision_matrix_mult", "per_row", "orig_dtype", "orig_shape"]),
        st.sampled_from([True, False, "torch.bfloat16", [2, 4]]),
    ),
)
def test_a_format_that_changes_no_value_is_read(name: str, settings: dict[str, Any]) -> None:
    bits = torch.tensor([[1.0, 2.0], [-3.0, 0.0]]).to(NAMES[name])
    scale = torch.tensor([[0.5], [2.0]])
    state = {"a.weight": bits, "a.weight_scale": scale, "a.comfy_quant": config(name, **settings, convrot=False)}
    assert torch.equal(unscaled(state)["a.weight"], (bits.float() * scale).half())


@given(name=st.sampled_from([*NAMES]), dtype=st.sampled_from((*TYPES, torch.uint8, torch.float16, torch.int32)))
def test_a_weight_is_in_the_type_of_its_format(name: str, dtype: torch.dtype) -> None:
    state = {"a.weight": torch.ones(2, 2).to(dtype), "a.comfy_quant": config(name)}
    state |= {"a.weight_scale": torch.ones(())} if dtype in TYPES else {}
    if dtype == NAMES[name]:
        assert unscaled(state).keys() == {"a.weight"}
    else:
        with pytest.raises(ValueError, match=f"a.comfy_quant is of the format {name}, and its weight is in {dtype}"):
            unscaled(state)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"convrot": True, "convrot_groupsize": 256}, "says convrot: the weight is rotated"),
        ({"group_size": 64}, "says group_size, which is not known"),
    ],
)
def test_a_format_that_changes_values_is_refused(name: str, settings: dict[str, Any], told: str) -> None:
    state = {"a.weight": torch.ones(2, 2).to(NAMES[name]), "a.weight_scale": torch.ones(())}
    with pytest.raises(ValueError, match=f"a.comfy_quant {told}"):
        unscaled(state | {"a.comfy_quant": config(name, **settings)})


def test_scales_of_a_square_weight_are_of_its_outputs() -> None:
    """A scale for each input would have the same number of elements."""
    for shape in ([1, 4], [2, 2], [1, 1, 4]):
        with pytest.raises(ValueError, match="for a weight"):
            unscaled({"a.weight": torch.ones(4, 4).to(TYPES[0]), "a.weight_scale": torch.ones(shape)})
    with pytest.raises(ValueError, match=r"a.weight_scale is the scale of a weight in torch.uint8"):
        unscaled({"a.weight": torch.ones(2, 2).to(torch.uint8), "a.weight_scale": torch.ones(())})


@pytest.mark.parametrize(
    ("key", "scale", "told"),
    [
        ("a.scale_weight", torch.ones(3), r"a.scale_weight is \[3\], for a weight \[2, 4\]"),
        ("a.weight_scale", torch.ones(2, 2), r"is \[2, 2\], for a weight"),
        ("a.weight_scale", torch.ones((), dtype=torch.int8), "for a weight"),
        ("b.scale_weight", torch.ones(()), "b.weight, which is not there"),
        ("a.weight_scale_2", torch.ones(()), "scale of blocks"),
        ("a.weight_scale_inv", torch.ones(2, 2), "scale of blocks"),
        ("a.comfy_quant", config("mxfp8"), "format mxfp8"),
        ("b.comfy_quant", config("float8_e4m3fn"), "b.comfy_quant is of the format .* is not there"),
        ("a.comfy_quant", torch.zeros(3, dtype=torch.uint8), "names no format"),
    ],
)
def test_other_scales_are_refused_by_key(key: str, scale: torch.Tensor, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        unscaled({"a.weight": torch.ones(2, 4).to(TYPES[0]), key: scale})
