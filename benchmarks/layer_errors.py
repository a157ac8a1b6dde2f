"""Measures what 8 bits cost in each type of layer of a UNet of SDXL's widths, by how heavy the tails of its inputs are.

    python -m benchmarks.layer_errors

SDXL's weights cannot come with the project. The layers here are of its widths and inputs, one of each block where SDXL
has up to ten, with Gaussian weights, and read what is known of its activations: what their norms and gates make of
Gaussian values, a few channels whose magnitude is a multiple of the others' (some hundred times in SmoothQuant, Xiao
et al. 2023, section 3; between channels of U-Nets, DMQ, Lee et al. 2025), skips whose range is not the stream's
(Q-Diffusion, Li et al. 2023, section 4.2), and text whose first token reaches 828 where others reach 10 to 15 (MixDQ,
Zhao et al. 2024). The multiple is varied, as nobody has published it layer by layer.
"""

from __future__ import annotations

import copy
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import record
from contract.precision import Scheme
from core.quant.convert import Recipe, quantize_
from core.quant.samples import Samples
from core.quant.search import chosen, sampled, search
from core.quant.statistics import Statistics
from pipeline.tiny import SDXLShape
from unet_opt import recipe as recipes

ROOMS = ("benchmarks/layer_errors.py", "core/quant", "unet_opt/recipe.py")
MULTIPLES = (1, 10, 100)
WIDTHS = (320, 640, 1280)
_OUTLIERS = 1 / 128  # of the channels
_ROWS, _BATCHES, _SIDE = 154, 4, 12  # rows of a layer and batches of calibration; side of a convolution's map
_SAMPLES = 128  # rows that the search reads
_FIRST_TOKEN, _TOKEN = 828.0, 12.0
_SKIP = 8.0  # magnitude of the skip's half over the stream's

TYPES: dict[str, tuple[str, str]] = {
    "proj_in": (r".*\.proj_in", "normal"),
    "attn1.to_q, to_k, to_v": (r".*\.attn1\.to_[qkv]", "normal"),
    "attn1.to_out": (r".*\.attn1\.to_out\.0", "mixed"),
    "attn2.to_q": (r".*\.attn2\.to_q", "normal"),
    "attn2.to_k, to_v": (r".*\.attn2\.to_[kv]", "text"),
    "attn2.to_out": (r".*\.attn2\.to_out\.0", "mixed"),
    "ff.net.0.proj": (r".*\.ff\.net\.0\.proj", "normal"),
    "ff.net.2": (r".*\.ff\.net\.2", "gated"),
    "proj_out": (r".*\.proj_out", "stream"),
    "conv1": (r"(down_blocks|mid_block).*\.conv1", "silu"),
    "conv1 of a concatenation": (r"up_blocks.*\.conv1", "silu"),
    "conv2": (r".*\.conv2", "silu"),
    "samplers' conv": (r".*samplers\.0\.conv", "stream"),
    "conv_shortcut": (r"down_blocks.*\.conv_shortcut", "stream"),
    "conv_shortcut of a concatenation": (r"up_blocks.*\.conv_shortcut", "halves"),
}
"""By type its layers' names, and what they read."""


def kind_of(layer: str) -> tuple[str, str] | None:
    """The layer's type and what it reads; None: it is not measured."""
    return next(((kind, reads) for kind, (name, reads) in TYPES.items() if re.fullmatch(name, layer)), None)


