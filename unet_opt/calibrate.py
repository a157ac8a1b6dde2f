"""Collects input ranges of a UNet's and a VAE decoder's layers over a list of prompts, resumably.

`pipeline.quantization.calibration` generates the images.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.ops.cpu import CpuLowering
from core.ops.packed import PackedLayer
from core.quant.samples import Samples
from core.quant.statistics import Statistics, StatisticsError


@dataclass(frozen=True)
class CalibrationSettings:
    """The settings of runs in which ranges are collected: 20 steps with guidance 8, of which the UNet's first 8 count.

    That is the published INT8 recipe for SDXL (NVIDIA's MLPerf Inference v4.0 submission), which takes the largest
    magnitudes over 32 to 500 prompts. The decoder reads the finished latents. There is no negative prompt: keys and
    values of the text are not quantized, so no quantized layer reads what is particular about one.
    """

    steps: int = 20
    watched_steps: int = 8
    guidance: float = 8.0
    batch: int = 8  # prompts drawn together


Observe = Callable[[Statistics, Sequence[str], int], AbstractContextManager[None]]
"""Adds what these layers read while the context is open to the statistics, as one batch of a step."""
Around = Callable[[str, int], AbstractContextManager[None]]
"""To be entered around a forward of this part in this step."""
Run = Callable[[Sequence[str], Around], None]
"""Draws a batch of prompts, entering the given context around each forward that is to be observed."""


@dataclass(frozen=True)
class CalibrationPart:
    """The layers to observe, how, and the file of their statistics so far. Rows of `sampled` layers are kept."""

    layers: Sequence[str]
    observe: Observe
    checkpoint: Path | None = None
    sampled: Sequence[str] = ()

    def begin(self, digest: str) -> Statistics:
        """Return empty statistics of a model's weights with this digest."""
        return Statistics(digest, samples=Samples(sorted(self.sampled)) if self.sampled else None)


def calibrate(
    parts: Mapping[str, CalibrationPart],
    prompts: Sequence[str],
    run: Run,
    *,
    digest: str,
    settings: CalibrationSettings | None = None,
    tell: Callable[[int], None] = lambda count: None,
) -> dict[str, Statistics]:
    """Collect statistics of each part's layers over all prompts, `settings.batch` at a time.

    With checkpoints the statistics are saved after each batch, and a later run resumes from them. `tell` receives the
    number of prompts done. Raises `StatisticsError` without prompts, for a checkpoint that cannot be read or written,
    and for one of another model, other layers, other settings or other prompts.
    """
    settings = settings or CalibrationSettings()
    if not prompts:
        raise StatisticsError("calibration needs prompts, and there are none")
    collected = {name: _resume(part, digest, prompts, settings) for name, part in parts.items()}
    done = {name: min(statistics.batches, default=0) for name, statistics in collected.items()}
    for batch, start in enumerate(range(0, len(prompts), settings.batch)):
        waiting = {name for name in parts if done[name] <= batch}  # a part may be ahead: checkpoints are two files
        if not waiting:
            continue
        tell(start)

        def around(name: str, step: int, waiting: set[str] = waiting) -> AbstractContextManager[None]:
            if name not in waiting:
                return contextlib.nullcontext()
            return parts[name].observe(collected[name], parts[name].layers, step)

        end = start + settings.batch
        run(prompts[start:end], around)
        for name in waiting:
            collected[name].data = _digest(prompts[:end], settings)
            checkpoint = parts[name].checkpoint
            if checkpoint is not None:
                collected[name].save(checkpoint)
    tell(len(prompts))
    return collected


def observe_programs(programs: CpuLowering) -> Observe:
    """Return an observer of CPU programs, as `Statistics.observe` of modules."""

    @contextmanager
    def observe(statistics: Statistics, layers: Sequence[str], step: int) -> Iterator[None]:
        layer_names = {*layers}
        with statistics.batch(step) as see:

            def watch(layer: PackedLayer, x: Tensor) -> None:
                if not layer_names.isdisjoint(layer.names):
                    with _one_thread():
                        see(layer.names, x)

            programs.watch = watch
            try:
                yield
            finally:
                programs.watch = None

    return observe


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: otherwise its threads compete with the kernels' waiting ones, and both take twice as
    long.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def observe_modules(model: Any) -> Observe:
    """Return an observer of torch's modules."""
    return lambda statistics, layers, step: statistics.observe(model, layers, step)


def _digest(prompts: Sequence[str], settings: CalibrationSettings) -> str:
    text = "\0".join([*prompts, str(sorted(asdict(settings).items()))])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _resume(part: CalibrationPart, digest: str, prompts: Sequence[str], settings: CalibrationSettings) -> Statistics:
    checkpoint = part.checkpoint
    if checkpoint is None or not checkpoint.is_file():
        return part.begin(digest)
    statistics = Statistics.load(checkpoint)
    samples, expected = statistics.samples, part.begin(digest).samples
    same = (samples and (samples.count, [*samples.layers])) == (expected and (expected.count, [*expected.layers]))
    if statistics.model != digest or set(statistics.largest) != set(part.layers) or not same:
        raise StatisticsError(f"{checkpoint.name}: was begun with another model or recipe; remove it to begin anew")
    if len(set(statistics.batches)) > 1:  # interrupted within a batch of several steps: not a checkpoint of ours
        with contextlib.suppress(OSError):
            checkpoint.unlink()
        return part.begin(digest)
    if statistics.data != _digest(prompts[: min(statistics.batches) * settings.batch], settings):
        raise StatisticsError(f"{checkpoint.name}: was begun with other prompts or settings; remove it to begin anew")
    return statistics
