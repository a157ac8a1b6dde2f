"""Finds the family of a model: a built-in one, or another package's.

A package adds a family with an entry point of the group "diptych.families": its name is the `_class_name` of
model_index.json, its object a `Family`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pipeline.checkpoints.folder import ModelError, first_line, read_json
from pipeline.families import sd15, sdxl, sdxl_refiner, zimage
from pipeline.families.family import Family, Seeded

BUILT_IN = (sdxl_refiner.FAMILY, sdxl.FAMILY, zimage.FAMILY, sd15.FAMILY)
GROUP = "diptych.families"


def read(folder: Path) -> Family:
    """Return the family of the model in this folder, by its model_index.json. Raises `ModelError`."""
    index = read_json(folder / "model_index.json")
    class_name = index.get("_class_name")
    if (family := _built_in(index)) is not None:
        return family
    added = entry_points(group=GROUP)
    if str(class_name) not in added.names:
        supported = ", ".join([family.pipelines[0] for family in BUILT_IN if family.pipelines] + sorted(added.names))
        raise ModelError(f"{folder}/model_index.json: is a {class_name}; this engine runs {supported}")
    (entry, *_) = added.select(name=str(class_name))
    try:
        loaded: Family = entry.load()
    except Exception as error:  # of another package
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(
            f"{folder}/model_index.json: the family {class_name} ({entry.value}) does not load ({reason})"
        ) from error
    return loaded


def native(index: Mapping[str, Any]) -> bool:
    """Return whether a family reads the model with this model_index.json."""
    return _built_in(index) is not None or str(index.get("_class_name")) in entry_points(group=GROUP).names


def _built_in(index: Mapping[str, Any]) -> Family | None:
    for family in BUILT_IN:
        if family.reads(index) if family.reads else index.get("_class_name") in family.pipelines:
            return family
    return None


def seeded(name: str) -> tuple[Family, Seeded] | None:
    """Return the family and the seeded model of this name, if there is one."""
    for family in BUILT_IN:
        seeded_model = family.seeded(name)
        if seeded_model is not None:
            return family, seeded_model
    return None
