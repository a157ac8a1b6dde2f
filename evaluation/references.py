"""References that a run is scored against: a folder of images, a file of statistics, or another run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from evaluation import features, fid, pixels
from evaluation.features import Extractor, Tick
from evaluation.fid import Gaussian
from evaluation.run import EvaluationRun
from evaluation.scoring_networks import ScoringNetworks


class UnusableReference(ValueError):
    """An unusable reference. The message names it."""


@dataclass(frozen=True, eq=False)
class Reference:
    """`distance` and `clip` are its images' features [N, D]: None for statistics, which have no images."""

    name: str
    kind: str  # "folder", "statistics", "run"
    gaussian: Gaussian
    distance: Tensor | None = None
    clip: Tensor | None = None
    run: EvaluationRun | None = None

    @property
    def count(self) -> int | None:
        return None if self.distance is None else len(self.distance)


def kind(path: Path) -> str:
    """The kind of reference at this path. Raises `UnusableReference`."""
    if (path / "run.json").is_file():
        return "run"
    if path.is_dir():
        return "folder"
    if path.suffix.lower() == ".npz" and path.is_file():
        return "statistics"
    raise UnusableReference(f"{path}: is neither a run, nor a folder of pictures, nor an .npz with mu and sigma")


def look(path: Path, networks: ScoringNetworks, store: Path, tick: Tick) -> Reference:
    """Compute a reference's features; those of a run are cached in the run's folder, those of a folder in `store`.

    Raises `UnusableReference`, `run.RunError`, `fid.StatisticsError` and `pixels.PictureError`, naming the file.
    """
    name, what = path.resolve().name, kind(path)
    if what == "statistics":
        return Reference(name, what, fid.read(path, networks.distance.width))
    if what == "run":
        run = EvaluationRun.read(path)
        distance, clip = of_run(run, networks, tick)
        return Reference(name, what, fid.gaussian(distance), distance, clip, run)
    files = pixels.listing(path)
    if len(files) < 2:
        raise UnusableReference(f"{path}: holds one picture; a distribution needs at least 2")
    digest = features.digest_of(files)

    def taken(extractor: Extractor) -> Tensor:
        kept = store / f"{name}-{digest[:12]}-{extractor.name}"
        return features.of_pictures(files, digest, extractor, kept, tick)

    distance, clip = _both(networks, taken(networks.distance), taken)
    return Reference(name, what, fid.gaussian(distance), distance, clip)


def of_run(run: EvaluationRun, networks: ScoringNetworks, tick: Tick) -> tuple[Tensor, Tensor]:
    """A run's features for distances and for captions, cached in its folder."""
    files, digest = run.files(), run.digest()

    def taken(extractor: Extractor) -> Tensor:
        return features.of_pictures(files, digest, extractor, run.folder / "features" / extractor.name, tick)

    return _both(networks, taken(networks.distance), taken)


def captions_of(run: EvaluationRun, networks: ScoringNetworks) -> Tensor:
    """Features [N, D] of a run's captions, cached in its folder."""
    texts: Sequence[str] = [caption.text for caption in run.captions]
    kept = run.folder / "features" / f"{networks.clip.name}-captions"
    return features.of_captions(texts, networks.clip.read, networks.clip.width, networks.clip.digest, kept)


def _both(networks: ScoringNetworks, distance: Tensor, taken: Callable[[Extractor], Tensor]) -> tuple[Tensor, Tensor]:
    return distance, distance if networks.clip is networks.distance else taken(networks.clip)
