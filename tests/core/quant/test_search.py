"""The search for scales: never worse than the recipe on what it saw, and found again from what is stored."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from typing import Annotated, Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from core.quant.convert import Recipe, RecipeError, quantize_
from core.quant.linear import Int8Conv2d, Int8Linear
from core.quant.samples import Samples
from core.quant.search import ALPHAS, Choice, LayerErrors, chosen, sampled, search
from core.quant.statistics import Statistics, StatisticsError
from tests.core.quant.blocks import LAYERS, Block, block, inputs, recipe
from tests.core.quant.stage import Seed, error, normal


def watched(model: Block, made: Recipe, *, rows: int = 200) -> Statistics:
    found = Statistics("digest", samples=Samples(sampled(made, model), rows))
    for batch in range(3):
        for step in range(2):
            with found.observe(model, LAYERS, step), torch.inference_mode():
                model(inputs(10 * batch + step))
    return found


def without_bias(layer: nn.Module) -> nn.Module:
    """A copy of it; the search leaves biases out of outputs, which they only make larger."""
    made = copy.deepcopy(layer)
    made.bias = None  # type: ignore[assignment]
    return made


def test_rows_are_kept_once_for_layers_that_read_one_input() -> None:
    assert sampled(recipe(), block()) == ["conv", "to_q", "out"]


@settings(max_examples=8, deadline=None)
@given(...)
def test_the_error_on_the_rows_is_never_above_the_recipes(
    seed: Seed, outliers: Annotated[float, st.sampled_from([1.0, 10.0, 60.0])],
    alpha: Annotated[float | None, st.sampled_from([None, 0.5, 1.0])],
    scheme: Literal["int8", "fp8"],
) -> None:  # fmt: skip
    model, made = block(seed, outliers=outliers), recipe(alpha=alpha)
    found = search(model, made, watched(model, made), scheme=scheme)
    assert {*found} == {*LAYERS} and found["to_q"] == found["to_k"] == found["to_v"]
    for choice in found.values():
        assert 0 < choice.error <= choice.usual
        assert choice.alpha in {*ALPHAS, alpha}
    assert any(choice.error < choice.usual for choice in found.values())


def test_the_errors_are_those_of_the_layers_that_are_made_of_the_choices() -> None:
    """Against the modules themselves, on the rows that were kept."""
    model, made = block(outliers=20.0), recipe(alpha=0.5)
    statistics = watched(model, made)
    found = search(model, made, statistics)
    assert statistics.samples is not None
    for which, one in (("error", chosen(made, found)), ("usual", made)):
        after = copy.deepcopy(model)
        quantize_(after, one, statistics)
        x = statistics.samples.rows["out"]
        wanted = error(without_bias(after.out)(x), without_bias(model.out)(x))
        assert getattr(found["out"], which) == pytest.approx(wanted, rel=1e-3)
        assert isinstance(after.out, Int8Linear)
        x, names = statistics.samples.rows["to_q"], ("to_q", "to_k", "to_v")
        pairs = [[without_bias(each.get_submodule(n))(x) for each in (after, model)] for n in names]
        squares = [error(*pair) ** 2 for pair in pairs]
        assert getattr(found["to_q"], which) == pytest.approx((sum(squares) / 3) ** 0.5, rel=1e-3)


def test_a_convolution_is_measured_by_its_taps() -> None:
    """Of random inputs the error by taps is that of the convolution: neighbours' rounding errors add up as powers."""
    layer = nn.Conv2d(16, 24, 3, padding=1, bias=False).requires_grad_(False)
    x = normal(1, 4, 16, 24, 24)
    inverse = 127 / x.abs().amax((0, 2, 3))
    by_taps = LayerErrors([layer], x.permute(0, 2, 3, 1).flatten(0, 2))(inverse)
    assert by_taps == pytest.approx(error(Int8Conv2d.of(layer, inverse)(x), layer(x)), rel=0.1)


def test_scales_are_found_again_from_what_is_stored() -> None:
    model, made = block(outliers=20.0), recipe()
    statistics = watched(model, made)
    found = search(model, made, statistics)
    stored = json.loads(json.dumps({name: asdict(choice) for name, choice in found.items()}))
    again = {name: Choice.read(said) for name, said in stored.items()}
    assert again == found
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(one, chosen(made, found), statistics)
    report = quantize_(other, chosen(made, again), statistics)
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    assert chosen(made, again).name == "block-searched" and report.skipped == {"head": "its errors are the answer's"}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, "is no choice of scales"),
        (None, "is no choice of scales"),
        ({"alpha": "much", "error": 0, "usual": 0}, "could not convert"),
    ],
)
def test_other_things_are_no_choices(said: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Choice.read(said)


def test_layers_without_rows_and_layers_in_floats_are_refused_by_name() -> None:
    model, made = block(), recipe()
    statistics = watched(model, made)
    choices = search(model, made, statistics)
    with pytest.raises(RecipeError, match="block: layer head is not quantized, and has no use for scales"):
        chosen(made, {"head": choices["conv"]})
    statistics.samples = None
    with pytest.raises(StatisticsError, match=r"^conv: calibration kept no rows of its input"):
        search(model, made, statistics)
