"""All stages around the engine, in the order in which a job goes through them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.stages.cascade import CascadeStage
from workers.stages.checker import CheckerStage
from workers.stages.enlarging import EnlargingStage
from workers.stages.expansion import ExpansionStage
from workers.stages.provenance import ProvenanceStage
from workers.stages.stage import JobStage

if TYPE_CHECKING:
    from core.config import Settings

KINDS: tuple[type[JobStage], ...] = (
    ExpansionStage,
    CascadeStage,
    EnlargingStage,
    CheckerStage,
    ProvenanceStage,
)


def open_all(settings: Settings, device: str) -> tuple[JobStage, ...]:
    """Create all stages as the settings configure them. Raises `ModelError`."""
    return tuple(kind.open(settings, device) for kind in KINDS)
