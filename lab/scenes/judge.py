"""Judges runs of scenes' captions: the share of images with the right subject, count, colour and place, by group.

Two checks: `checker` matches sprites, and emoji-clip must prefer the caption to captions with one thing wrong. A group
is what ids share before their number, as in `colour_held_out-12`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evaluation import bootstrap, pairs, pixels
from evaluation.bootstrap import Interval
from evaluation.clip import Clip
from evaluation.features import Unscorable
from evaluation.inception import WeightsError
from evaluation.judges import Judge, Kind
from evaluation.lpips import ClipLayers
from evaluation.pixels import Pixels
from evaluation.run import EvaluationRun, RunError
from lab.scenes import emoji, subjects
from lab.scenes.checker import Checker, Sprite, Verdict, summary
from lab.scenes.grammar import CaptionParser, Foils

SIDE = 128  # of sprites, in pixels
_FOILS = 8  # captions with one thing wrong for each caption
_SETTINGS = ("precision", "steps", "guidance_scale")
_CLOSE_DB = 30.0


class SceneJudge:
    """Knows the subjects of a data set. As a scorer of pairs it gives 1 where all is right, else 0."""

    name = "scenes"

    def __init__(self, data: Path, clip: Clip | None = None, *, device: torch.device | str = "cpu") -> None:
        """`data` has `emoji/`. Raises ValueError and OSError, naming the file."""
        rows = emoji.read_rows(data)
        images = emoji.read_pictures(data, rows, SIDE)
        nouns = subjects.choose(rows, images)
        self.checker = Checker({noun.noun: Sprite(images[noun.row], bool(noun.colours)) for noun in nouns}, device)
        self.digest = hashlib.sha256((data / "emoji" / "captions.tsv").read_bytes() + images.numpy().data).hexdigest()
        self._reader, self._foils, self._clip = CaptionParser(nouns), Foils(nouns), clip

    def score(self, picture: Pixels, caption: str) -> float:
        """Return whether all that the caption says is right. Raises `Unscorable`."""
        return float(self.verdict(picture, caption).right)

    def verdict(self, picture: Pixels, caption: str) -> Verdict:
        """Judge a uint8 [H, W, 3] picture. Raises `Unscorable` for a caption of another grammar."""
        try:
            truth = self._reader.read(caption)
        except ValueError as error:
            raise Unscorable(str(error)) from None
        return self.checker.check(torch.tensor(picture).permute(2, 0, 1) / 255, truth)

    def prefers(self, pictures: Sequence[Pixels], captions: Sequence[str]) -> Interval | None:
        """The share of pictures to which their caption is nearer than every foil; None without a CLIP."""
        if self._clip is None:
            return None
        right = 0
        for number, (seen, caption) in enumerate(zip(self._clip.see(pictures), captions, strict=True)):
            foils = self._foils.captions(self._reader.read(caption), _FOILS, random.Random(number))
            right += int((self._clip.read([caption, *foils]) @ seen).argmax() == 0)
        return bootstrap.share(right, len(captions))

    def figures(self, pictures: Sequence[Pixels], captions: Sequence[str]) -> dict[str, Any]:
        """Shares with 95% intervals, and of each picture whether all is `right`. Raises `Unscorable`."""
        verdicts = [self.verdict(*pair) for pair in zip(pictures, captions, strict=True)]
        preferred = self.prefers(pictures, captions)
        clip = {} if preferred is None else {"clip_prefers_caption": preferred}
        return {**summary(verdicts), **clip, "right": [verdict.right for verdict in verdicts]}

    def difference(self, left: Sequence[Pixels], right: Sequence[Pixels]) -> dict[str, Any]:
        """The difference between two pictures of one caption: means with intervals, PSNR in dB."""
        if not left:
            return {"pairs": 0}
        counts = bootstrap.resamples(len(left))
        decibels = [pairs.psnr(*two) for two in zip(left, right, strict=True)]
        values: dict[str, Any] = {
            "psnr_db": decibels,
            "ssim": [pairs.ssim(*two) for two in zip(left, right, strict=True)],
        }
        if isinstance(self._clip, ClipLayers):
            values[self._clip.figure] = self._clip.between(left, right)
        means = {name: bootstrap.mean(torch.as_tensor(part), counts).interval for name, part in values.items()}
        close = bootstrap.share(sum(db < _CLOSE_DB for db in decibels), len(left))
        return {"pairs": len(left), "share_under_30_db": close, **means}

    def run(
        self,
        run: EvaluationRun,
        again: EvaluationRun | None = None,
        true: Path | None = None,
        *,
        count: int | None = None,
    ) -> dict[str, Any]:
        """The figures of a run by group, of the first `count` captions of each.

        `again` has other seeds: `two_seeds` tells how much pictures of one caption differ where both are right; and
        `two_true` the same of the folders `true`/own and `true`/other, which `lab.training.scene_prompts` wrote. Raises
        `RunError`.
        """
        settings = {name: run.settings[name] for name in _SETTINGS if name in run.settings}
        report: dict[str, Any] = {"name": run.name, **settings, "pictures": run.digest()}
        groups = groups_of(run, count)
        report["prompts"] = max(map(len, groups.values()))
        for name, indices in groups.items():
            texts = [run.captions[index].text for index in indices]
            first = _pictures(run, indices)
            try:
                report[name] = self.figures(first, texts)
            except Unscorable as error:
                raise RunError(f"{run.folder}: {error}") from None
            if again is not None:
                second = _pictures(again, indices)
                right = [self.verdict(*pair).right for pair in zip(second, texts, strict=True)]
                both = [n for n, sure in enumerate(right) if sure and report[name]["right"][n]]
                report[name]["two_seeds"] = self.difference([first[n] for n in both], [second[n] for n in both])
            if true is not None:
                files = [f"{run.captions[index].id}.png" for index in indices]
                halves = ([pixels.read(true / half / file) for file in files] for half in ("own", "other"))
                report[name]["two_true"] = self.difference(*halves)
        return report


def open_scenes(folder: Path, device: str) -> Judge:
    """Return the figure that is 1 for an image of all that its caption says, else 0; the folder has `emoji/`.

    Raises `WeightsError`.
    """
    try:
        return Judge(SceneJudge.name, Kind.PAIR, SceneJudge(folder, device=device))
    except (ValueError, OSError) as error:
        raise WeightsError(f"{folder}: has no emoji to check scenes by ({error})") from None


def groups_of(run: EvaluationRun, count: int | None = None) -> Mapping[str, list[int]]:
    """The indices of a run's captions by group, the first `count` of each."""
    groups: dict[str, list[int]] = {}
    for caption in run.captions:
        groups.setdefault(caption.id.rpartition("-")[0] or "scenes", []).append(caption.index)
    return {name: indices[:count] for name, indices in groups.items()}


def _pictures(run: EvaluationRun, indices: Sequence[int]) -> list[Pixels]:
    return [pixels.read(run.pictures / run.records[index].file) for index in indices]
