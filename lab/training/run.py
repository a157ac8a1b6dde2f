"""Shared by all training commands: options, device, and folder of checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lab.training import group
from lab.training.shapes import BY_NAME, Shapes
from pipeline.checkpoints.tiny import SDXLShape


@dataclass(frozen=True)
class TrainingRun:
    """One training run: where it reads and writes, how large, how long, on what.

    `minutes` is the whole stage's budget, over all its commands; `until`, in seconds since the epoch, ends this
    command earlier. `iterations` overrides `minutes` and makes the run exactly repeatable. Under `torchrun` each of
    `world` processes trains on its own rows; `batch` is one process's.
    """

    data: Path
    work: Path
    models: Path
    size: int = 128
    shapes: Shapes = BY_NAME["emoji"]
    seed: int = 0
    minutes: float | None = None
    until: float | None = None
    iterations: int | None = None
    batch: int | None = None
    held_out: int = 48
    variants: int = 12
    checkpoint_s: float = 60.0
    compile: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    rank: int = 0
    world: int = 1

    @property
    def picture(self) -> SDXLShape:
        """The picture model's shape, at this run's size."""
        return dataclasses.replace(self.shapes.picture, native=self.size)

    def rate(self, fresh: float, stage: str) -> float:
        """A stage's learning rate: `fresh`, or 0.6 of it for what is trained already and would forget."""
        return 0.6 * fresh if (self.work / "start" / f"{stage}.pt").exists() else fresh

    @property
    def on_gpu(self) -> bool:
        """Return whether the run uses CUDA."""
        return self.device.type == "cuda"

    def folder(self, stage: str) -> Path:
        """The stage's folder under `work`, made when missing."""
        folder = self.work / stage
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Mixed precision where `dtype` is not float32; weights and optimizer stay in float32."""
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            yield

    def compiled(self, module: Any, **options: Any) -> Any:
        """The module, compiled where the run compiles."""
        return torch.compile(module, **options) if self.compile else module


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every stage."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--data", type=Path, required=True, help="folder that holds emoji/ and coco/")
    options.add_argument("--work", type=Path, required=True, help="folder for checkpoints and curves")
    options.add_argument("--models", type=Path, default=Path("models"), help="folder for exported models")
    options.add_argument("--size", type=int, choices=(32, 64, 128), default=128, help="picture side in pixels")
    options.add_argument("--shape", choices=sorted(BY_NAME), default="emoji", help="model family")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--minutes", type=float, help="the stage's whole budget, over all commands")
    options.add_argument("--until", type=float, help="end this command at this time, in seconds since the epoch")
    options.add_argument("--iterations", type=int, help="exact length instead of --minutes")
    options.add_argument("--batch", type=int, help="rows in one step of one process; each stage has its own default")
    options.add_argument("--held-out", type=int, default=48, help="skin-tone variants never trained on")
    options.add_argument("--variants", type=int, default=12, help="wordings drawn for each picture")
    options.add_argument("--checkpoint-s", type=float, default=60.0, help="seconds between checkpoints")
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    options.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="auto: on a GPU")
    options.add_argument("--threads", type=int, help="CPU threads")
    return options


def from_options(arguments: argparse.Namespace) -> TrainingRun:
    """Build the run, and set what is global in torch: threads, and TF32 on a GPU."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    name = arguments.device if arguments.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    rank, world = group.join(name == "cuda")
    device = torch.device(name, rank) if name == "cuda" and world > 1 else torch.device(name)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    # On a CPU bf16 pays only where the processor multiplies it; elsewhere it is emulated and slower.
    native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    dtype = {"float32": False, "bfloat16": True, "auto": native}[arguments.dtype]
    return TrainingRun(
        **{name: getattr(arguments, name) for name in _PLAIN},
        shapes=BY_NAME[arguments.shape],
        compile=arguments.compile == "on" or (arguments.compile == "auto" and device.type == "cuda"),
        device=device,
        dtype=torch.bfloat16 if dtype else torch.float32,
        rank=rank,
        world=world,
    )


_PLAIN = (
    "data", "work", "models", "size", "seed", "minutes", "until", "iterations", "batch", "held_out", "variants",
    "checkpoint_s",
)  # fmt: skip


def command(
    description: str | None,
    train: Callable[[TrainingRun], object],
    export: Callable[[TrainingRun], object] | None = None,
) -> None:
    """The command of a stage: it trains, or with `--export`, where it exports itself, writes what is trained."""
    options = parser(description or "")
    if export is not None:
        options.add_argument("--export", action="store_true", help="write what is trained, and train no further")
    arguments = options.parse_args()
    outcome = (export if export is not None and arguments.export else train)(from_options(arguments))
    if outcome is not None:
        print(outcome)
