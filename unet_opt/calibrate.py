"""Collects what flows into a UNet's layers over the first steps of a list of prompts, resumably, and into a decoder's.

The first 8 of 20 steps, as NVIDIA's MLPerf submissions do. Knows batches and files; leaves drawing to its caller, and
knows nothing of prompts.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torch import nn

from core.quant.statistics import Statistics, StatisticsError

STEPS = 8
BATCH = 8

Around = Callable[[int], AbstractContextManager[None]]
Run = Callable[[Sequence[str], Around], None]
"""Runs a batch of prompts through the model, entering the given context around each forward of a step."""


def calibrate(
    model: nn.Module,
    layers: Sequence[str],
    prompts: Sequence[str],
    run: Run,
    *,
    digest: str,
    checkpoint: Path | None = None,
    tell: Callable[[int], None] = lambda count: None,
) -> Statistics:
    """Statistics of `layers` over all prompts, `BATCH` at a time.

    With `checkpoint` what was collected is kept there after each batch, and a run that finds it goes on from there.
    `tell` is given the number of prompts done. Raises `StatisticsError` without prompts, for a checkpoint that cannot
    be read or written, and for one of another model, other layers or other prompts.
    """
    if not prompts:
        raise StatisticsError("calibration needs prompts, and there are none")
    statistics = _resume(checkpoint, digest, layers, prompts)
    done = min(statistics.batches, default=0)
    for start in range(done * BATCH, len(prompts), BATCH):
        tell(start)
        batch = prompts[start : start + BATCH]
        run(batch, lambda step: statistics.observe(model, layers, step))
        statistics.data = _digest(prompts[: start + BATCH])
        if checkpoint is not None:
            statistics.save(checkpoint)
    tell(len(prompts))
    return statistics


def _digest(prompts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(prompts).encode("utf-8", "surrogatepass")).hexdigest()


def _resume(checkpoint: Path | None, digest: str, layers: Sequence[str], prompts: Sequence[str]) -> Statistics:
    if checkpoint is None or not checkpoint.is_file():
        return Statistics(digest)
    found = Statistics.load(checkpoint)
    if found.model != digest or set(found.largest) != set(layers):
        raise StatisticsError(f"{checkpoint.name}: was begun with another model or recipe; remove it to begin anew")
    if len(set(found.batches)) > 1:  # stopped within a batch of several steps: never saved so by us
        with contextlib.suppress(OSError):
            checkpoint.unlink()
        return Statistics(digest)
    if found.data != _digest(prompts[: min(found.batches) * BATCH]):
        raise StatisticsError(f"{checkpoint.name}: was begun with other prompts; remove it to begin anew")
    return found
