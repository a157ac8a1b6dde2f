"""Measures how much longer steps of others take while a large LoRA is read: one engine, with a load and without.

The UNet has SDXL's widths and few transformer blocks, and random weights: in INT8 on a CPU's kernels, in the device's
own precision elsewhere. A file as large as is asked for follows from its rank.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import loras
from benchmarks.harness import models, record
from contract.image import ImageParameters
from core.batching.engine import Engine
from core.batching.request import Request
from core.batching.runner import Lane
from core.config import Settings
from pipeline.backends.phases import DEEP
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel, load
from pipeline.extensions.adapters import LoraFolder
from pipeline.extensions.lora_extension import LoraExtension
from pipeline.runner import ImageRunner
from workers import backends
from workers.build import device_of

WIDTHS = {**models.WIDTHS, **models.TINY_TEXT, "transformer_layers_per_block": (1, 1, 1)}
_NAME = "large"
_FIGURES: dict[str, Callable[[list[float]], float]] = {
    "median": statistics.median, "mean": statistics.fmean, "p95": lambda times: sorted(times)[int(0.95 * len(times))],
    "worst": max,
}  # fmt: skip


class LoraFile(NamedTuple):
    """A file of `mib` MiB in 16 bits, read `rounds` times, each after `steps` steps without; of images of `side`."""

    mib: int = 200
    rounds: int = 3
    steps: int = 100
    side: int = 128


def run(
    settings: Settings, options: LoraFile, *, widths: Mapping[str, Any] = WIDTHS, results: Path | None = None
) -> dict[str, Any]:
    """Time steps of one guided request after another. Raises `record.BenchError` for what cannot be measured."""
    if min(options) < 1:
        raise record.BenchError("--mib, --rounds, --steps and --side must be at least 1")
    with record.alone(), tempfile.TemporaryDirectory() as folder:
        lane = Lane("device")
        try:
            model = lane.call(lambda: _model(settings, widths))
            size_bytes, rank = _write(Path(folder), model, options.mib)
            plain, loading, loads = _measure(settings, model, lane, Path(folder), options)
            threads = lane.call(torch.get_num_threads)
        finally:
            lane.close()
    figures = {
        f"{name}_{figure}_ms": 1000 * of(times)
        for name, times in (("plain", plain), ("loading", loading))
        for figure, of in _FIGURES.items()
    }
    ratios = {f"{figure}_ratio": figures[f"loading_{figure}_ms"] / figures[f"plain_{figure}_ms"] for figure in _FIGURES}
    rows = [
        (label, *(f"{figures[f'{name}_{figure}_ms']:.1f}" for figure in _FIGURES), len(times))
        for label, name, times in (("without a load", "plain", plain), ("while it is read", "loading", loading))
    ]
    title = f"{models.SDXL} in {model.precision}: a LoRA of {size_bytes / 1e6:.0f} MB, read in {max(loads):.1f} s"
    last = ("ratio", *(f"{ratio:.3f}" for ratio in ratios.values()), None)
    record.table(title, ("a step, ms", *_FIGURES, "steps"), [*rows, last])
    result = {
        **figures, **ratios, **options._asdict(), "size_bytes": size_bytes, "rank": rank, "loads_s": loads,
        "plain_steps": len(plain), "loading_steps": len(loading), "precision": model.precision, "threads": threads,
        "device": str(model.device), "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }  # fmt: skip
    return record.publish("lora-load", result, results)


def _model(settings: Settings, widths: Mapping[str, Any]) -> ImageModel:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = device_of(settings)
    model = load(tiny.TINY, device=device, precision="fp32" if device == "cpu" else "bf16")
    if device == "cpu":
        return replace(model.with_parts(unet=models.random_unet(widths, torch.device(device))), precision="int8")
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(sample_size=16, in_channels=4, out_channels=4, layers_per_block=2, **widths)
    return model.with_parts(unet=unet.eval().requires_grad_(False).to(model.device, model.dtype))


def _write(folder: Path, model: ImageModel, mib: int) -> tuple[int, int]:
    """Write the file; returns its bytes and its rank."""
    from safetensors.torch import save_file

    def tensors(rank: int) -> dict[str, torch.Tensor]:
        layers = loras.factors(model.denoiser, loras.LoraStep(rank=rank), seed=0)
        sides = ((name, side) for name, factors in layers.items() for side in (("A", factors.down), ("B", factors.up)))
        return {f"unet.{name}.lora_{side}.weight": factor.half().contiguous() for name, (side, factor) in sides}

    rank = max(1, mib * 2**20 // sum(tensor.nbytes for tensor in tensors(1).values()))
    path = folder / f"{_NAME}.safetensors"
    save_file(tensors(rank), path)
    return path.stat().st_size, rank


def _measure(
    settings: Settings, model: ImageModel, lane: Lane, folder: Path, options: LoraFile
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of steps without a load and beside one, and of the loads."""
    name, reason = lane.call(lambda: backends.select(settings, model))
    backend, _ = lane.call(lambda: backends.make(name, settings, model, release=(), why_torch=reason))
    loras = LoraFolder(folder, model, 2**62, backend.pack_adapter if backend.packs else None)
    runner = ImageRunner(backend, [LoraExtension(model, backend, loras)], lane=lane)
    ended: list[tuple[float, bool]] = []  # when an iteration did, and whether it was a step

    def on_tick(tick: Any) -> None:
        ended.append((time.perf_counter(), tick.error is None and tick.group.phase == DEEP))

    with Engine([runner], on_tick=on_tick) as engine:
        loads: list[tuple[float, float]] = []
        with _traffic(engine, options.side) as traffic:
            for turn in range(options.rounds + 1):  # what runs first is prepared in the first
                until = len(ended) + options.steps
                while len(ended) < until:
                    if traffic.done():
                        raise record.BenchError(f"requests fail: {traffic.exception()}")
                    time.sleep(0.01)
                begun = time.perf_counter()
                os.utime(folder / f"{_NAME}.safetensors", ns=(turn, turn))  # it has changed: it is read anew
                loras.check(_NAME)
                loads.append((begun, time.perf_counter()))
    runner.close()
    plain, loading = list[float](), list[float]()
    for (start, _), (end, step) in pairwise(ended):
        if step and start > loads[0][1]:
            overlapped = any(begun < end and start < done for begun, done in loads)
            (loading if overlapped else plain).append(end - start)
    return plain, loading, [done - begun for begun, done in loads[1:]]


@contextmanager
def _traffic(engine: Engine, side: int) -> Iterator[Future[None]]:
    """Context: there is always one request under way. The future ends early only if one fails."""
    stop = threading.Event()

    def ask() -> None:
        for number in count():
            if stop.is_set():
                return
            parameters = ImageParameters("a hat", number, side, side, steps=50)
            engine.submit(Request(f"{number}", "image", parameters)).result()

    with ThreadPoolExecutor(1, "traffic") as pool:
        try:
            yield pool.submit(ask)
        finally:
            stop.set()
