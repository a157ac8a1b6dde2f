"""Creates a language model's quantized variant: calibrates it on texts, then quantizes by the recipe."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from contract.precision import Scheme, is_calibrated
from core.quant import search, store
from core.quant.convert import QuantizationReport, Recipe, quantize_
from core.quant.dynamic import Int8DynamicLinear
from core.quant.samples import Samples
from core.quant.schemes import SCHEMES
from core.quant.statistics import Statistics, StatisticsError
from llm.backends.attention import NAME, cacheless
from llm.checkpoints.load import TextModel, variant
from llm.families.recipe import default

_HEAD = "lm_head"
_ROWS = 4096  # of each layer: GPTQ's sums of products need several times as many as there are inputs


def calibrate(model: TextModel, texts: Sequence[Sequence[int]], recipe: Recipe, *, samples: bool = False) -> Statistics:
    """Statistics of the recipe's layers over texts of token ids, with `samples` of their inputs where asked for.

    `model` must be unquantized, and is not changed.

    Raises `StatisticsError` without texts.
    """
    if not texts:
        raise StatisticsError("calibration needs texts, and there are none")
    rows = Samples(search.sampled(recipe, model.network), _ROWS) if samples else None
    statistics = Statistics(model.digest, samples=rows)
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


@dataclass(frozen=True)
class Layerwise:
    """What is chosen layer by layer, on rows that each layer reads in calibration.

    search: the smoothing of each input, by the error of the outputs (AWQ; `core.quant.search`). gptq: weights are
    rounded so that they make up for one another (`core.quant.gptq`). head: whether the head is quantized too.
    """

    search: bool = False
    gptq: bool = False
    head: bool = True


def quantize(
    model: TextModel,
    texts: Sequence[Sequence[int]],
    *,
    recipe: Recipe | None = None,
    scheme: Scheme = "int8",
    layerwise: Layerwise | None = None,
) -> TextModel:
    """A quantized copy of the model; layers to be quantized are not copied first.

    Raises what `calibrate` and `quantize_` raise.
    """
    layerwise = layerwise or Layerwise()
    recipe, statistics = _calibrated(model, texts, recipe, scheme, layerwise)
    targets = {id(model.network.get_submodule(name)) for name in recipe.targets(model.network)}
    shared = {i: layer for layer in model.network.modules() if (i := id(layer)) in targets}
    network = copy.deepcopy(model.network, dict(shared))
    quantize_(network, recipe, statistics, scheme=scheme, digest=model.digest, gptq=layerwise.gptq)
    recipe = quantize_head_(network, recipe, QuantizationReport()) if layerwise.head and model.generates else recipe
    store.round_(network)
    name = "-".join([recipe.name, *([] if scheme == "int8" else [scheme]), *(["gptq"] if layerwise.gptq else [])])
    return replace(model, digest=f"{model.digest}-{name}", precision=scheme, network=network)


def make(
    model: TextModel,
    texts: Sequence[Sequence[int]],
    out: Path,
    *,
    recipe: Recipe | None = None,
    scheme: Scheme = "int8",
    layerwise: Layerwise | None = None,
) -> QuantizationReport:
    """Calibrate, if the scheme wants it, and write its variant under `out`.

    Raises what calibration, recipe and store raise.
    """
    layerwise = layerwise or Layerwise()
    recipe, statistics = _calibrated(model, texts, recipe, scheme, layerwise)
    network = copy.deepcopy(model.network)
    report = quantize_(network, recipe, statistics, scheme=scheme, digest=model.digest, gptq=layerwise.gptq)
    recipe = quantize_head_(network, recipe, report) if layerwise.head and model.generates else recipe
    calibration: dict[str, Any] = {"texts": len(texts), "tokens": sum(map(len, texts))} if statistics else {}
    if layerwise.gptq:
        calibration["gptq"] = report.compensated
    manifest = store.Manifest(
        scheme=scheme,
        recipe=recipe.name,
        source=model.digest,
        layers={name: type(network.get_submodule(name)).__name__ for name in report.changed},
        skipped=report.skipped,
        calibration=calibration,
    )
    store.save(network, out / variant(scheme), manifest)
    return report


def quantize_head_(network: nn.Module, recipe: Recipe, report: QuantizationReport) -> Recipe:
    """Replace the head, in place and in the report, and return the recipe with a name that says so.

    In any scheme it has weights in INT8 by token of the vocabulary, and inputs scaled by row: no calibration has to
    foresee what the last layer returns. Embeddings that are tied to it stay as they are.
    """
    if not isinstance(head := getattr(network, _HEAD, None), nn.Linear):
        return recipe
    setattr(network, _HEAD, Int8DynamicLinear.of(head, None))
    report.changed.append(_HEAD)
    report.skipped.pop(_HEAD, None)
    return replace(recipe, name=f"{recipe.name}-head8")


def _calibrated(
    model: TextModel, texts: Sequence[Sequence[int]], recipe: Recipe | None, scheme: Scheme, layerwise: Layerwise
) -> tuple[Recipe, Statistics | None]:
    """The recipe, by default the scheme's, and statistics for it; none, and no smoothing, without calibration."""
    if not is_calibrated(scheme):
        return default(scheme), None
    recipe = recipe or default(scheme)
    sampled = layerwise.search or layerwise.gptq or SCHEMES[scheme].linear.SPARSE
    statistics = calibrate(model, texts, recipe, samples=sampled)
    if layerwise.search:
        recipe = search.chosen(recipe, search.search(model.network, recipe, statistics, scheme=scheme))
    return recipe, statistics
