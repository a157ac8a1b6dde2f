"""`quantize_`: replaces a model's layers with those of a scheme in place, as a recipe says, and reports what it
changed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from contract.precision import GPTQ_SCHEMES, Scheme
from core.quant.gptq import compensate_
from core.quant.schemes import SCHEMES
from core.quant.smoothing import inverse_scales, smoothing
from core.quant.statistics import Method, Statistics, StatisticsError


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
    the second part of a concatenated input begins, or None. `layer_rules` has rules of single layers, which come first.
    """

    name: str
    rules: tuple[Rule, ...]
    shares: Callable[[str], str] = lambda name: name
    halves: Callable[[str], int | None] = lambda name: None
    layer_rules: Mapping[str, Rule] = field(default_factory=dict)

    def rule(self, layer: str) -> Rule:
        """The rule for a layer. Raises `RecipeError` if none matches."""
        return self.layer_rules.get(layer) or self._by_pattern(layer)

    def keeping(self, model: nn.Module, pattern: re.Pattern[str], reason: str) -> Recipe:
        """The recipe that leaves all layers unquantized whose whole name matches, and those that share their inputs."""
        left = [family for family in self.families(model) if any(pattern.fullmatch(name) for name in family)]
        rules = {name: replace(self.rule(name), reason=reason) for family in left for name in family}
        return replace(self, layer_rules={**self.layer_rules, **rules})

    def families(self, model: nn.Module) -> list[list[str]]:
        """The layers to be quantized, those that read one input together. Raises as `targets`."""
        families: dict[str, list[str]] = defaultdict(list)
        for name in self.targets(model):
            families[self.shares(name)].append(name)
        return [*families.values()]

    def _by_pattern(self, layer: str) -> Rule:
        for rule in self.rules:
            if re.fullmatch(rule.pattern, layer):
                return rule
        raise RecipeError(f"{self.name}: no rule for layer {layer}")

    def targets(self, model: nn.Module) -> list[str]:
        """The layers to be quantized. Raises `RecipeError` if a required rule matches no layer."""
        layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
        decided = {name: self._by_pattern(name) for name in layers}
        for rule in self.rules:
            if rule.required and not any(selected is rule for selected in decided.values()):
                raise RecipeError(f"{self.name}: the model has no layer for the rule {rule.pattern!r}")
        return [name for name, rule in decided.items() if not self.layer_rules.get(name, rule).reason]


@dataclass
class QuantizationReport:
    """The layers that `quantize_` changed and left, with reasons, and those whose weights GPTQ rounded."""

    changed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    compensated: list[str] = field(default_factory=list)


def quantize_(
    model: nn.Module,
    recipe: Recipe,
    statistics: Statistics | None,
    *,
    scheme: Scheme = "int8",
    digest: str | None = None,
    gptq: bool = False,
) -> QuantizationReport:
    """Replace layers of `model` as `recipe` says, with scales from `statistics`. Works in place; returns a report.

    `gptq` rounds integer weights by the statistics' samples (`core.quant.gptq`). What is pruned of sparse weights is
    chosen by samples too, where there are any, and else by magnitude. Schemes without calibration read no statistics.
    `digest` of the model's weights, where given, must be the one that the statistics were collected on.
    Raises `RecipeError` and `StatisticsError`, and then has changed nothing.
    """
    if SCHEMES[scheme].static:
        if statistics is not None and digest not in (None, statistics.model):
            raise StatisticsError("the statistics were collected on another model: their weights' digest differs")
        if statistics is None or not statistics.largest:
            raise StatisticsError("there are no statistics: calibration saw no data")
    families = recipe.families(model)
    replacements: dict[str, nn.Module] = {}
    for family in families:
        replacements |= _family(model, family, recipe, statistics, scheme)
    report = QuantizationReport(recipe.targets(model))
    if gptq:
        report.compensated = _compensate(model, families, replacements, statistics, scheme)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and name not in replacements:
            report.skipped[name] = recipe.rule(name).reason
    swap_(model, replacements)
    return report


