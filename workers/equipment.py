"""What a worker runs: an engine, and for each queue a panel that turns jobs into the engine's requests.

Imports no torch at module level: it is loaded before torch is, as are the panels.
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
    """The engine configured by the settings, with its panels. Closing it ends the engine."""

    works: Works
    panels: dict[str, Panel]

    @property
    def engine(self) -> Engine:
        return self.works.engine

    def close(self) -> None:
        self.works.close()


def equip(works: Works) -> WorksEquipment:
    """Add a panel for each modality that has a runner."""
    return WorksEquipment(works, panels_of(works))


def panels_of(works: Works) -> dict[str, Panel]:
    """A panel for each runner, by queue."""
    settings = works.settings

    def fetch(key: str) -> bytes:
        return Artifacts(settings.artifacts, settings.storage_s).get(
            key
        )  # opened on first use: most engines serve no edits

    deepcache = plan.parse(settings.deepcache)
    images = ImagePanel(works.images, deepcache, fetch, works.checker, works.decisions)
    panels: dict[str, Panel] = {works.images.modality: images}
    if works.texts is not None:
        panels[works.texts.modality] = TextPanel(works.texts)
    return panels