class Inputs:
    """Draws inputs [rows, K] of layers: gains of the channels once a layer, values at each call."""

    def __init__(self, multiple: float, seed: int) -> None:
        self._multiple = multiple
        self._generator = torch.Generator().manual_seed(seed)
        self._gains: dict[str, Tensor] = {}

    def __call__(self, layer: str, reads: str, width: int) -> Tensor:
        gains = self._gains.setdefault(layer, self._drawn_gains(width))
        if reads == "text":
            x = self._normal(_ROWS // 77 * 77, width) * gains
            x *= _TOKEN / x.abs().max()
            x[::77] *= _FIRST_TOKEN / _TOKEN
            return x
        if reads == "gated":  # GEGLU
            return self._normal(_ROWS, width) * gains * F.gelu(self._normal(_ROWS, width))
        if reads == "mixed":  # attention over 16 keys that count
            return self._normal(16, _ROWS, width).mean(0) * gains
        rows = _SIDE * _SIDE if reads in ("silu", "stream", "halves") else _ROWS
        x = self._normal(rows, width) * gains
        if reads == "halves":
            x[:, width // 2 :] *= _SKIP
        return F.silu(x) if reads == "silu" else x

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _drawn_gains(self, width: int) -> Tensor:
        gains = torch.ones(width)
        count = max(1, round(width * _OUTLIERS))
        gains[torch.randperm(width, generator=self._generator)[:count]] = self._multiple
        return gains


def unet() -> Any:
    """A UNet of SDXL's widths with one residual block and one transformer in each place."""
    from diffusers import UNet2DConditionModel

    shape = SDXLShape(
        native=1024, channels=WIDTHS, transformers=(1, 1, 1), heads=(5, 10, 20), groups=32, text_width=1024,
        pooled_width=1280, time_width=256,
    )  # fmt: skip
    torch.manual_seed(0)
    made = UNet2DConditionModel(**shape.unet())
    for module in made.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
    return made.requires_grad_(False)


def of_all_layers(recipe: Recipe) -> Recipe:
    """The recipe with no layer kept that this page measures: what it would cost to quantize them."""
    rules = tuple(
        replace(rule, reason="", alpha=recipes.ALPHA) if re.search(r"shortcut|to_\[kv\]", rule.pattern) else rule
        for rule in recipe.rules
    )
    return replace(recipe, rules=rules)


def measured(model: nn.Module) -> Iterator[tuple[str, str, str, int]]:
    """Name, type, what it reads and input channels of each layer that is measured."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and (found := kind_of(name)):
            yield name, *found, module.weight.shape[1]


def statistics(model: nn.Module, recipe: Recipe, inputs: Inputs) -> Statistics:
    """What calibration would see, with rows for the search."""
    found = Statistics("", samples=Samples(sampled(recipe, model), _SAMPLES))
    families = {name: family for family in recipe.families(model) for name in family[:1]}
    known = {name: (reads, width) for name, _, reads, width in measured(model)}
    for step in range(_BATCHES):
        with found.batch(step) as see:
            for name, family in families.items():
                reads, width = known[name]
                see(family, inputs(recipe.shares(name), reads, width))
    return found


@torch.inference_mode()
def errors(
    model: Any, recipe: Recipe, inputs: Inputs, found: Statistics, scheme: Scheme = "int8"
) -> dict[str, list[float]]:
    """By type the errors of its layers: the root mean square over rows of |error| / |output|."""
    quantized = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    quantize_(quantized, recipe, found, scheme=scheme)
    made = defaultdict(list)
    for name, kind, reads, width in measured(model):
        x = inputs(recipe.shares(name), reads, width)
        exact, ours = model.get_submodule(name), quantized.get_submodule(name)
        if isinstance(exact, nn.Conv2d):
            x = x.T.reshape(1, width, _SIDE, _SIDE)
        bias = 0.0 if exact.bias is None else exact.bias.view(-1, *[1] * (exact.weight.dim() - 2))
        wanted = exact(x) - bias
        off = ours(x) - bias - wanted
        channels = 1 if exact.weight.dim() == 4 else -1
        share = off.square().sum(channels) / wanted.square().sum(channels)
        made[kind].append(float(share.mean().sqrt()))
    return made


def measure() -> dict[str, Any]:
    """By type: whether the recipe quantizes it, and the mean error of its layers in each way at each multiple.

    Other ways than the recipe are measured at the largest alone.
    """
    model = unet()
    shipped = recipes.unet(model)
    recipe, plain = (of_all_layers(one) for one in (shipped, recipes.unet(model, alpha=None)))
    plain = replace(plain, rules=tuple(replace(rule, alpha=None) for rule in plain.rules))
    kept = {kind for name, kind, _, _ in measured(model) if shipped.rule(name).reason}
    found: dict[str, dict[str, Any]] = {kind: {"kept": kind in kept} for kind in TYPES}
    for multiple in MULTIPLES:
        inputs = Inputs(multiple, seed=1)
        seen = statistics(model, recipe, inputs)
        ways: dict[str, tuple[Recipe, Scheme]] = {"recipe": (recipe, "int8")}
        if multiple == max(MULTIPLES):
            searched = chosen(recipe, search(model, recipe, seen))
            ways |= {"plain": (plain, "int8"), "searched": (searched, "int8"), "fp8": (recipe, "fp8")}
        for way, (rules, scheme) in ways.items():
            for kind, layers in errors(model, rules, inputs, seen, scheme).items():
                found[kind][f"{way}@{multiple}"] = sum(layers) / len(layers)
    return found


def main() -> int:
    record.publish("layer-errors", {"types": measure(), "multiples": list(MULTIPLES)}, rooms=ROOMS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
