"""`quantize_`: replaces a model's layers with INT8 or FP8 ones in place, as a recipe says, and reports what it
changed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from core.quant.fp8 import Fp8Conv2d, Fp8Linear
from core.quant.linear import Int8Conv2d, Int8Linear
from core.quant.smoothing import inverse_scales, smoothing
from core.quant.statistics import Method, Statistics, StatisticsError

Scheme = Literal["int8", "fp8"]


class RecipeError(ValueError):
    """A recipe that does not fit the model. The message names the layer or the rule."""


@dataclass(frozen=True)
class Rule:
    """A rule for the layers whose full name matches `pattern`; the first matching rule applies.

    `reason` says why layers stay unquantized, and is given exactly for those. `alpha` None is plain INT8, without
    smoothing. `required` False is for layers that not every model has.
    """

    pattern: str
    reason: str = ""
    alpha: float | None = None
    method: Method = "max"
    required: bool = True


@dataclass(frozen=True)
class Recipe:
    """Rules in order, for linear layers and convolutions.

    `shares` names layers' inputs: layers with the same name read one input and get equal scales. `halves` says where
    the second part of a concatenated input begins, or None.
    """

    name: str
    rules: tuple[Rule, ...]
    shares: Callable[[str], str] = lambda name: name
    halves: Callable[[str], int | None] = lambda name: None

    def rule(self, layer: str) -> Rule:
        """The rule for a layer. Raises `RecipeError` if none matches."""
        for rule in self.rules:
            if re.fullmatch(rule.pattern, layer):
                return rule
        raise RecipeError(f"{self.name}: no rule for layer {layer}")

    def targets(self, model: nn.Module) -> list[str]:
        """The layers to be quantized. Raises `RecipeError` if a required rule matches no layer."""
        layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
        decided = {name: self.rule(name) for name in layers}
        for rule in self.rules:
            if rule.required and not any(found is rule for found in decided.values()):
                raise RecipeError(f"{self.name}: the model has no layer for the rule {rule.pattern!r}")
        return [name for name, rule in decided.items() if not rule.reason]


@dataclass
class QuantizationReport:
    """What `quantize_` changed, and what it left unquantized, with the reason."""

    changed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def quantize_(
    model: nn.Module, recipe: Recipe, statistics: Statistics, *, scheme: Scheme = "int8", digest: str | None = None
) -> QuantizationReport:
    """Replace layers of `model` as `recipe` says, with scales from `statistics`. Works in place; returns a report.

    `digest` of the model's weights, where given, must be the one that the statistics were collected on. Raises
    `RecipeError` and `StatisticsError`, and then has changed nothing.
    """
    if digest is not None and digest != statistics.model:
        raise StatisticsError("the statistics were collected on another model: their weights' digest differs")
    if not statistics.largest:
        raise StatisticsError("there are no statistics: calibration saw no data")
    targets = recipe.targets(model)
    families: dict[str, list[str]] = defaultdict(list)
    for name in targets:
        families[recipe.shares(name)].append(name)
    made: dict[str, nn.Module] = {}
    for family in families.values():
        made |= _family(model, family, recipe, statistics, scheme)
    report = QuantizationReport(targets)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and name not in made:
            report.skipped[name] = recipe.rule(name).reason
    swap_(model, made)
    return report


def swap_(model: nn.Module, made: Mapping[str, nn.Module]) -> None:
    """Replace the modules with these names, under every name that a module has."""
    places = {name: model.get_submodule(name) for name in made}
    new = {id(places[name]): module for name, module in made.items()}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in new:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new[id(module)].train(module.training))


def _family(
    model: nn.Module, family: list[str], recipe: Recipe, statistics: Statistics, scheme: Scheme
) -> dict[str, nn.Module]:
    """New modules for layers that read one input: they share its scales."""
    layers = {name: model.get_submodule(name) for name in family}
    first, rule = family[0], recipe.rule(family[0])
    if not first:
        raise RecipeError(f"{recipe.name}: the model is itself a layer, and cannot be replaced in place")
    weights: list[Tensor] = []
    seen: list[Tensor] = []
    for name, layer in layers.items():
        other = recipe.rule(name)
        if (other.alpha, other.method, recipe.halves(name)) != (rule.alpha, rule.method, recipe.halves(first)):
            raise RecipeError(f"{recipe.name}: {first} and {name} share an input but have different rules")
        largest, ranges = _largest(layer), statistics.ranges(name, rule.method)
        if len(largest) != len(ranges):
            raise StatisticsError(f"{name}: has {len(largest)} input channels, the statistics {len(ranges)}")
        if weights and len(largest) != len(weights[0]):
            raise RecipeError(f"{recipe.name}: {name} cannot read what {first} reads: {len(largest)} input channels")
        if not torch.isfinite(largest).all():
            raise StatisticsError(f"{name}: its weights are not finite")
        weights.append(largest)
        seen.append(ranges.to(largest.device))
    name = first
    try:
        activations = torch.stack(seen).amax(0)
        smooth = None if rule.alpha is None else smoothing(activations, torch.stack(weights).amax(0), rule.alpha)
        inverse = inverse_scales(activations, smooth, recipe.halves(first))
        made = {}
        for name, layer in layers.items():
            made[name] = replacement(layer, inverse, scheme)
    except ValueError as error:
        raise RecipeError(f"{name}: {error}") from error
    return made


def replacement(layer: nn.Module, inverse: Tensor, scheme: Scheme) -> nn.Module:
    """The quantized layer with inputs scaled by `inverse` [K]. Raises ValueError for unsupported layers."""
    if isinstance(layer, nn.Conv2d):
        return Int8Conv2d.of(layer, inverse) if scheme == "int8" else Fp8Conv2d.of(layer, inverse)
    assert isinstance(layer, nn.Linear)
    return Int8Linear.of(layer, inverse) if scheme == "int8" else Fp8Linear.of(layer, inverse)


def _largest(layer: nn.Module) -> Tensor:
    """Largest magnitude of the weights of each input channel, [K]."""
    assert isinstance(layer, (nn.Linear, nn.Conv2d))
    weight = layer.weight.detach().float().abs()
    return weight.amax(0) if weight.dim() == 2 else weight.amax((0, 2, 3))
