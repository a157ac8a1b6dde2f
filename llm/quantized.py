"""Creates a language model's variant in 8 bits: calibrates it on texts, then quantizes by the recipe."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from contract.precision import Scheme, is_calibrated
from core.quant import store
from core.quant.convert import QuantizationReport, Recipe, quantize_
from core.quant.statistics import Statistics, StatisticsError
from llm.attention import NAME, cacheless
from llm.load import TextModel, variant
from llm.recipe import llama


def calibrate(model: TextModel, texts: Sequence[Sequence[int]], recipe: Recipe) -> Statistics:
    """Statistics of the recipe's layers over texts of token ids. `model` must be unquantized, and is not changed.

    Raises `StatisticsError` without texts.
    """
    if not texts:
        raise StatisticsError("calibration needs texts, and there are none")
    statistics = Statistics(model.digest)
    targets = recipe.targets(model.network)
    model.network.set_attn_implementation(cacheless(model.network))  # a whole text at once needs no cache
    try:
        for text in texts:
            ids = torch.tensor([list(text)], device=model.device)
            with statistics.observe(model.network, targets, 0), torch.inference_mode():
                model.network(ids, use_cache=False)
    finally:
        model.network.set_attn_implementation(NAME)
    return statistics


def quantize(
    model: TextModel, texts: Sequence[Sequence[int]], *, recipe: Recipe | None = None, scheme: Scheme = "int8"
) -> TextModel:
    """A copy of the model in 8 bits; layers to be quantized are not copied first.

    Raises what `calibrate` and `quantize_` raise.
    """
    recipe, statistics = _calibrated(model, texts, recipe, scheme)
    targets = {id(model.network.get_submodule(name)) for name in recipe.targets(model.network)}
    shared = {i: layer for layer in model.network.modules() if (i := id(layer)) in targets}
    network = copy.deepcopy(model.network, dict(shared))
    quantize_(network, recipe, statistics, scheme=scheme, digest=model.digest)
    store.round_(network)
    name = recipe.name if scheme == "int8" else f"{recipe.name}-{scheme}"
    return replace(model, digest=f"{model.digest}-{name}", precision=scheme, network=network)


def make(
    model: TextModel,
    texts: Sequence[Sequence[int]],
    out: Path,
    *,
    recipe: Recipe | None = None,
    scheme: Scheme = "int8",
) -> QuantizationReport:
    """Calibrate, if the scheme wants it, and write its variant under `out`.

    Raises what calibration, recipe and store raise.
    """
    recipe, statistics = _calibrated(model, texts, recipe, scheme)
    network = copy.deepcopy(model.network)
    report = quantize_(network, recipe, statistics, scheme=scheme, digest=model.digest)
    manifest = store.Manifest(
        scheme=scheme,
        recipe=recipe.name,
        source=model.digest,
        layers={name: type(network.get_submodule(name)).__name__ for name in report.changed},
        skipped=report.skipped,
        calibration={"texts": len(texts), "tokens": sum(map(len, texts))} if statistics else {},
    )
    store.save(network, out / variant(scheme), manifest)
    return report


def _calibrated(
    model: TextModel, texts: Sequence[Sequence[int]], recipe: Recipe | None, scheme: Scheme
) -> tuple[Recipe, Statistics | None]:
    """The recipe, by default the family's, and statistics for it; none, and no smoothing, without calibration."""
    if not is_calibrated(scheme):
        return llama(None), None
    recipe = recipe or llama()
    return recipe, calibrate(model, texts, recipe)
