"""Further published figures over local weights, behind one interface: FD-DINOv2, CMMD, PickScore and HPSv2."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from evaluation.clip import Clip
from evaluation.dinov2 import DinoV2
from evaluation.features import Extractor


class Kind(StrEnum):
    """How a figure follows from features."""

    FRECHET = "frechet"  # distance of two sets
    CMMD = "cmmd"  # of two sets too
    REWARD = "reward"  # a scaled cosine of each image and its caption, the mean


class Judge(NamedTuple):
    """A figure, and the network that it is computed with. A reward's network is a `Clip`."""

    figure: str
    kind: Kind
    network: Extractor
    scale: float = 1.0

    @property
    def clip(self) -> Clip:
        """A reward's network, which reads captions too."""
        assert isinstance(self.network, Clip)
        return self.network


def _pickscore(folder: Path, device: str) -> Judge:
    """Kirstain et al. (2023): a CLIP ViT-H/14 trained on people's choices; its logit."""
    clip = Clip(folder, device=device)
    return Judge("pickscore", Kind.REWARD, clip, clip.scale)


JUDGES: dict[str, Callable[[Path, str], Judge]] = {
    # Stein et al. (2023): ViT-L/14.
    "fd-dinov2": lambda folder, device: Judge("fd-dinov2", Kind.FRECHET, DinoV2(folder, device=device)),
    # Jayasumana et al. (2024): CLIP ViT-L/14 at 336 pixels.
    "cmmd": lambda folder, device: Judge("cmmd", Kind.CMMD, Clip(folder, device=device)),
    "pickscore": _pickscore,
    # Wu et al. (2023): likewise, in transformers' layout; 100 × cosine.
    "hpsv2": lambda folder, device: Judge("hpsv2", Kind.REWARD, Clip(folder, device=device, padded=True), 100.0),
}


def open_judge(figure: str, folder: Path, *, device: str = "cpu") -> Judge:
    """Load a figure's network from a folder. Raises `inception.WeightsError`, KeyError for an unknown figure."""
    return JUDGES[figure](folder, device)
