"""The scores of a run: every figure with its 95% interval, over all captions and against each reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from evaluation import bootstrap, mmd, paired, references
from evaluation.bootstrap import Estimate, interval_fields
from evaluation.features import Look
from evaluation.fid import FrechetDistance, Gaussian
from evaluation.judges import Kind
from evaluation.references import Features, ReferenceImages
from evaluation.run import EvaluationRun, RunError
from evaluation.scoring_networks import ScoringNetworks


def score_run(
    run: EvaluationRun,
    networks: ScoringNetworks,
    held_against: Sequence[ReferenceImages],
    *,
    resamples: int,
    look: Look,
) -> dict[str, Any]:
    """The content of `scores.json`.

    Raises `pixels.PictureError`, `RunError` if a run has fewer than 2 images.
    """
    if len(run.captions) < 2:
        raise RunError(f"{run.folder}: one picture is no distribution; scores need at least 2")
    seen = references.run_features(run, networks, lambda done, total: look(f"looking at {run.name}", done, total))
    counts = bootstrap.resamples(len(run.captions), resamples)
    notes = few(run.name, len(run.captions), networks)
    each = score_captions(run, networks, seen)
    scores: dict[str, Any] = {
        "scores": {name: interval_fields(bootstrap.mean(values, counts)) for name, values in each.items()},
        "against": {},
    }
    for reference in held_against:
        if reference.run is not None and reference.run.folder.resolve() == run.folder.resolve():
            raise RunError(f"--against: {run.folder} is this run itself")
        notes += few(reference.name, reference.count, networks)
        far = distances(seen, networks, reference, counts, look=look)
        entries: dict[str, Any] = {
            "kind": reference.kind,
            "pictures": reference.count,
            "scores": {n: interval_fields(f) for n, f in far.items()},
        }
        if reference.run is not None:
            reason = paired.unpaired_reason(run, reference.run)
            if reason:
                notes.append(f"{reference.name}: no PSNR and SSIM, {reason}")
            else:
                assert reference.features is not None, "a run has images"
                ids = [caption.id for caption in run.captions]
                every = paired.images(run, reference.run, networks, look, range(len(ids)))
                entries["scores"] |= paired.distances(every, seen, reference.features, networks, ids, counts)
                reference_scores = score_captions(reference.run, networks, reference.features)
                entries["changes"] = paired.changes(each, reference_scores, ids, counts)
        scores["against"][reference.name] = entries
    return scores | {"resamples": resamples, "notes": notes}


def score_captions(run: EvaluationRun, networks: ScoringNetworks, seen: Features) -> dict[str, Tensor]:
    """The scores of each caption's image by figure, [N] fp64: 100 × cosine, not clamped at 0 (as in MLPerf), and
    rewards.
    """
    scores = {networks.score: 100 * _cosines(seen.clip, references.run_caption_features(run, networks.clip))}
    for judge in networks.judges:
        if judge.kind is Kind.REWARD:
            texts = references.run_caption_features(run, judge.clip)
            scores[judge.figure] = judge.scale * _cosines(seen.judged[judge.figure], texts)
        elif judge.kind is Kind.PAIR:
            scores[judge.figure] = judge.scale * seen.judged[judge.figure][:, 0].double()
    return scores


def _cosines(images: Tensor, texts: Tensor) -> Tensor:
    return (images.double() * texts.double()).sum(1)


def distances(
    seen: Features, networks: ScoringNetworks, reference: ReferenceImages, counts: Tensor, *, look: Look
) -> dict[str, Estimate]:
    """FID, and if the reference has images KID, CMMD and those of judges. The reference itself is not resampled."""
    reference_features = reference.features
    if reference_features is None:
        assert reference.statistics is not None
        return {networks.fid: _frechet(networks.fid, seen.distance, reference.statistics, counts, look)}
    scores = {networks.fid: _frechet(networks.fid, seen.distance, reference_features.distance, counts, look)}
    every = torch.cat([torch.ones_like(counts[:1]), counts])
    scores[networks.kid] = _walked(mmd.kid(seen.distance, reference_features.distance, every))
    scores[networks.cmmd] = _walked(mmd.cmmd(seen.clip, reference_features.clip, every))
    for judge in networks.judges:
        name = judge.figure
        if judge.kind is Kind.FRECHET:
            scores[name] = _frechet(name, seen.judged[name], reference_features.judged[name], counts, look)
        elif judge.kind is Kind.CMMD:
            scores[name] = _walked(mmd.cmmd(seen.judged[name], reference_features.judged[name], every))
    return scores


def _frechet(name: str, features: Tensor, reference: Tensor | Gaussian, counts: Tensor, look: Look) -> Estimate:
    far, resampled = FrechetDistance(reference), []
    for number, once in enumerate(counts, 1):
        resampled.append(far(features, once))
        look(f"{name} over resamples", number, len(counts))
    return Estimate(far(features), torch.tensor(resampled, dtype=torch.float64))


def _walked(values: Tensor) -> Estimate:
    """The value of a figure over all captions, and then over each resample."""
    return Estimate(float(values[0]), values[1:])


def few(name: str, count: int | None, networks: ScoringNetworks) -> list[str]:
    """A warning for each figure whose covariance cannot have full rank."""
    return [
        f"{name}: {count} pictures are fewer than the {width} features and one: their covariance has rank "
        f"{count - 1} at most, and {figure} is far too high and depends on the number of images. Compare "
        "it only with figures over the same number of pictures"
        for figure, width in _widths(networks)
        if count is not None and count <= width
    ]


def _widths(networks: ScoringNetworks) -> Iterator[tuple[str, int]]:
    yield networks.fid, networks.distance.width
    for judge in networks.judges:
        if judge.kind is Kind.FRECHET:
            yield judge.figure, judge.extractor.width
