"""A model's tuned plans, in `plans.json` beside it: for each precision, request fields by a plan's name.

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


def read(path: Path, precision: str) -> dict[str, dict[str, Any]]:
    """The plans for this precision; none if there is no file. Raises `ModelError` for any other file."""
    found = _tuned(path).get(precision, {})
    if not isinstance(found, dict):
        raise ModelError(f"{path}: tuned.{precision} must be an object")
    return _plans(path, found.get("plans", {}))


def of_model(folder: Path | None, given: str, precision: str, usual: str) -> dict[str, dict[str, Any]]:
    """The plans of the model in this folder, or of the file `given`. Raises `ModelError`, also for `usual`, the default
    plan of requests, where there is no such plan.
    """
    if given and not Path(given).expanduser().is_file():
        raise ModelError(f"plans: there is no file {given}")
    path = Path(given).expanduser() if given else None if folder is None else folder / FILE
    found = {} if path is None else read(path, precision)
    if usual:
        try:
            tuned.named(usual, found)
        except Invalid as error:
            raise ModelError(f"{error}; {path or 'the model'} has plans for {precision} only by these names") from error
    return found


def write(path: Path, precision: str, found: dict[str, Any]) -> None:
    """Store what was found for this precision; other precisions stay. `found` has `plans`, and how they were found.

    Raises `ModelError` for a file that is no `plans.json`, and OSError.
    """
    whole = _tuned(path) | {precision: found}
    _plans(path, found["plans"])
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"version": _VERSION, "tuned": whole}, indent=1, allow_nan=False) + "\n", "utf-8")
    partial.replace(path)


def _tuned(path: Path) -> dict[str, Any]:
    """What the file has for each precision."""
    try:
        whole = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    if not isinstance(whole, dict) or whole.get("version") != _VERSION or not isinstance(whole.get("tuned"), dict):
        raise ModelError(f"{path}: is no {FILE} of version {_VERSION}")
    return dict(whole["tuned"])


def _plans(path: Path, data: object) -> dict[str, dict[str, Any]]:
    try:
        return tuned.read(data)
    except Invalid as error:
        raise ModelError(f"{path}: {error}") from error
