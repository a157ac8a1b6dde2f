"""Enlarges finished pictures by the filter that a job asks for; networks that enlarge them run in the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from contract.image import ImageJob
from workers.handlers import Output
from workers.stages.stage import JobStage


class EnlargingStage(JobStage):
    """Enlarges by a filter."""

    def is_requested(self, job: ImageJob) -> bool:
        upscale = job.picture.upscale
        return upscale is not None and upscale.is_filter

    def after(self, job: ImageJob, outputs: list[Output], stopped: Callable[[], bool]) -> list[Output]:
        return [replace(output, value=output.value.enlarged()) for output in outputs]
