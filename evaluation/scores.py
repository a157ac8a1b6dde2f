"""The scores of a run: every figure with its 95% interval, over all captions and against each reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evaluation import bootstrap, fid, mmd, pairs, pixels, references
from evaluation.bootstrap import Estimate
from evaluation.references import Reference
from evaluation.run import EvaluationRun, RunError
from evaluation.scoring_networks import ScoringNetworks

Look = Callable[[str, int, int], None]  # what, done, total


class Pair(NamedTuple):
    """Distances between two images of one caption."""

    place: int  # among the run's captions
    psnr: float
    ssim: float
    lpips: float | None  # without its weights


def of_run(
    run: EvaluationRun, networks: ScoringNetworks, held_against: Sequence[Reference], *, resamples: int, look: Look
) -> dict[str, Any]:
    """The content of `scores.json`.

    Raises `pixels.PictureError`, `RunError` if a run has fewer than 2 images.
    """
    if len(run.captions) < 2:
        raise RunError(f"{run.folder}: one picture is no distribution; scores need at least 2")
    distance, clip = references.of_run(run, networks, lambda done, total: look(f"looking at {run.name}", done, total))
    counts = bootstrap.resamples(len(run.captions), resamples)
    notes = few(run.name, len(distance), networks)
    found: dict[str, Any] = {
        "scores": {networks.score: said(caption_score(run, networks, clip, counts))},
        "against": {},
    }
    for reference in held_against:
        if reference.run is not None and reference.run.folder.resolve() == run.folder.resolve():
            raise RunError(f"--against: {run.folder} is this run itself")
        notes += few(reference.name, reference.count, networks)
        figures = {
            name: said(figure)
            for name, figure in distances(distance, clip, networks, reference, counts, look=look).items()
        }
        if reference.run is not None:
            reason = unpaired(run, reference.run)
            if reason:
                notes.append(f"{reference.name}: no PSNR and SSIM, {reason}")
            else:
                assert reference.clip is not None, "a run has images"
                every = pair(run, reference.run, networks, look)
                both = paired(every, clip, reference.clip, networks, counts)
                figures |= {name: said(figure) for name, figure in both.items()}
        found["against"][reference.name] = {"kind": reference.kind, "pictures": reference.count, "scores": figures}
        check = by_torchmetrics(distance, reference)
        if check is not None:
            found["against"][reference.name]["torchmetrics"] = {networks.fid: check}
    return found | {"resamples": resamples, "notes": notes}


def caption_score(run: EvaluationRun, networks: ScoringNetworks, clip: Tensor, counts: Tensor) -> Estimate:
    """100 × the cosine of image and caption, the mean over captions; not clamped at 0 (as in MLPerf)."""
    return bootstrap.mean(100 * cosines(run, networks, clip), counts)


def cosines(run: EvaluationRun, networks: ScoringNetworks, clip: Tensor) -> Tensor:
    """[N] fp64."""
    return (clip.double() * references.captions_of(run, networks).double()).sum(1)


def distances(
    distance: Tensor, clip: Tensor, networks: ScoringNetworks, reference: Reference, counts: Tensor, *, look: Look
) -> dict[str, Estimate]:
    """FID, and if the reference has images KID and CMMD. The reference itself is not resampled."""
    far = fid.FrechetDistance(reference.gaussian)
    drawn = []
    for number, once in enumerate(fid.resampled(distance, counts), 1):
        drawn.append(far(once))
        look(f"{networks.fid} over resamples", number, len(counts))
    found = {networks.fid: Estimate(far(fid.gaussian(distance)), torch.tensor(drawn, dtype=torch.float64))}
    if reference.distance is not None and reference.clip is not None:
        every = torch.cat([torch.ones_like(counts[:1]), counts])
        for name, measure, ours, theirs in (
            (networks.kid, mmd.kid, distance, reference.distance),
            (networks.cmmd, mmd.cmmd, clip, reference.clip),
        ):
            walked = measure(ours, theirs, every)
            found[name] = Estimate(float(walked[0]), walked[1:])
    return found


def unpaired(run: EvaluationRun, other: EvaluationRun) -> str | None:
    """Why images of two runs cannot be paired; None if they can."""
    if [(c.id, c.text) for c in run.captions] != [(c.id, c.text) for c in other.captions]:
        return "since its captions are others"
    if any(run.records[index].seed != other.records[index].seed for index in run.records):
        return "since its seeds are others"
    return None


def pair(
    run: EvaluationRun,
    other: EvaluationRun,
    networks: ScoringNetworks,
    look: Look,
    indices: Sequence[int] | None = None,
) -> list[Pair]:
    """PSNR, SSIM and LPIPS of each caption's two pictures. Raises `RunError` where they are of different sizes."""
    wanted = range(len(run.captions)) if indices is None else indices
    found = []
    for done, index in enumerate(wanted, 1):
        a, b = (pixels.read(one.pictures / one.records[index].file) for one in (run, other))
        try:
            perceived = None if networks.lpips is None else networks.lpips(a, b)
            found.append(Pair(index, pairs.psnr(a, b), pairs.ssim(a, b), perceived))
        except ValueError as error:
            raise RunError(f"{run.folder} and {other.folder}: {run.captions[index].id}: {error}") from None
        look(f"{run.name} beside {other.name}", done, len(wanted))
    return found


PAIRED = ("psnr", "ssim", "lpips")


def paired(
    found: Sequence[Pair], clip: Tensor, other: Tensor, networks: ScoringNetworks, counts: Tensor
) -> dict[str, Estimate]:
    """Means over captions; equal pictures count as 100 dB.

    `clip` and `other` are the pictures' features [N, D], of length 1: their distance is 1 - cosine.
    """
    figures = {
        name: bootstrap.mean(torch.tensor([getattr(one, name) for one in found], dtype=torch.float64), counts)
        for name in PAIRED
        if networks.lpips is not None or name != "lpips"
    }
    gap = (clip.double() - other.double()).square().sum(1) / 2  # 1 - cosine, and exactly 0 for equal features
    return figures | {networks.paired: bootstrap.mean(gap, counts)}


def few(name: str, count: int | None, networks: ScoringNetworks) -> list[str]:
    """A warning if a covariance cannot have full rank."""
    width = networks.distance.width
    if count is None or count > width:
        return []
    return [
        f"{name}: {count} pictures are fewer than the {width} features and one: their covariance has rank "
        f"{count - 1} at most, and {networks.fid} is far too high and depends on the number of images. Compare "
        "it only with figures over the same number of pictures"
    ]


def by_torchmetrics(distance: Tensor, reference: Reference) -> float | None:
    """The same FID by torchmetrics, for comparison; None if it is not installed, or the reference has no images."""
    if reference.distance is None:
        return None
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance
    except ImportError:
        return None
    measure = FrechetInceptionDistance(feature=_Given(distance.shape[1])).set_dtype(torch.float64)
    for features, real in ((reference.distance, True), (distance, False)):
        for start in range(0, len(features), fid.CHUNK):
            measure.update(features[start : start + fid.CHUNK].double(), real=real)
    return float(measure.compute())


class _Given(torch.nn.Module):
    """Passes features to torchmetrics where it expects images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width

    def forward(self, features: Tensor) -> Tensor:
        return features


def said(figure: Estimate) -> dict[str, float]:
    """A figure as JSON."""
    value, low, high = figure.interval
    return {"value": value, "low": low, "high": high}
