"""Further published figures over local weights, behind one interface: distances of sets, and rewards.

Another package adds a figure with an entry point of the group "diptych.judges": its name is the figure's, its object an
`Open`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import torch

from evaluation.clip import Clip
from evaluation.dinov2 import DinoV2
from evaluation.features import Extractor, PairScorer
from evaluation.hpsv3 import HpsV3
from evaluation.image_reward import ImageReward
from evaluation.inception import WeightsError

GROUP = "diptych.judges"


class Kind(StrEnum):
    """The way in which a figure follows from features."""

    FRECHET = "frechet"  # distance of two sets
    CMMD = "cmmd"  # of two sets too
    REWARD = "reward"  # a scaled cosine of each image and its caption, the mean
    PAIR = "pair"  # what a network says of each image and its caption together, the mean


class Judge(NamedTuple):
    """A figure, and the network that it is computed with: a reward's is a `Clip`, a pair's a `PairScorer`."""

    figure: str
    kind: Kind
    network: Extractor | PairScorer
    scale: float = 1.0

    @property
    def extractor(self) -> Extractor:
        """The network of all kinds but pairs."""
        assert not isinstance(self.network, PairScorer)
        return self.network

    @property
    def scorer(self) -> PairScorer:
        """The network of pairs."""
        assert isinstance(self.network, PairScorer)
        return self.network

    @property
    def clip(self) -> Clip:
        """A reward's network, which reads captions too."""
        assert isinstance(self.network, Clip)
        return self.network


def _pickscore(folder: Path, device: str) -> Judge:
    """Kirstain et al. (2023): a CLIP ViT-H/14 trained on people's choices; its logit."""
    clip = Clip(folder, device=device)
    return Judge("pickscore", Kind.REWARD, clip, clip.scale)


def _hpsv3(folder: Path, device: str) -> Judge:
    """Ma et al. (2025): on a GPU where there is one, for 7B parameters take minutes for a picture on a CPU."""
    return Judge("hpsv3", Kind.PAIR, HpsV3(folder, device="cuda" if torch.cuda.is_available() else device))


Open = Callable[[Path, str], Judge]
"""Loads a figure's network from a folder, for a device. Raises `inception.WeightsError`."""
JUDGES: dict[str, Open] = {
    # Stein et al. (2023): ViT-L/14.
    "fd-dinov2": lambda folder, device: Judge("fd-dinov2", Kind.FRECHET, DinoV2(folder, device=device)),
    # Jayasumana et al. (2024): CLIP ViT-L/14 at 336 pixels.
    "cmmd": lambda folder, device: Judge("cmmd", Kind.CMMD, Clip(folder, device=device)),
    "pickscore": _pickscore,
    # Wu et al. (2023): likewise, in transformers' layout; 100 × cosine.
    "hpsv2": lambda folder, device: Judge("hpsv2", Kind.REWARD, Clip(folder, device=device, padded=True), 100.0),
    "imagereward": lambda folder, device: Judge("imagereward", Kind.PAIR, ImageReward(folder, device=device)),
    "hpsv3": _hpsv3,
}


def figures() -> list[str]:
    """Return the names of all figures, those of other packages last."""
    return [*JUDGES, *sorted(entry_points(group=GROUP).names - JUDGES.keys())]


def open_judge(figure: str, folder: Path, *, device: str = "cpu") -> Judge:
    """Load a figure's network from a folder. Raises `inception.WeightsError`, KeyError for an unknown figure."""
    if figure in JUDGES:
        return JUDGES[figure](folder, device)
    added = entry_points(group=GROUP)[figure]
    try:
        load: Open = added.load()
    except Exception as error:  # of another package
        raise WeightsError(f"{figure} ({added.value}) does not load ({type(error).__name__}: {error})") from error
    return load(folder, device)
