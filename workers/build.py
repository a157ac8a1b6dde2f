"""Puts an engine together from settings: device, model, runners.

The one place that knows every runner. Knows nothing of queues and of Celery.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from core.batching.engine import Engine
from core.batching.runner import Lane
from core.config import STAND_IN_MODEL, Settings
from pipeline.load import Model, load
from pipeline.runner import ImageRunner

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Works:
    """An engine and what it drives. Closing it ends both."""

    settings: Settings
    engine: Engine
    images: ImageRunner
    lane: Lane

    def close(self) -> None:
        self.engine.close()
        self.images.close()
        self.lane.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_model(settings: Settings) -> Model:
    """The settings' model on the settings' device. Raises `pipeline.load.ModelError`."""
    import torch

    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if settings.model_name == STAND_IN_MODEL:
        log.warning("no model is named and models/emoji-xl is not there: %s draws noise", STAND_IN_MODEL)
    return load(settings.model_name, precision=settings.precision, device=device, variant=settings.variant)


def build(
    settings: Settings,
    *,
    lane: Lane | None = None,
    measure_s: float = 0.0,
    say: Callable[[str], None] = lambda text: None,
) -> Works:
    """Load the model and start an engine. `measure_s` is how long cost curves may be measured beforehand."""
    lane = lane or Lane("device")
    say(f"loading {settings.model_name}")
    model = lane.call(lambda: load_model(settings))
    images = ImageRunner(
        model,
        lane=lane,
        max_requests=settings.max_requests,
        max_rows=settings.max_rows,
        deterministic_rows=settings.deterministic_rows,
        compiled=settings.compile,
        cache=settings.compiled_code,
        patience_s=settings.image_objective_s,
    )
    if measure_s or settings.compile:
        say("measuring what forwards cost")
        images.prepare(measure_s=measure_s)
    return Works(settings, Engine([images], starvation_s=settings.starvation_s), images, lane)
