"""The tuned plans of a model, in `plans.json` beside it: for each precision, request fields by a plan's name.

`diptych tune` writes the file; workers announce what is for their precision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from contract import tuned
from contract.errors import Invalid
from pipeline.checkpoints.folder import ModelError

FILE = "plans.json"
_VERSION = 1


def read_plans(path: Path, precision: str) -> dict[str, dict[str, Any]]:
    """Read the plans for this precision; none if there is no file. Raises `ModelError` for any other file."""
    entry = _tuned(path).get(precision, {})
    if not isinstance(entry, dict):
        raise ModelError(f"{path}: tuned.{precision} must be an object")
    return _plans(path, entry.get("plans", {}))


def of_model(folder: Path | None, file: str, precision: str, default_plan: str) -> dict[str, dict[str, Any]]:
    """Return the plans of the model in this folder, or of `file` if that is given.

    Raises `ModelError`, also for `default_plan`, the default plan of requests, where there is no such plan.
    """
    if file and not Path(file).expanduser().is_file():
        raise ModelError(f"plans: there is no file {file}")
    path = Path(file).expanduser() if file else None if folder is None else folder / FILE
    plans = {} if path is None else read_plans(path, precision)
    if default_plan:
        try:
            tuned.named(default_plan, plans)
        except Invalid as error:
            raise ModelError(f"{error}; {path or 'the model'} has plans for {precision} only by these names") from error
    return plans


def write(path: Path, precision: str, entry: dict[str, Any]) -> None:
    """Write the entry of this precision; other precisions stay. `entry` has `plans`, and how they were found.

    Raises `ModelError` for a file that is no `plans.json`, and OSError.
    """
    entries = _tuned(path) | {precision: entry}
    _plans(path, entry["plans"])
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"version": _VERSION, "tuned": entries}, indent=1, allow_nan=False) + "\n", "utf-8")
    partial.replace(path)


def _tuned(path: Path) -> dict[str, Any]:
    """Read the entry of each precision in the file."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    if (
        not isinstance(document, dict)
        or document.get("version") != _VERSION
        or not isinstance(document.get("tuned"), dict)
    ):
        raise ModelError(f"{path}: is no {FILE} of version {_VERSION}")
    return dict(document["tuned"])


def _plans(path: Path, data: object) -> dict[str, dict[str, Any]]:
    try:
        return tuned.read(data)
    except Invalid as error:
        raise ModelError(f"{path}: {error}") from error
