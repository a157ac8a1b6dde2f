"""References that a run is scored against: a folder of images, a file of statistics, or another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from evaluation import features, fid, pixels
from evaluation.clip import Clip
from evaluation.features import Extractor, Tick
from evaluation.fid import Gaussian
from evaluation.judges import Kind
from evaluation.run import EvaluationRun
from evaluation.scoring_networks import ScoringNetworks


class UnusableReference(ValueError):
    """An unusable reference. The message names it."""


class Features(NamedTuple):
    """Features [N, D] of images: for distances, for captions, and by figure those of further judges; of judges of pairs
    the scores [N, 1], which only a run has.
    """

    distance: Tensor
    clip: Tensor
    judged: Mapping[str, Tensor]

    def of(self, indices: Sequence[int]) -> Features:
        """The features of some of the images."""
        judged = {figure: rows[indices] for figure, rows in self.judged.items()}
        return Features(self.distance[indices], self.clip[indices], judged)


@dataclass(frozen=True, eq=False)
class ReferenceImages:
    """The reference of a run's images: either `features` of images, or `statistics`, which have no images."""

    name: str
    kind: str  # "folder", "statistics", "run"
    features: Features | None = None
    statistics: Gaussian | None = None
    run: EvaluationRun | None = None

    @property
    def count(self) -> int | None:
        return None if self.features is None else len(self.features.distance)


def kind(path: Path) -> str:
    """The kind of reference at this path. Raises `UnusableReference`."""
    if (path / "run.json").is_file():
        return "run"
    if path.is_dir():
        return "folder"
    if path.suffix.lower() == ".npz" and path.is_file():
        return "statistics"
    raise UnusableReference(f"{path}: is neither a run, nor a folder of pictures, nor an .npz with mu and sigma")


def look(path: Path, networks: ScoringNetworks, store: Path, tick: Tick) -> ReferenceImages:
    """Compute a reference's features; those of a run are cached in the run's folder, those of a folder in `store`.

    Raises `UnusableReference`, `run.RunError`, `fid.StatisticsError` and `pixels.PictureError`, naming the file.
    """
    name, identity = path.resolve().name, kind(path)
    if identity == "statistics":
        return ReferenceImages(name, identity, statistics=fid.read(path, networks.distance.width))
    if identity == "run":
        run = EvaluationRun.read(path)
        return ReferenceImages(name, identity, run_features(run, networks, tick), run=run)
    files = pixels.listing(path)
    if len(files) < 2:
        raise UnusableReference(f"{path}: holds one picture; a distribution needs at least 2")
    digest = features.digest_of(files)

    def taken(extractor: Extractor) -> Tensor:
        cache = store / f"{name}-{digest[:12]}-{extractor.name}"
        return features.picture_features(files, digest, extractor, cache, tick)

    return ReferenceImages(name, identity, _all(networks, taken))


def run_features(run: EvaluationRun, networks: ScoringNetworks, tick: Tick) -> Features:
    """A run's features, cached in its folder."""
    files, digest = run.files(), run.digest()

    def taken(extractor: Extractor) -> Tensor:
        return features.picture_features(files, digest, extractor, run.folder / "features" / extractor.name, tick)

    run_features, texts = _all(networks, taken), [caption.text for caption in run.captions]
    scores = {
        judge.figure: features.pair_scores(
            files, texts, digest, judge.scorer, run.folder / "features" / judge.scorer.name, tick
        )
        for judge in networks.judges
        if judge.kind is Kind.PAIR
    }
    return run_features._replace(judged={**run_features.judged, **scores})


def run_caption_features(run: EvaluationRun, clip: Clip) -> Tensor:
    """Features [N, D] of a run's captions, cached in its folder."""
    texts: Sequence[str] = [caption.text for caption in run.captions]
    cache = run.folder / "features" / f"{clip.name}-captions"
    return features.caption_features(texts, clip.read, clip.width, clip.digest, cache)


def _all(networks: ScoringNetworks, extract: Callable[[Extractor], Tensor]) -> Features:
    distance = extract(networks.distance)
    clip = distance if networks.clip is networks.distance else extract(networks.clip)
    judged = {judge.figure: extract(judge.extractor) for judge in networks.judges if judge.kind is not Kind.PAIR}
    return Features(distance, clip, judged)
