"""A backend that runs an image model's phases on torch, unpadded, and counts the forwards of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from core.config import Settings
from pipeline.backends.backend import BatchGroup, ExecutionPlan, ImageBackend, Widths, planned
from pipeline.backends.phases import fixed_rows, on_torch
from pipeline.backends.timing import PhaseCosts
from pipeline.checkpoints.load import ImageModel
from pipeline.fingerprint import KernelIdentity

VERSION = "1.0"
FORWARDS: list[Counter[str]] = []  # by phase, of each backend


class CountedBackend(ImageBackend):
    def __init__(self, model: ImageModel, widths: Widths) -> None:
        self.model = model
        self.forwards: Counter[str] = Counter()
        networks = on_torch(model)
        self.denoiser = networks.denoiser
        self.phases = {phase: self._counted(phase, run) for phase, run in networks.phases.items()}
        self.kernels = KernelIdentity("counted", VERSION)
        self.costs = PhaseCosts()
        self.widths = widths

    def _counted(self, phase: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.forwards[phase] += 1
            return run(*arguments, **options)

        return call

    def plan(self, group: BatchGroup, rows: int, *, live: bool = False) -> ExecutionPlan:
        width = fixed_rows(group.phase, self.widths.deterministic_rows) if group.mode else rows
        return planned(self, group, width, self.phases[group.phase])

    def deterministic_mode(self, size: tuple[int, int], depth: str, decode: str, chunks: int = 1) -> str:
        return "counted"

    def executable(self, mode: str) -> str:
        return "counted"

    def prepare(self, size: tuple[int, int] | None = None, *, measure_s: float = 0.0) -> None:
        """Costs are learnt from requests alone."""


def make(model: ImageModel, widths: Widths, *, settings: Settings, release: Collection[str]) -> CountedBackend:
    backend = CountedBackend(model, widths)
    FORWARDS.append(backend.forwards)
    return backend
