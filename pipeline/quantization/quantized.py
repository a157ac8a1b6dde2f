"""Creates a model's quantized parts: calibrates on prompts if the scheme wants it, quantizes, and writes them.

`pipeline.quantization.quantized_parts` finds and loads them.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from contract.precision import GPTQ_SCHEMES, Scheme, is_calibrated
from core.quant import search, store
from core.quant.convert import QuantizationReport, Recipe, RecipeError, quantize_
from core.quant.schemes import SCHEMES
from core.quant.search import Choice
from core.quant.statistics import Statistics
from pipeline.quantization.calibration import collect, settings_of
from pipeline.quantization.quantized_parts import folder
from unet_opt.calibrate import CalibrationSettings

if TYPE_CHECKING:
    from pipeline.families.family import ImageModel

_KEPT = "kept in floating point: among the layers whose 8 bits cost most, for what they save"
Ranges = Mapping[str, Statistics]  # by part


def recipes_of(model: ImageModel, alpha: float | None = None, *, plain: bool = False) -> dict[str, Recipe]:
    """Return each part's recipe, with the family's own `alpha` if none is given; `plain` is without SmoothQuant."""
    family = model.family
    return family.recipes(model.parts, None if plain else family.alpha if alpha is None else alpha)


def ranges(model: ImageModel, prompts: Sequence[str], **options: Any) -> Ranges:
    """Collect input ranges of the layers to be quantized; options as for `calibration.collect`."""
    return collect(model, _targets(model, recipes_of(model)), prompts, **options)


def in_8_bits(
    model: ImageModel,
    part: str,
    statistics: Ranges,
    *,
    scheme: Scheme = "int8",
    recipe: Recipe | None = None,
    gptq: bool = False,
) -> tuple[Any, QuantizationReport]:
    """Return the part in 8 bits, and a report. The model's own part is unchanged.

    Tensors of unquantized layers are shared with it: quantized ones take half or a quarter of its memory.
    `statistics` is for schemes with calibration, as is the alpha of the default recipe.
    """
    original = model.parts[part]
    module = copy.deepcopy(original, {id(tensor): tensor for tensor in (*original.parameters(), *original.buffers())})
    recipe = recipe or recipes_of(model, plain=not is_calibrated(scheme))[part]
    report = quantize_(module, recipe, statistics.get(part), scheme=scheme, digest=model.digest, gptq=gptq)
    return module, report


@dataclass(frozen=True)
class Layerwise:
    """The options that are decided layer by layer.

    search: scales are chosen by the layers' errors on what all steps read (`core.quant.search`). keep: a regular
    expression; layers whose whole name matches stay in floating point. gptq: weights are rounded by what all steps
    read (`core.quant.gptq`).
    """

    search: bool = False
    keep: str | None = None
    gptq: bool = False

    @property
    def samples(self) -> bool:
        """Return whether it needs rows of each input."""
        return self.gptq or self.search


@dataclass(frozen=True)
class Calibrated:
    """The recipe and statistics of each part, and what a search chose for its layers."""

    recipes: dict[str, Recipe]
    statistics: Ranges
    choices: Mapping[str, Mapping[str, Choice]]
    settings: CalibrationSettings
    checkpoints: Mapping[str, Path]


def calibrated(
    model: ImageModel,
    prompts: Sequence[str],
    out: Path,
    *,
    scheme: Scheme = "int8",
    alpha: float | None = None,
    plain: bool = False,
    layerwise: Layerwise | None = None,
    settings: CalibrationSettings | None = None,
    kernels: ctypes.CDLL | None = None,
    tell: Callable[[int], None] = lambda count: None,
) -> Calibrated:
    """Calibrate on prompts, with checkpoints under `out`, from which an interrupted run resumes.

    The arguments, and what is raised, are as for `make`.
    """
    options = layerwise or Layerwise()
    settings = settings or settings_of(model.family, model.defaults)
    samples = options.samples or SCHEMES[scheme].linear.SPARSE
    if samples:
        settings = replace(settings, watched_steps=settings.steps)
    out.mkdir(parents=True, exist_ok=True)
    checkpoints = {part: out / f".{part}-{scheme}.statistics" for part in model.family.quantized}
    recipes = recipes_of(model, alpha, plain=plain or not is_calibrated(scheme))
    if options.keep is not None:
        recipes = _keeping(model, recipes, options.keep)
    statistics: Ranges = {}
    choices: dict[str, Mapping[str, Choice]] = {}
    if is_calibrated(scheme):
        inputs = {part: search.sampled(recipe, model.parts[part]) for part, recipe in recipes.items()}
        statistics = collect(
            model, _targets(model, recipes), prompts, settings=settings, kernels=kernels, checkpoints=checkpoints,
            sampled=inputs if samples else None, tell=tell,
        )  # fmt: skip
    if options.search:
        for part, recipe in recipes.items():
            choices[part] = search.search(model.parts[part], recipe, statistics[part], scheme=scheme)
            recipes[part] = search.chosen(recipe, choices[part])
    return Calibrated(recipes, statistics, choices, settings, checkpoints)


def make(
    model: ImageModel,
    prompts: Sequence[str],
    out: Path,
    *,
    scheme: Scheme = "int8",
    alpha: float | None = None,
    plain: bool = False,
    weights: bool = True,
    layerwise: Layerwise | None = None,
    settings: CalibrationSettings | None = None,
    kernels: ctypes.CDLL | None = None,
    tell: Callable[[int], None] = lambda count: None,
) -> dict[str, tuple[QuantizationReport, int]]:
    """Calibrate on prompts, quantize and write `unet-int8` and `vae-int8` (or `-fp8`) under `out`; resumable.

    `alpha` and `plain` are as for `recipes_of`; schemes without calibration read neither them, nor prompts, nor
    `settings`, and cannot search. The model is in fp32, bf16 or fp16, and is not changed. `kernels` are the CPU's.
    Returns the report and the bytes written, by part. Raises what calibration, recipes and the store raise:
    `StatisticsError`, `RecipeError`, `QuantizedStoreError`; and OSError if `out` cannot be created.
    """
    options = layerwise or Layerwise()
    if options.gptq and not (weights and scheme in GPTQ_SCHEMES):
        reason = f"not of {scheme}" if weights else "which are to be stored"
        raise RecipeError(f"gptq: rounds weights of {', '.join(GPTQ_SCHEMES)}, {reason}")
    if not weights and SCHEMES[scheme].linear.SPARSE:
        raise RecipeError(f"{scheme}: scales alone do not say what was pruned, so its weights are to be stored")
    reports: dict[str, tuple[QuantizationReport, int]] = {}
    result = calibrated(
        model, prompts, out, scheme=scheme, alpha=alpha, plain=plain, layerwise=options, settings=settings,
        kernels=kernels, tell=tell,
    )  # fmt: skip
    for part, recipe in result.recipes.items():
        module, report = in_8_bits(model, part, result.statistics, scheme=scheme, recipe=recipe, gptq=options.gptq)
        calibration = calibration_of(scheme, prompts, result.settings)
        if part in result.choices:
            calibration["search"] = {name: asdict(choice) for name, choice in result.choices[part].items()}
        if options.gptq:
            calibration["gptq"] = report.compensated
        manifest = manifest_of(module, report, recipe, scheme, model.digest, model.dtype, calibration)
        reports[part] = report, store.save(module, folder(out, part, scheme), manifest, weights=weights)
    for checkpoint in result.checkpoints.values():
        checkpoint.unlink(missing_ok=True)
    return reports


def manifest_of(
    module: Any,
    report: QuantizationReport,
    recipe: Recipe,
    scheme: Scheme,
    source: str,
    dtype: torch.dtype,
    calibration: dict[str, Any],
) -> store.Manifest:
    """Return the manifest of a part that `quantize_` changed; `source` is the digest of what it was, in this type."""
    return store.Manifest(
        scheme=scheme,
        recipe=recipe.name,
        source=source,
        layers={name: type(module.get_submodule(name)).__name__ for name in report.changed},
        skipped=report.skipped,
        calibration=calibration | {"dtype": str(dtype).removeprefix("torch.")},
    )


def calibration_of(scheme: Scheme, prompts: Sequence[str], settings: CalibrationSettings) -> dict[str, Any]:
    """Return the manifest's description of the calibration; empty for a scheme without."""
    if not is_calibrated(scheme):
        return {}
    joined = "\n".join(prompts).encode("utf-8", "surrogatepass")
    return asdict(settings) | {"prompts": len(prompts), "prompts_sha256": hashlib.sha256(joined).hexdigest()}


def _keeping(model: ImageModel, full_recipes: Mapping[str, Recipe], pattern: str) -> dict[str, Recipe]:
    """Return the recipes without the layers that match. Raises `RecipeError` if none do, or for a bad pattern."""
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise RecipeError(f"keep: {pattern!r} is no regular expression ({error})") from error
    recipes = {part: recipe.keeping(model.parts[part], regex, _KEPT) for part, recipe in full_recipes.items()}
    if all(len(recipes[part].layer_rules) == len(recipe.layer_rules) for part, recipe in full_recipes.items()):
        raise RecipeError(f"keep: no layer that would be quantized has a name that matches {pattern!r}")
    return recipes


def _targets(model: ImageModel, recipes: Mapping[str, Recipe]) -> dict[str, list[str]]:
    return {part: recipe.targets(model.parts[part]) for part, recipe in recipes.items()}
