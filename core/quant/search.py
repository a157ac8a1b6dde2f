"""Searches for each input of a model's layers the smoothing of the least error.

The error is that of the layers' outputs on rows that they read in calibration (`Samples`), relative to the outputs in
floating point. AWQ (Lin et al., 2023) and MQBench choose scales by the same measure. A convolution is measured as one
linear layer for each of its taps: rounding errors of neighbouring pixels are as good as independent.

By this measure clipping is often best, too, but it is not tried: errors of clamped values persist from step to step
more than rounding errors do (cosine of the UNet's errors in successive steps 0.2 to 0.3, without clipping about 0.1),
and ranges that are too narrow for pictures not seen in calibration cost several dB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from contract.precision import Scheme
from core.quant.convert import Recipe, RecipeError, inverse_input_scales, largest_weights
from core.quant.schemes import SCHEMES
from core.quant.statistics import Statistics, StatisticsError

ALPHAS: tuple[float | None, ...] = (None, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Choice:
    """The best rule for layers that read one input, its error, and the error of the recipe's rule (`usual`)."""

    alpha: float | None
    error: float
    usual: float

    @classmethod
    def read(cls, entry: Any) -> Choice:
        """The choice of a manifest. Raises ValueError for anything else."""
        try:
            alpha = None if entry["alpha"] is None else float(entry["alpha"])
            return cls(alpha, float(entry["error"]), float(entry["usual"]))
        except (TypeError, KeyError) as error:
            raise ValueError(f"is no choice of scales ({error})") from error


def search(
    model: nn.Module, recipe: Recipe, statistics: Statistics, *, scheme: Scheme = "int8"
) -> dict[str, Choice]:  # fmt: skip
    """Search the rule of least error for each layer that `recipe` quantizes; never worse than the recipe's own rule.

    Layers with one input get the same. Raises `StatisticsError` without samples of a layer, and as `quantize_` does.
    """
    choices: dict[str, Choice] = {}
    for family in recipe.families(model):
        choices |= dict.fromkeys(family, _best(model, family, recipe, statistics, scheme))
    return choices


def chosen(recipe: Recipe, choices: Mapping[str, Choice]) -> Recipe:
    """The recipe with these layers' choices. Raises `RecipeError` for a layer that it does not quantize."""
    rules = dict(recipe.layer_rules)
    for name, choice in choices.items():
        rule = recipe.rule(name)
        if rule.reason:
            raise RecipeError(f"{recipe.name}: layer {name} is not quantized, and has no use for scales")
        rules[name] = replace(rule, alpha=choice.alpha)
    return replace(recipe, name=f"{recipe.name}-searched", layer_rules=rules)


def sampled(recipe: Recipe, model: nn.Module) -> list[str]:
    """One layer for each input: those whose rows are to be kept in calibration."""
    return [family[0] for family in recipe.families(model)]


def _best(
    model: nn.Module, family: Sequence[str], recipe: Recipe, statistics: Statistics, scheme: Scheme
) -> Choice:  # fmt: skip
    rows = statistics.rows(family)
    if rows is None:
        raise StatisticsError(f"{family[0]}: calibration kept no rows of its input, and the search needs them")
    layers = {name: model.get_submodule(name) for name in family}
    largest = {name: largest_weights(name, layer) for name, layer in layers.items()}
    measure = LayerErrors([*layers.values()], rows, scheme)
    usual = recipe.rule(family[0])
    start = measure(inverse_input_scales(largest, recipe, statistics))
    best = Choice(usual.alpha, start, start)
    for alpha in ALPHAS:
        error = measure(inverse_input_scales(largest, recipe, statistics, replace(usual, alpha=alpha)))
        if error < best.error:
            best = Choice(alpha, error, start)
    return best


class LayerErrors:
    """The root of the mean over layers of the squared error of their outputs, relative to the outputs' power."""

    def __init__(self, layers: Sequence[nn.Module], rows: Tensor, scheme: Scheme = "int8") -> None:
        """`rows` [n, K] is what all of the layers read."""
        self._kind = SCHEMES[scheme].linear
        self._weights = [_taps(layer) for layer in layers]
        self._rows = rows.to(self._weights[0].device).float()
        self._expected = [self._rows @ weight.flatten(0, 1).T for weight in self._weights]

    @torch.inference_mode()
    def __call__(self, inverse: Tensor) -> float:
        """The error with inputs scaled by `inverse` [K]."""
        total = 0.0
        for weight, expected in zip(self._weights, self._expected, strict=True):
            actual = self._kind.of_taps(weight, inverse)(self._rows)
            total += float((actual - expected).square().sum()) / (float(expected.square().sum()) or 1.0)
        return math.sqrt(total / len(self._weights))


def _taps(layer: nn.Module) -> Tensor:
    """The weight as [N, taps, K], fp32."""
    assert isinstance(layer, (nn.Linear, nn.Conv2d))
    weight = layer.weight.detach().float()
    return weight[:, None] if weight.dim() == 2 else weight.permute(0, 2, 3, 1).flatten(1, 2)
