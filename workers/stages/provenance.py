"""Marks finished pictures for machines as generated (`pipeline/pixels/provenance.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from contract.image import ImageJob
from workers.handlers import Output
from workers.stages.stage import JobStage

if TYPE_CHECKING:
    from core.config import Settings
    from pipeline.pixels.provenance import Provenance


class ProvenanceStage(JobStage):
    """Has the files of all pictures marked, if the settings say so."""

    def __init__(self, provenance: Provenance | None = None) -> None:
        self._provenance = provenance

    @classmethod
    def open(cls, settings: Settings, device: str) -> Self:
        from pipeline.pixels import provenance

        return cls(provenance.of(settings))

    def is_requested(self, job: ImageJob) -> bool:
        return self._provenance is not None

    def after(self, job: ImageJob, outputs: list[Output], stopped: Callable[[], bool]) -> list[Output]:
        return [replace(output, value=replace(output.value, provenance=self._provenance)) for output in outputs]
