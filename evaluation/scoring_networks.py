"""Selects the feature networks, and names the figures after them: `emoji-clip-fid` is not an Inception FID."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from evaluation.clip import EMBEDDED, OPENAI, Clip
from evaluation.features import Extractor
from evaluation.inception import Inception, WeightsError
from evaluation.judges import Judge
from evaluation.lpips import ClipLayers, Lpips

EMOJI, MLPERF = "emoji-clip", "mlperf"


class ScoringNetworks(NamedTuple):
    """The networks for scores: `distance` is used by FID and KID, `clip` by CMMD, the caption score and `paired`, the
    feature distance of two images; `layers`, where the clip is one, compares them layer by layer. LPIPS and further
    judges have weights of their own, where they are given.
    """

    name: str
    distance: Extractor
    clip: Clip
    fid: str
    kid: str
    cmmd: str
    score: str
    paired: str
    lpips: Lpips | None = None
    layers: ClipLayers | None = None
    judges: tuple[Judge, ...] = ()


def embedded(folder: Path = EMBEDDED, *, device: str = "cpu") -> ScoringNetworks:
    """A CLIP folder for both, such as the embedded emoji-clip. Raises `inception.WeightsError`."""
    if folder == EMBEDDED and not (folder / "config.json").is_file():
        raise WeightsError(f"{EMOJI} is not installed: there is no {folder}; --lens takes mlperf or a CLIP folder")
    clip = ClipLayers(folder, device=device)
    fid, kid, cmmd, score, paired = (f"{clip.name}-{figure}" for figure in ("fid", "kid", "cmmd", "score", "distance"))
    return ScoringNetworks(clip.name, clip, clip, fid, kid, cmmd, score, paired, layers=clip)


def mlperf(inception: Path | None = None, clip: Path | None = None, *, device: str = "cpu") -> ScoringNetworks:
    """FID-Inception and OpenAI's ViT-B/32, as MLPerf's text-to-image test defines `fid` and `clip-score`.

    Files of None are downloaded. CMMD's published figures use another CLIP (ViT-L/14, 336 pixels): ours is named after
    its model. Raises `inception.WeightsError`.
    """
    return ScoringNetworks(
        MLPERF, Inception(inception, device=device), Clip(clip or OPENAI, device=device),
        "fid", "kid", "vit-b-32-cmmd", "clip-score", "clip-distance",
    )  # fmt: skip
