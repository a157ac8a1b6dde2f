"""What a worker process drives: an engine, and for each queue a panel that turns its jobs into the engine's requests.

Light to import, as the panels are: it is there before torch is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from contract import plan
from core.artifacts import Artifacts
from core.batching.engine import Engine
from workers.panels import ImagePanel, Panel
from workers.texts import TextPanel

if TYPE_CHECKING:
    from workers.build import Works


class Equipment(Protocol):
    @property
    def engine(self) -> Engine: ...

    @property
    def panels(self) -> Mapping[str, Panel]: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class WorksEquipment:
    """The engine that settings ask for, with its panels. Closing it ends the engine."""

    works: Works
    panels: dict[str, Panel]

    @property
    def engine(self) -> Engine:
        return self.works.engine

    def close(self) -> None:
        self.works.close()


def equip(works: Works) -> WorksEquipment:
    """The works with a panel for each modality that they have a runner for."""
    return WorksEquipment(works, panels_of(works))


def panels_of(works: Works) -> dict[str, Panel]:
    """A panel for each runner, by queue."""
    settings = works.settings

    def fetch(key: str) -> bytes:
        return Artifacts(settings.artifacts, settings.storage_s).get(
            key
        )  # opened when it is needed: most engines see no edit

    deepcache = plan.parse(settings.deepcache)
    images = ImagePanel(works.images, deepcache, fetch, works.checker, works.decisions)
    panels: dict[str, Panel] = {works.images.modality: images}
    if works.texts is not None:
        panels[works.texts.modality] = TextPanel(works.texts)
    return panels