def swap_(model: nn.Module, replacements: Mapping[str, nn.Module]) -> None:
    """Replace the modules with these names, under every name that a module has."""
    places = {name: model.get_submodule(name) for name in replacements}
    new = {id(places[name]): module for name, module in replacements.items()}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in new:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new[id(module)].train(module.training))


def _family(
    model: nn.Module, family: list[str], recipe: Recipe, statistics: Statistics | None, scheme: Scheme
) -> dict[str, nn.Module]:
    """New modules for layers that read one input: they share its scales, if these are static."""
    layers = {name: model.get_submodule(name) for name in family}
    if not family[0]:
        raise RecipeError(f"{recipe.name}: the model is itself a layer, and cannot be replaced in place")
    largest = {name: largest_weights(name, layer) for name, layer in layers.items()}
    inverse = rows = None
    if SCHEMES[scheme].static:
        assert statistics is not None
        inverse, rows = inverse_input_scales(largest, recipe, statistics), statistics.rows(family)
    name = family[0]
    try:
        replacements: dict[str, nn.Module] = {}
        for name, layer in layers.items():
            replacements[name] = SCHEMES[scheme].quantize(layer, inverse, rows)
    except ValueError as error:
        raise RecipeError(f"{name}: {error}") from error
    return replacements


def _compensate(
    model: nn.Module,
    families: list[list[str]],
    replacements: Mapping[str, nn.Module],
    statistics: Statistics | None,
    scheme: Scheme,
) -> list[str]:
    """Round the new layers' weights by GPTQ; returns the names of the layers that it improved."""
    if scheme not in GPTQ_SCHEMES:
        raise RecipeError(f"gptq: rounds weights of {', '.join(GPTQ_SCHEMES)}, not of {scheme}")
    compensated = []
    for family in families:
        rows = None if statistics is None else statistics.rows(family)
        if rows is None:
            raise StatisticsError(f"{family[0]}: calibration kept no rows of its input, and GPTQ needs them")
        compensated += [name for name in family if compensate_(replacements[name], model.get_submodule(name), rows)]
    return compensated


def inverse_input_scales(
    largest: Mapping[str, Tensor], recipe: Recipe, statistics: Statistics, rule: Rule | None = None
) -> Tensor:
    """The factor for the one input [K] of layers whose input channels' weights have these largest magnitudes [K].

    `rule` overrides that of the recipe. Raises `StatisticsError`, and `RecipeError` for layers that cannot share it.
    """
    first, *_ = largest
    rule = rule or recipe.rule(first)
    halves = recipe.halves(first)
    seen: list[Tensor] = []
    for name, weights in largest.items():
        if (_scaling(recipe.rule(name)), recipe.halves(name)) != (_scaling(recipe.rule(first)), halves):
            raise RecipeError(f"{recipe.name}: {first} and {name} share an input but have different rules")
        ranges = statistics.ranges(name, rule.method)
        if len(weights) != len(ranges):
            raise StatisticsError(f"{name}: has {len(weights)} input channels, the statistics {len(ranges)}")
        if len(weights) != len(largest[first]):
            raise RecipeError(f"{recipe.name}: {name} cannot read what {first} reads: {len(weights)} input channels")
        seen.append(ranges.to(weights.device))
    try:
        activations = torch.stack(seen).amax(0)
        weights = torch.stack([*largest.values()]).amax(0)
        smooth = None if rule.alpha is None else smoothing(activations, weights, rule.alpha)
        return inverse_scales(activations, smooth, halves)
    except ValueError as error:
        raise RecipeError(f"{first}: {error}") from error


def _scaling(rule: Rule) -> tuple[float | None, Method]:
    return rule.alpha, rule.method


def largest_weights(name: str, layer: nn.Module) -> Tensor:
    """Largest magnitude of the weights of each input channel, [K]. Raises `StatisticsError` for NaN and infinity."""
    assert isinstance(layer, (nn.Linear, nn.Conv2d))
    weight = layer.weight.detach().float().abs()
    largest = weight.amax(0) if weight.dim() == 2 else weight.amax((0, 2, 3))
    if not torch.isfinite(largest).all():
        raise StatisticsError(f"{name}: its weights are not finite")
    return largest
