"""Puts an engine together from settings: device, model, runners.

The one place that knows every runner. Knows nothing of queues and of Celery.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from core.batching.engine import Engine
from core.batching.runner import Lane
from core.config import STAND_IN_MODEL, Settings
from pipeline.folder import ModelError
from pipeline.load import Model, load
from pipeline.runner import ImageRunner
from workers.panels import ImagePanel, Panel

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Works:
    """An engine and what it drives. Closing it ends both."""

    settings: Settings
    engine: Engine
    images: ImageRunner
    lane: Lane

    @property
    def panels(self) -> dict[str, Panel]:
        """What a worker serves with it, by queue."""
        return {self.images.modality: ImagePanel(self.images)}

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
    return load(
        settings.model_name,
        precision=settings.precision,
        device=device,
        variant=settings.variant,
        unet=Path(settings.unet) if settings.unet else None,
    )


def kernels(settings: Settings, model: Model) -> ctypes.CDLL | None:
    """The CPU kernels for this model; None, said in the log, where torch's are to be used.

    Raises `ModelError` for INT8 without them: emulated it would be slower than fp32.
    """
    from core.quant.kernels.cpu.library import Unavailable, library
    from unet_opt.program import check

    if model.device.type != "cpu" or not (settings.kernels or model.precision == "int8"):
        return None
    if model.precision not in ("fp32", "int8"):
        log.info("%s runs on torch: the CPU kernels know fp32 and int8", model.precision)
        return None
    try:
        check(model.unet)
        return library(settings.compiled_kernels)
    except (Unavailable, ValueError) as error:
        if model.precision == "int8":
            raise ModelError(f"int8 does not run here: {error}; take fp32") from error
        log.warning("pictures are drawn by torch's own kernels: %s", error)
        return None


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
        kernels=lane.call(lambda: kernels(settings, model)),
    )
    if measure_s or settings.compile:
        say("measuring what forwards cost")
        images.prepare(measure_s=measure_s)
    return Works(settings, Engine([images], starvation_s=settings.starvation_s), images, lane)
