"""GPTQ: equal to a plain reference, never worse on rows that it did not see, and stored as it was rounded."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from core.quant import gptq
from core.quant.convert import RecipeError, quantize_
from core.quant.gptq import compensate_, round_weight
from core.quant.linear import Int8Conv2d, Int8Linear, quantize, quantize_weight
from core.quant.samples import Samples
from core.quant.search import sampled
from core.quant.statistics import Statistics, StatisticsError
from tests.core.quant.blocks import LAYERS, block, inputs, recipe
from tests.core.quant.stage import Many, Seed, normal


def plainly(weight: Tensor, scale: Tensor, hessian: Tensor) -> Tensor:
    """Frantar et al., 2023, equation 3, column by column: the inverse is computed anew of the columns that are left."""
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(len(hessian))
    left, levels = weight.double().clone(), torch.zeros_like(weight, dtype=torch.int8)
    columns = hessian.diagonal().argsort(descending=True, stable=True).tolist()
    while columns:
        inverse = torch.linalg.inv(damped[columns][:, columns])
        column = columns[0]
        levels[:, column] = (left[:, column] / scale).round().clamp(-127, 127).to(torch.int8)
        error = (left[:, column] - levels[:, column] * scale.double()) / inverse[0, 0]
        left[:, columns] -= error[:, None] * inverse[0][None]
        columns = columns[1:]
    return levels


@settings(max_examples=15, deadline=None)
@given(...)
def test_it_rounds_as_the_paper_says_in_blocks_of_any_size(
    columns: Many, rows: Many, seed: Seed, block_size: Many
) -> None:
    weight, mix = normal(seed, 6, columns), normal(seed + 1, columns, columns)
    x = (normal(seed + 2, rows, columns) @ mix * 20).round()
    hessian, (_, scale) = x.double().T @ x.double(), quantize_weight(weight)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gptq, "_BLOCK", block_size)
        assert torch.equal(round_weight(weight, scale[:, None], hessian), plainly(weight, scale, hessian))


def test_inputs_that_are_always_zero_are_rounded_to_nearest() -> None:
    weight = normal(0, 4, 8)
    nearest, scale = quantize_weight(weight)
    assert torch.equal(round_weight(weight, scale[:, None], torch.zeros(8, 8)), nearest)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_related_channels_make_up_for_one_another(kind: str) -> None:
    layer: nn.Linear | nn.Conv2d = nn.Linear(24, 16) if kind == "linear" else nn.Conv2d(24, 16, 3, padding=1)
    layer.requires_grad_(False)
    mix = normal(0, 4, 24)

    def rows(seed: int, count: int) -> Tensor:
        return normal(seed, count, 4) @ mix + 0.05 * normal(seed + 1, count, 24)

    inverse = 127 / rows(1, 400).abs().amax(0)
    made = Int8Linear.of(layer, inverse) if isinstance(layer, nn.Linear) else Int8Conv2d.of(layer, inverse)
    after = copy.deepcopy(made)
    assert compensate_(after, layer, rows(1, 400))
    assert after.weight.dtype is torch.int8 and (after.weight - made.weight).abs().max() <= 3
    x = quantize(rows(9, 400), inverse).float() / inverse  # of the weights' errors alone
    x = x if kind == "linear" else x.view(1, 20, 20, 24).permute(0, 3, 1, 2)
    errors = [float((one(x) - layer(x)).norm()) for one in (made, after)]
    assert errors[1] < (0.5 if kind == "linear" else 0.8) * errors[0]


def test_a_fifth_of_the_rows_tells_whether_anything_was_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    """And has no share in what is rounded: the levels are kept where they are better on these alone."""
    layer, rows = nn.Linear(8, 4).requires_grad_(False), normal(0, 50, 8)
    made = Int8Linear.of(layer, torch.full((8,), 40.0))
    x, nearest = made.read(rows).double(), made.weight.clone()
    for gained in (False, True):
        levels = nearest if gained else (nearest // 2)

        def rounded(
            _: Tensor, __: Tensor, hessian: Tensor, *___: object, levels: Tensor = levels, **____: object
        ) -> Tensor:
            torch.testing.assert_close(hessian, x[:40].T @ x[:40])
            return levels

        made.weight.copy_(nearest // 2 if gained else nearest)
        monkeypatch.setattr(gptq, "round_weight", rounded)
        assert compensate_(made, layer, rows) == gained
        assert torch.equal(made.weight, nearest)


def test_what_does_not_help_on_other_rows_changes_nothing() -> None:
    """Independent channels, and fewer rows than channels: there is nothing to learn."""
    layer = nn.Linear(64, 16).requires_grad_(False)
    made = Int8Linear.of(layer, torch.full((64,), 40.0))
    before = made.weight.clone()
    assert not compensate_(made, layer, normal(0, 20, 64)) and torch.equal(made.weight, before)
    assert not compensate_(made, layer, normal(0, 1, 64)) and torch.equal(made.weight, before)


def test_a_model_is_rounded_layer_by_layer_with_the_scales_that_it_had() -> None:
    model, made = block(), recipe()
    statistics = Statistics("digest", samples=Samples(sampled(made, model), 200))
    for batch in range(3):
        with statistics.observe(model, LAYERS, 0), torch.inference_mode():
            model(inputs(batch))
    nearest, after = copy.deepcopy(model), copy.deepcopy(model)
    assert quantize_(nearest, made, statistics).compensated == []
    report = quantize_(after, made, statistics, gptq=True)
    assert report.compensated and {*report.compensated} <= {*report.changed}
    for name in report.changed:
        one, other = nearest.get_submodule(name), after.get_submodule(name)
        assert torch.equal(one.scale, other.scale) and torch.equal(one.inverse, other.inverse)
        assert torch.equal(one.weight, other.weight) == (name not in report.compensated)


def test_it_needs_rows_and_int8() -> None:
    model, statistics = block(), Statistics("digest")
    with statistics.observe(model, LAYERS, 0), torch.inference_mode():
        model(inputs(0))
    with pytest.raises(StatisticsError, match=r"^conv: calibration kept no rows of its input, and GPTQ needs them"):
        quantize_(model, recipe(), statistics, gptq=True)
    with pytest.raises(RecipeError, match="gptq: rounds weights of int8, int8-sparse, w4a16, w4a8, not of fp8"):
        quantize_(model, recipe(), statistics, scheme="fp8", gptq=True)
    assert isinstance(model.conv, nn.Conv2d), "nothing was changed"
