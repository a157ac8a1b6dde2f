"""A model's quantized UNet and VAE: where they lie, how they are made, and putting them in place of the model's own.

Knows folders, recipes and calibration; leaves arithmetic to `core.quant` and files to its store.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from core.quant import store
from core.quant.convert import Recipe, Report, Scheme, quantize_
from core.quant.statistics import Statistics
from pipeline.denoise import PackedKeys
from pipeline.drawing import Drawing
from pipeline.folder import ModelError
from pipeline.vae import unscale
from unet_opt import recipe as recipes
from unet_opt.calibrate import STEPS, calibrate

if TYPE_CHECKING:
    from pipeline.load import Model

Part = Literal["unet", "vae"]
SCHEMES: tuple[Scheme, ...] = ("int8", "fp8")
_FULL_STEPS = 20  # the VAE is calibrated on finished latents
_GUIDANCE = 5.0


def folder(parent: Path, part: Part, scheme: str) -> Path:
    """Where a model keeps a quantized part: `unet-int8` beside `unet`."""
    return parent / f"{part}-{scheme}"


def variant(parent: Path | None, scheme: str, unet: Path | None = None) -> dict[Part, Path]:
    """The folders of a model's quantized parts; `unet` is one elsewhere. Raises `ModelError` where there is no UNet.

    A VAE without a quantized variant stays as it is. Beside a UNet that lies elsewhere its own VAE is looked for first.
    """
    found: dict[Part, Path] = {}
    beside = [] if unet is None else [unet.parent]
    parents = beside + ([] if parent is None else [parent])
    places: list[Path] = [unet] if unet is not None else [folder(parent, "unet", scheme) for parent in parents]
    for place in places:
        if (place / store.MANIFEST).is_file():
            found["unet"] = place
    if "unet" not in found:
        where = places[0] if places else f"unet-{scheme}"
        raise ModelError(f"precision {scheme}: there is no quantized UNet in {where}; `diptych quantize` makes one")
    for parent in parents:
        if "vae" not in found and (folder(parent, "vae", scheme) / store.MANIFEST).is_file():
            found["vae"] = folder(parent, "vae", scheme)
    return found


def apply_(modules: Mapping[str, Any], folders: Mapping[Part, Path], *, digest: str) -> str:
    """Put quantized parts in place; returns a digest of them and the weights. Raises `ModelError`, naming the file.

    `folders` names the parts to replace. `digest` is of the weights that they must have been made from.
    """
    made = hashlib.sha256(digest.encode())
    for part, where in folders.items():
        try:
            manifest = store.load_(modules[part], where, source=digest)
        except store.StoreError as error:
            raise ModelError(str(error)) from error
        made.update(f"{part}:{manifest.scheme}:{manifest.recipe}:{manifest.sha256}".encode())
    return made.hexdigest()


def check_scales_alone(where: Path) -> None:
    """Raise `ModelError` for a quantized UNet that brings weights of its own: changed ones would be lost with it."""
    try:
        if store.read_manifest(where).weights:
            raise ModelError(f"lora: {where} holds weights of its own; `diptych quantize` makes one of scales alone")
    except store.StoreError as error:
        raise ModelError(str(error)) from error


def make(
    model: Model,
    prompts: Sequence[str],
    out: Path,
    *,
    scheme: Scheme = "int8",
    alpha: float | None = recipes.ALPHA,
    weights: bool = True,
    tell: Callable[[str, int, int], None] = lambda part, done, total: None,
) -> dict[Part, tuple[Report, int]]:
    """Calibrate on prompts, quantize and write `unet-int8` and `vae-int8` (or `-fp8`) under `out`; resumes.

    `model` must be in fp32 and is left as it is. Returns what was done and the bytes written, by part. Raises what
    calibration, recipes and the store raise: `StatisticsError`, `RecipeError`, `StoreError`.
    """
    drawing = Drawing(model, PackedKeys(model.unet), guidance=_GUIDANCE, steps=_FULL_STEPS)
    made: dict[Part, tuple[Report, int]] = {}

    def draw(batch: Sequence[str], around: Any) -> None:
        drawing.latents(batch, _seeds(batch), until=STEPS, around=around)

    def decode(batch: Sequence[str], around: Any) -> None:
        latents = drawing.latents(batch, _seeds(batch))
        with around(0), torch.inference_mode():
            model.vae.decode(unscale(latents.to(model.vae.dtype), model.vae.config), return_dict=False)

    parts: list[tuple[Part, Any, Recipe, Any]] = [
        ("unet", model.unet, recipes.unet(model.unet, alpha=alpha), draw),
        ("vae", model.vae, recipes.decoder(model.vae), decode),
    ]
    out.mkdir(parents=True, exist_ok=True)
    for part, module, recipe, run in parts:
        checkpoint = out / f".{part}-{scheme}.statistics"
        statistics = calibrate(
            module, recipe.targets(module), prompts, run, digest=model.digest, checkpoint=checkpoint,
            tell=lambda count, part=part: tell(part, count, len(prompts)),  # type: ignore[misc]
        )  # fmt: skip
        made[part] = _write(model, part, recipe, statistics, folder(out, part, scheme), scheme, weights, len(prompts))
        checkpoint.unlink(missing_ok=True)
    return made


def watch(model: Model, prompts: Sequence[str], path: Path) -> None:
    """Calibrate the UNet alone and keep its statistics in `path`; resumes. To compare recipes on equal statistics."""
    drawing = Drawing(model, PackedKeys(model.unet), guidance=_GUIDANCE, steps=_FULL_STEPS)

    def draw(batch: Sequence[str], around: Any) -> None:
        drawing.latents(batch, _seeds(batch), until=STEPS, around=around)

    layers = recipes.unet(model.unet).targets(model.unet)
    calibrate(model.unet, layers, prompts, draw, digest=model.digest, checkpoint=path)


def _write(
    model: Model,
    part: Part,
    recipe: Recipe,
    statistics: Statistics,
    where: Path,
    scheme: Scheme,
    weights: bool,
    count: int,
) -> tuple[Report, int]:
    module = copy.deepcopy(getattr(model, part))
    report = quantize_(module, recipe, statistics, scheme=scheme, digest=model.digest)
    manifest = store.Manifest(
        scheme=scheme,
        recipe=recipe.name,
        source=model.digest,
        layers={name: type(module.get_submodule(name)).__name__ for name in report.changed},
        skipped=report.skipped,
        calibration={"prompts": count, "steps": STEPS if part == "unet" else _FULL_STEPS, "guidance": _GUIDANCE},
    )
    return report, store.save(module, where, manifest, weights=weights)


def _seeds(batch: Sequence[str]) -> list[int]:
    """A seed for each prompt, from its text: the same whatever batch it comes in."""
    return [int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4]) for prompt in batch]
