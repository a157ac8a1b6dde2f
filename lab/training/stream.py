"""Streams scenes and single emoji to the stages: composed and read by worker processes, drawn on the device."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lab.scenes import emoji, subjects
from lab.scenes.emoji import PictureRow
from lab.training import captions, scenes, tokens
from lab.training.render import PackedScenes, Renderer, pack
from lab.training.run import TrainingRun
from lab.training.scenes import Composer, Scene
from pipeline.checkpoints.tiny import FACTOR
from pipeline.sizes import sizes

SINGLES = 0.30  # share of single emoji in their own words, so that the model still draws what it is named after
NATIVE, LARGER = 0.68, 0.20
"""Shares of batches at the native size, and at half as much again; the others share the rest."""


@dataclass(frozen=True)
class SceneBatch:
    """`ids` and `foils`, END-padded [B, L]; a missing foil is the empty caption. `label` [B] is equal where rows
    show one emoji.
    """

    ids: Tensor
    foils: Tensor
    label: Tensor
    scenes: PackedScenes


@dataclass(frozen=True)
class World:
    """The parts that scenes are made from: rows, their pictures uint8 [N, 4, S, S], a composer, and single emoji's
    wordings.
    """

    rows: list[PictureRow]
    images: Tensor
    composer: Composer
    wordings: list[list[str]]
    odds: list[float]

    @classmethod
    def read(cls, run: TrainingRun) -> World:
        """Read the run's data; wordings are those that `run.variants` and `run.seed` draw, and no others."""
        rows = emoji.read_rows(run.data)
        images = emoji.read_pictures(run.data, rows, run.size)
        composer = Composer(subjects.choose(rows, images), run.seed)
        wordings = list(captions.wordings(rows, run.variants, run.seed))
        return cls(rows, images, composer, wordings, list(accumulate(captions.odds(rows, run.held_out))))

    def scene(self, index: int, size: tuple[int, int]) -> tuple[Scene, int]:
        """The scene of this index, and the row of a single emoji or -1."""
        draw = random.Random(f"stream {self.composer.seed} {index}")
        if draw.random() >= SINGLES:
            return self.composer.compose(index, size), -1
        row = draw.choices(range(len(self.rows)), cum_weights=self.odds)[0]
        colour = draw.choice(captions.COLOUR_NAMES) if draw.random() < 0.5 else ""
        return scenes.single_emoji(row, draw.choice(self.wordings[row]), colour, draw, size), row


def buckets(run: TrainingRun) -> dict[tuple[int, int], float]:
    """Sizes (width, height) that training draws, and their shares: all that the model offers, and one larger."""
    multiple = FACTOR * 2 ** (len(run.picture.channels) - 1)
    native, larger = (run.size, run.size), (run.size * 3 // 2,) * 2
    by_size = {native: NATIVE}
    if larger[0] % multiple == 0:
        by_size[larger] = LARGER
    other_sizes = [size for size in sizes(run.size, multiple) if size != native]
    by_size |= {size: (1 - NATIVE - LARGER) / len(other_sizes) for size in other_sizes}
    return by_size


class _Batches(Dataset[dict[str, Any]]):
    """Maps an iteration to its batch: nothing but the iteration, and which process asks, decides what is in it.

    All processes of a run draw one size, so that none waits for another's larger pictures.
    """

    def __init__(
        self, world: World, tokenizer: Any, rows: int, shares: dict[tuple[int, int], float], process: tuple[int, int]
    ) -> None:
        self._world, self._tokenizer, self._rows, self._shares = world, tokenizer, rows, shares
        self._rank, self._processes = process
        self._native = next(iter(shares))

    def __getitem__(self, iteration: int) -> dict[str, Any]:
        draw = random.Random(f"bucket {self._world.composer.seed} {iteration}")
        size = draw.choices(list(self._shares), list(self._shares.values()))[0]
        area = size[0] * size[1] / (self._native[0] * self._native[1])
        rows = max(1, round(self._rows / area)) if area > 1.5 else self._rows
        first = (iteration * self._processes + self._rank) * self._rows
        samples = [self._world.scene(first + number, size) for number in range(rows)]
        packed = pack([scene for scene, _ in samples])
        ids = tokens.encode(self._tokenizer, [scene.caption for scene, _ in samples])
        foils = tokens.encode(self._tokenizer, [scene.foil or "" for scene, _ in samples])
        label = torch.tensor([row if row >= 0 else -1 - number for number, (_, row) in enumerate(samples)])
        parts = (packed.layers, packed.backdrops, packed.flags, packed.time_ids)
        return {"ids": ids, "foils": foils, "label": label, "parts": parts, "size": size}


def _begin_worker(_: int) -> None:
    # A tokenizer's threads do not survive a fork: with them its first call in a worker would never return.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class SceneStream:
    """Batches in the order of iterations, beginning anywhere. `native` keeps to the native size."""

    def __init__(self, run: TrainingRun, rows: int, *, native: bool = False, workers: int | None = None) -> None:
        self.world = World.read(run)
        self.renderer = Renderer(self.world.images, run.device)
        shares = buckets(run)
        if native:
            shares = {(run.size, run.size): 1.0}
        self._run = run
        process = (run.rank, run.world)
        self._source = _Batches(self.world, tokens.clip_tokenizer(run), rows, shares, process)
        spare = min(12, max(1, (os.cpu_count() or 1) // run.world - 4)) if run.on_gpu else 0
        self._workers = spare if workers is None else workers
        self._next = -1
        self._batches: Iterator[dict[str, Any]] = iter(())

    def at(self, iteration: int) -> SceneBatch:
        """The batch of an iteration, on the device; fast where iterations follow one another."""
        if iteration != self._next:
            self._batches = iter(())  # earlier worker processes end before others are forked
            self._batches = self._from(iteration)
        batch = next(self._batches)
        self._next = iteration + 1
        device = self._run.device
        ids, foils, label = (batch[key].to(device, non_blocking=True) for key in ("ids", "foils", "label"))
        layers, backdrops, flags, times = batch["parts"]
        return SceneBatch(ids, foils, label, PackedScenes(layers, backdrops, flags, times, tuple(batch["size"])))

    def draw(self, batch: SceneBatch) -> Tensor:
        """The batch's pixels [B, 3, H, W] in -1..1."""
        return self.renderer.draw(batch.scenes)

    def _from(self, iteration: int) -> Iterator[dict[str, Any]]:
        workers = self._workers
        more: dict[str, Any] = {}
        if workers:
            more = {"prefetch_factor": 4, "multiprocessing_context": "fork", "worker_init_fn": _begin_worker}
        order: Any = range(iteration, 2**40)
        return iter(
            DataLoader(
                self._source, batch_size=None, sampler=order, num_workers=workers, pin_memory=self._run.on_gpu, **more
            )
        )


class PerSize:
    """A module that is compiled for the native size and runs as it is at others: compiling takes minutes a size."""

    def __init__(self, run: TrainingRun, module: nn.Module) -> None:
        self._native = (run.size, run.size)
        self._plain: Any = module
        self._fast: Any = run.compiled(module, dynamic=False)

    def at(self, size: tuple[int, int]) -> Any:
        """The callable for pictures of `size`."""
        return self._fast if size == self._native else self._plain
