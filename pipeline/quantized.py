"""Creates a model's quantized parts: calibrates on prompts if the scheme wants it, quantizes, and writes them.

`pipeline.quantized_parts` finds and loads them.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from contract.precision import Scheme, is_calibrated
from core.quant import store
from core.quant.convert import QuantizationReport, Recipe, quantize_
from core.quant.statistics import Statistics
from pipeline.calibration import collect, settings_of
from pipeline.quantized_parts import folder
from unet_opt.calibrate import CalibrationSettings

if TYPE_CHECKING:
    from pipeline.families.family import ImageModel

Ranges = Mapping[str, Statistics]  # by part


def recipes_of(model: ImageModel, alpha: float | None = None, *, plain: bool = False) -> dict[str, Recipe]:
    """The recipe of each part, with the family's own `alpha` if none is given; `plain` is without SmoothQuant."""
    family = model.family
    return family.recipes(model.parts, None if plain else family.alpha if alpha is None else alpha)


def ranges(model: ImageModel, prompts: Sequence[str], **options: Any) -> Ranges:
    """Input ranges of the layers to be quantized; options as for `calibration.collect`."""
    return collect(model, _targets(model, recipes_of(model)), prompts, **options)


def in_8_bits(
    model: ImageModel, part: str, found: Ranges, *, scheme: Scheme = "int8", recipe: Recipe | None = None
) -> tuple[Any, QuantizationReport]:
    """The part in 8 bits, and a report. The model's own part is unchanged.

    Tensors of unquantized layers are shared with it: quantized ones take half or a quarter of its memory. `found` is
    for schemes with calibration, as is the alpha of the default recipe.
    """
    own = model.parts[part]
    module = copy.deepcopy(own, {id(tensor): tensor for tensor in (*own.parameters(), *own.buffers())})
    recipe = recipe or recipes_of(model, plain=not is_calibrated(scheme))[part]
    report = quantize_(module, recipe, found.get(part), scheme=scheme, digest=model.digest)
    return module, report


def make(
    model: ImageModel,
    prompts: Sequence[str],
    out: Path,
    *,
    scheme: Scheme = "int8",
    alpha: float | None = None,
    plain: bool = False,
    weights: bool = True,
    settings: CalibrationSettings | None = None,
    kernels: ctypes.CDLL | None = None,
    tell: Callable[[int], None] = lambda count: None,
) -> dict[str, tuple[QuantizationReport, int]]:
    """Calibrate on prompts, quantize and write `unet-int8` and `vae-int8` (or `-fp8`) under `out`; resumable.

    `alpha` and `plain` are as for `recipes_of`; schemes without calibration read neither them, nor prompts, nor
    `settings`. The model is in fp32, bf16 or fp16, and is not changed. `kernels` are the CPU's. Returns the report and
    the bytes written, by part. Raises what calibration, recipes and the store raise: `StatisticsError`, `RecipeError`,
    `QuantizedStoreError`; and OSError if `out` cannot be created.
    """
    settings = settings or settings_of(model.family, model.defaults)
    made: dict[str, tuple[QuantizationReport, int]] = {}
    out.mkdir(parents=True, exist_ok=True)
    checkpoints = {part: out / f".{part}-{scheme}.statistics" for part in model.family.quantized}
    of, found = recipes_of(model, alpha, plain=plain or not is_calibrated(scheme)), dict[str, Statistics]()
    if is_calibrated(scheme):
        found = collect(
            model, _targets(model, of), prompts, settings=settings, kernels=kernels, checkpoints=checkpoints, tell=tell
        )
    for part, recipe in of.items():
        module, report = in_8_bits(model, part, found, scheme=scheme, recipe=recipe)
        calibration = calibration_of(scheme, prompts, settings)
        manifest = manifest_of(module, report, recipe, scheme, model.digest, model.dtype, calibration)
        made[part] = report, store.save(module, folder(out, part, scheme), manifest, weights=weights)
    for checkpoint in checkpoints.values():
        checkpoint.unlink(missing_ok=True)
    return made


def manifest_of(
    module: Any,
    report: QuantizationReport,
    recipe: Recipe,
    scheme: Scheme,
    source: str,
    dtype: torch.dtype,
    calibration: dict[str, Any],
) -> store.Manifest:
    """The manifest of a part that `quantize_` changed; `source` is the digest of what it was, in this type."""
    return store.Manifest(
        scheme=scheme,
        recipe=recipe.name,
        source=source,
        layers={name: type(module.get_submodule(name)).__name__ for name in report.changed},
        skipped=report.skipped,
        calibration=calibration | {"dtype": str(dtype).removeprefix("torch.")},
    )


def calibration_of(scheme: Scheme, prompts: Sequence[str], settings: CalibrationSettings) -> dict[str, Any]:
    """The manifest's description of the calibration; empty for a scheme without."""
    if not is_calibrated(scheme):
        return {}
    said = "\n".join(prompts).encode("utf-8", "surrogatepass")
    return asdict(settings) | {"prompts": len(prompts), "prompts_sha256": hashlib.sha256(said).hexdigest()}


def watch(
    model: ImageModel, prompts: Sequence[str], path: Path, *, settings: CalibrationSettings | None = None
) -> None:
    """Calibrate only the denoiser and keep its statistics in `path`; resumable.

    To compare recipes on equal statistics.
    """
    part = model.family.denoiser
    layers = _targets(model, recipes_of(model))[part]
    collect(model, {part: layers}, prompts, settings=settings, checkpoints={part: path})


def _targets(model: ImageModel, of: Mapping[str, Recipe]) -> dict[str, list[str]]:
    return {part: recipe.targets(model.parts[part]) for part, recipe in of.items()}
