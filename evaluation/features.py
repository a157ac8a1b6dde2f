"""Extracts features of a list of images in batches and caches them in a file.

Images are taken in fixed groups and in order: features do not depend on where an earlier process was stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from evaluation import pixels
from evaluation.pixels import PictureError, Pixels
from evaluation.run import write_json

GROUP = 32
_NAMED = 20  # unreadable files, in an error

Tick = Callable[[int, int], None]  # done, total
Look = Callable[[str, int, int], None]  # what, done, total


class Extractor(Protocol):
    """A feature network. `digest` identifies its weights."""

    name: str
    width: int
    digest: str

    def see(self, pictures: Sequence[Pixels], /) -> Tensor:
        """fp32 [N, width]."""
        ...


@runtime_checkable
class PairScorer(Protocol):
    """A network that reads an image together with its caption. `digest` identifies its weights."""

    name: str
    digest: str

    def score(self, picture: Pixels, caption: str, /) -> float:
        """Raises `Unscorable`."""
        ...


class Unscorable(ValueError):
    """An image and a caption that a network cannot read."""


def picture_features(
    files: Sequence[Path], digest: str, extractor: Extractor, store: Path, tick: Tick = lambda done, total: None
) -> Tensor:
    """Features [N, D] of the images, in order, as a view of the file `store`.npy.

    `digest` identifies the images: if it or the extractor has changed, all features are recomputed; if only a part was
    done, the rest. Raises `pixels.PictureError`.
    """

    def take(part: slice) -> Tensor:
        try:
            pictures = [pixels.read(path) for path in files[part]]
        except PictureError:
            raise _unreadable(files[part.start :]) from None
        return extractor.see(pictures)

    return _kept(len(files), extractor.width, f"{digest} {extractor.name} {extractor.digest}", take, store, tick)


def caption_features(
    captions: Sequence[str], reader: Callable[[Sequence[str]], Tensor], width: int, digest: str, store: Path
) -> Tensor:
    """Features [N, D] of captions, in order, cached as those of images."""
    caption_digest = hashlib.sha256("\0".join(captions).encode()).hexdigest()
    return _kept(
        len(captions),
        width,
        f"{caption_digest} {digest}",
        lambda part: reader(captions[part]),
        store,
        lambda done, total: None,
    )


def pair_scores(
    files: Sequence[Path], captions: Sequence[str], digest: str, scorer: PairScorer, store: Path, tick: Tick
) -> Tensor:
    """Scores [N, 1] of images with their captions, in order, cached as features are. Raises `pixels.PictureError`."""

    def score(path: Path, caption: str) -> float:
        try:
            return scorer.score(pixels.read(path), caption)
        except Unscorable as error:
            raise PictureError(f"{path}: {scorer.name} cannot score it ({error})") from None

    def take(part: slice) -> Tensor:
        return torch.tensor([[score(*pair)] for pair in zip(files[part], captions[part], strict=True)])

    caption_digest = hashlib.sha256("\0".join(captions).encode()).hexdigest()
    return _kept(len(files), 1, f"{digest} {caption_digest} {scorer.name} {scorer.digest}", take, store, tick)


def digest_of(files: Sequence[Path]) -> str:
    """A digest of a folder's files: their names, sizes and modification times."""
    hasher = hashlib.sha256()
    for path in files:
        status = path.stat()
        hasher.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return hasher.hexdigest()


def _unreadable(files: Sequence[Path]) -> PictureError:
    """Return the error of these files that names all that are no whole pictures: one pass over a folder is enough."""
    errors = []
    for path in files:
        try:
            pixels.read(path)
        except PictureError as error:
            errors.append((path.name, str(error)))
    others = f"; nor are {', '.join(name for name, _ in errors[1:_NAMED])}" if len(errors) > 1 else ""
    more = f" and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
    return PictureError(f"{errors[0][1]}{others}{more}")


def _kept(count: int, width: int, of: str, take: Callable[[slice], Tensor], store: Path, tick: Tick) -> Tensor:
    data, head = store.with_suffix(".npy"), store.with_suffix(".json")
    store.parent.mkdir(parents=True, exist_ok=True)
    done = _done(head, of) if data.exists() else 0
    shape = (count, width)
    try:
        rows = np.lib.format.open_memmap(data, mode="r+") if done else None
    except (OSError, ValueError):
        rows = None
    if rows is None or rows.shape != shape or rows.dtype != np.float32:
        done = 0
        head.unlink(missing_ok=True)  # first: the header would vouch for overwritten data
        rows = np.lib.format.open_memmap(data, mode="w+", dtype=np.float32, shape=shape)
    for start in range(done, count, GROUP):
        part = slice(start, min(start + GROUP, count))
        rows[part] = take(part).numpy()
        if (start // GROUP) % 8 == 7 or part.stop == count:
            rows.flush()
            write_json(head, {"of": of, "done": part.stop})
        tick(part.stop, count)
    return torch.from_numpy(rows)


def _done(head: Path, of: str) -> int:
    """The number of are computed already, from whole groups."""
    try:
        head_data = json.loads(head.read_text("utf-8"))
        return int(head_data["done"]) if head_data["of"] == of else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
