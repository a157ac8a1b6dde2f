"""Measures what 8 bits in each layer of a denoiser cost: the error of its output, and of finished pictures.

One input's layers are quantized at a time; all others stay as they are. Used by `diptych quantize --sensitivity`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from contract.precision import Scheme
from core.quant.convert import Recipe, Rule
from core.quant.statistics import Statistics
from pipeline.backends.phases import Networks, on_torch
from pipeline.drawing import Denoiser, Forward
from pipeline.families.family import ImageModel
from pipeline.pixels.vae import levels, unscale
from pipeline.quantization.calibration import observed, seed, settings_of
from pipeline.quantization.quantized import calibrated, in_8_bits
from unet_opt.inputs import DenoiserInputs

SHARES = (0.0, 0.25, 0.5, 0.75)  # of the steps, whose inputs the error is measured on
PICTURES = 12  # layers whose finished pictures are compared: those with the largest errors
_PROMPTS = 8
_BATCH = 8
_LEFT = "measured alone"


@dataclass(frozen=True)
class Sensitivity:
    """The cost and savings of 8 bits in these layers, which read one input.

    arithmetic: their share of the denoiser's multiplications. errors: relative root mean squared errors of its output
    at `SHARES` of the steps. psnr_db: of finished pictures against those in floating point, the mean over pictures;
    None where they were not drawn.
    """

    layers: tuple[str, ...]
    arithmetic: float
    errors: tuple[float, ...]
    psnr_db: float | None = None

    @property
    def error(self) -> float:
        """Return the root of the mean of the squared errors."""
        return math.sqrt(sum(error**2 for error in self.errors) / len(self.errors))


class Call(NamedTuple):
    """A forward of the denoiser in this step, and its output [B, C, h, w]."""

    step: int
    inputs: DenoiserInputs
    output: Tensor


class Reference(NamedTuple):
    """The forwards at `SHARES` of the steps, and finished pictures."""

    calls: list[Call]
    pictures: Tensor  # uint8 [N, H, W, 3]


def measure(
    model: ImageModel,
    recipe: Recipe,
    statistics: Statistics,
    prompts: Sequence[str],
    *,
    scheme: Scheme = "int8",
    pictures: int = PICTURES,
    kernels: ctypes.CDLL | None = None,
) -> list[Sensitivity]:
    """Measure all inputs of layers that `recipe` quantizes, those with the largest errors first.

    `pictures` of them are drawn as well. Raises what `quantize_` raises.
    """
    part = model.family.denoiser
    drawing = _Drawing(model, prompts, kernels)
    reference = drawing.reference()
    multiplications = arithmetic(model, reference.calls[0])
    families = recipe.families(model.denoiser)
    picture_count = min(pictures, len(families))
    recipes = [_alone(recipe, family, families) for family in families]
    results: list[tuple[Sensitivity, Recipe]] = []

    def quantized(variant: Recipe) -> Networks:
        module, _ = in_8_bits(model, part, {part: statistics}, scheme=scheme, recipe=variant)
        return observed(model.with_parts(**{part: module}), kernels)[0]

    for family, variant in zip(families, recipes, strict=True):
        errors = drawing.errors(quantized(variant), reference.calls)
        share = sum(multiplications[name] for name in family) / sum(multiplications.values())
        results.append((Sensitivity(tuple(family), share, errors), variant))
    results.sort(key=lambda result: -result[0].error)
    for at in range(picture_count):
        result, variant = results[at]
        results[at] = replace(result, psnr_db=_psnr(drawing.pictures(quantized(variant)), reference.pictures)), variant
    return [result for result, _ in results]


def report(model: ImageModel, prompts: Sequence[str], out: Path, *, scheme: Scheme = "int8", **options: Any) -> str:
    """Return the table for a model that is first calibrated as `quantized.make` does; it is measured on 8 prompts.

    `options` are those of `quantized.calibrated`. Checkpoints stay in `out`: `make` with the same goes on from them.
    """
    calibration = calibrated(model, prompts, out, scheme=scheme, **options)
    part, kernels = model.family.denoiser, options.get("kernels")
    subset = prompts[:: max(1, len(prompts) // _PROMPTS)][:_PROMPTS]
    return table(
        measure(model, calibration.recipes[part], calibration.statistics[part], subset, scheme=scheme, kernels=kernels)
    )


def table(sensitivities: Sequence[Sensitivity]) -> str:
    """Format a row for each input, errors and shares in percent."""
    steps = "".join(f"{f'at {share:.0%}':>8}" for share in SHARES)
    lines = [f"{'error %':>8}{steps}{'work %':>8}{'PSNR dB':>9}  layers"]
    for row in sensitivities:
        errors = "".join(f"{100 * error:8.3f}" for error in row.errors)
        psnr = "" if row.psnr_db is None else f"{row.psnr_db:.1f}"
        lines.append(f"{100 * row.error:8.3f}{errors}{100 * row.arithmetic:8.2f}{psnr:>9}  {' '.join(row.layers)}")
    return "\n".join(lines)


def recorded(model: ImageModel, prompts: Sequence[str], kernels: ctypes.CDLL | None = None) -> Reference:
    """Return the prompts as the model draws them in floating point."""
    return _Drawing(model, prompts, kernels).reference()


def arithmetic(model: ImageModel, call: Call) -> dict[str, int]:
    """Count multiplications in each linear layer and convolution of the denoiser in a recorded call, by name."""
    counts: dict[str, int] = {}

    def watch(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, _: Any, out: Tensor) -> None:
            weight = module.weight
            assert isinstance(weight, Tensor)
            counts[name] = counts.get(name, 0) + out.numel() // len(weight) * weight.numel()

        return hook

    network = on_torch(model).denoiser
    layers = [(name, m) for name, m in model.denoiser.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    hooks = [layer.register_forward_hook(watch(name)) for name, layer in layers]
    try:
        with torch.inference_mode():
            network.deep(call.inputs)
    finally:
        for handle in hooks:
            handle.remove()
    return {name: counts.get(name, 0) for name, _ in layers}


class _Drawing:
    """Draws the prompts with the model's networks on any lowering."""

    def __init__(self, model: ImageModel, prompts: Sequence[str], kernels: ctypes.CDLL | None) -> None:
        self._model, self._prompts, self._kernels = model, prompts, kernels
        defaults, calibration = model.defaults, settings_of(model.family, model.defaults)
        self._steps = calibration.steps
        self._guidance = defaults.guidance_scale

    def reference(self) -> Reference:
        """Return calls at `SHARES` of the steps with their outputs, and finished pictures, all as the model is."""
        networks, _ = observed(self._model, self._kernels)
        recorded: list[Call] = []
        recorded_steps = {round(share * self._steps) for share in SHARES}

        def forward(inputs: DenoiserInputs) -> tuple[Tensor, ...]:
            outputs = networks.denoiser.deep(inputs)
            step = next(steps)
            if step in recorded_steps:
                recorded.append(Call(step, inputs, outputs[0].clone()))
            return outputs

        latents = []
        for start in range(0, len(self._prompts), _BATCH):
            steps = iter(range(self._steps))
            latents.append(self._latents(networks, self._prompts[start : start + _BATCH], forward))
        return Reference(recorded, _decoded(self._model, networks, torch.cat(latents)))

    @torch.inference_mode()
    def errors(self, networks: Networks, calls: Sequence[Call]) -> tuple[float, ...]:
        """Return the relative root mean squared error of the output at each recorded step."""
        squared_errors: dict[int, float] = {}
        squared_norms: dict[int, float] = {}
        for step, inputs, expected in calls:
            output = networks.denoiser.deep(inputs)[0]
            squared_errors[step] = squared_errors.get(step, 0.0) + float((output - expected).float().square().sum())
            squared_norms[step] = squared_norms.get(step, 0.0) + float(expected.float().square().sum())
        return tuple((squared_errors[step] / (squared_norms[step] or 1.0)) ** 0.5 for step in sorted(squared_errors))

    def pictures(self, networks: Networks) -> Tensor:
        """Return finished pictures, uint8 [N, H, W, 3]."""
        batches = [self._prompts[start : start + _BATCH] for start in range(0, len(self._prompts), _BATCH)]
        return _decoded(self._model, networks, torch.cat([self._latents(networks, batch) for batch in batches]))

    def _latents(self, networks: Networks, batch: Sequence[str], forward: Forward | None = None) -> Tensor:
        drawing = Denoiser(self._model, networks.denoiser, guidance=self._guidance, steps=self._steps)
        return drawing.latents(batch, [seed(prompt) for prompt in batch], forward=forward)


@torch.inference_mode()
def _decoded(model: ImageModel, networks: Networks, latents: Tensor) -> Tensor:
    images = [
        levels(networks.decoder(unscale(latent.to(model.vae.dtype), model.vae.config))) for latent in latents.split(1)
    ]
    return torch.cat(images).cpu()


def _psnr(actual: Tensor, expected: Tensor) -> float:
    """Return the mean over pictures of PSNR in dB; equal ones count as 100."""
    error = (actual.double() - expected.double()).square().flatten(1).mean(1)
    psnr: Tensor = 10 * torch.log10(255**2 / error.clamp_min(255**2 / 1e10))
    return float(psnr.mean())


def _alone(recipe: Recipe, family: Sequence[str], families: Sequence[Sequence[str]]) -> Recipe:
    """Return the recipe with all but this family left in floating point."""
    left: Mapping[str, Rule] = {
        name: replace(recipe.rule(name), reason=_LEFT) for other in families if other is not family for name in other
    }
    return replace(recipe, layer_rules={**recipe.layer_rules, **left})
