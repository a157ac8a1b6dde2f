"""Paired tests of two runs over the same captions and seeds: mean differences, their intervals, and the worst cases.

They are the main evidence for a change of serving: what all runs share, such as hard captions, cancels out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evaluation import bootstrap, pairs, pixels
from evaluation.features import Look
from evaluation.references import Features
from evaluation.run import EvaluationRun, RunError
from evaluation.scoring_networks import ScoringNetworks

IMAGES = ("psnr", "ssim", "lpips")
WORST = 6  # cases of each figure
_MORE_IS_BETTER = ("psnr", "ssim")


def names(networks: ScoringNetworks) -> tuple[str, ...]:
    """The figures of two images."""
    layers = () if networks.layers is None else (networks.layers.figure,)
    return (*IMAGES, *layers, networks.paired)


class Pair(NamedTuple):
    """Distances between two images of one caption."""

    place: int  # among the run's captions
    psnr: float
    ssim: float
    lpips: float | None  # without its weights
    layers: float | None  # without a CLIP for them


def unpaired_reason(run: EvaluationRun, other: EvaluationRun) -> str | None:
    """Return why images of two runs cannot be paired; None if they can."""
    if [(c.id, c.text) for c in run.captions] != [(c.id, c.text) for c in other.captions]:
        return "since its captions are others"
    if any(run.records[index].seed != other.records[index].seed for index in run.records):
        return "since its seeds are others"
    return None


def images(
    run: EvaluationRun, other: EvaluationRun, networks: ScoringNetworks, look: Look, indices: Sequence[int]
) -> list[Pair]:
    """PSNR, SSIM, LPIPS and distance by layers of these captions' two pictures.

    Raises `RunError` where they are of different sizes."""
    compared = []
    for done, index in enumerate(indices, 1):
        a, b = (pixels.read(item.pictures / item.records[index].file) for item in (run, other))
        try:
            perceived = None if networks.lpips is None else networks.lpips(a, b)
            layers = None if networks.layers is None else float(networks.layers.between([a], [b])[0])
            compared.append(Pair(index, pairs.psnr(a, b), pairs.ssim(a, b), perceived, layers))
        except ValueError as error:
            raise RunError(f"{run.folder} and {other.folder}: {run.captions[index].id}: {error}") from None
        look(f"{run.name} beside {other.name}", done, len(indices))
    return compared


def distances(
    pairs: Sequence[Pair],
    run_features: Features,
    base_features: Features,
    networks: ScoringNetworks,
    ids: Sequence[str],
    counts: Tensor,
) -> dict[str, Any]:
    """The mean over captions by figure, with its interval, and the worst captions; equal pictures count as 100 dB."""
    figures = {
        name: torch.tensor([getattr(pair, name) for pair in pairs], dtype=torch.float64)
        for name in IMAGES
        if networks.lpips is not None or name != "lpips"
    }
    if networks.layers is not None:
        figures[networks.layers.figure] = torch.tensor([pair.layers for pair in pairs], dtype=torch.float64)
    # 1 - cosine of features of length 1, and exactly 0 for equal ones.
    figures[networks.paired] = (run_features.clip.double() - base_features.clip.double()).square().sum(1) / 2
    entry = {}
    for name, values in figures.items():
        cases = values if name in _MORE_IS_BETTER else -values
        worst = [{"id": ids[k], "value": float(values[k])} for k in _lowest(cases)]
        entry[name] = bootstrap.interval_fields(bootstrap.mean(values, counts)) | {"worst": worst}
    return entry


def changes(
    run_scores: Mapping[str, Tensor], base_scores: Mapping[str, Tensor], ids: Sequence[str], counts: Tensor
) -> dict[str, Any]:
    """The mean change of each figure that captions have, [N], with its interval, and the captions that lose most. An
    interval without 0 is a change that the captions can tell.
    """
    entry = {}
    for name, values in run_scores.items():
        moved = values.double() - base_scores[name].double()
        worst = [
            {"id": ids[k], "value": float(moved[k]), "run": float(values[k]), "base": float(base_scores[name][k])}
            for k in _lowest(moved)
        ]
        entry[name] = bootstrap.interval_fields(bootstrap.mean(moved, counts)) | {"worst": worst}
    return entry


def _lowest(values: Tensor) -> list[int]:
    order: list[int] = values.argsort(stable=True)[:WORST].tolist()
    return order
