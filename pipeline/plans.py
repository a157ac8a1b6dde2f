"""The tuned plans and gates of a model, in `plans.json` beside it: for each precision, request fields by a plan's name,
and the gates of cascades by their draft models.

`diptych tune` writes the file; workers announce what is for their precision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from contract import tuned
from contract.errors import Invalid
from core.json_files import read_object
from pipeline.checkpoints.folder import ModelError

FILE = "plans.json"
_VERSION = 1
_CASCADES = "cascades"  # by draft model


def read_plans(path: Path, precision: str) -> dict[str, dict[str, Any]]:
    """Read the plans for this precision; none if there is no file. Raises `ModelError` for any other file."""
    return _plans(path, _entry(path, precision).get("plans", {}))


class TunedGate(NamedTuple):
    """A gate, and the digests of the draft model and of the scorer that it was tuned for: it says nothing of others."""

    gate: float
    draft: str
    scorer: str


def read_gates(path: Path, precision: str) -> dict[str, TunedGate]:
    """Read the gates for this precision by their draft models; none if there is no file. Raises `ModelError`."""
    cascades = _entry(path, precision).get(_CASCADES, {})
    try:
        return {
            draft: TunedGate(float(entry["gate"]), str(entry["draft"]), str(entry["scorer_digest"]))
            for draft, entry in cascades.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        words = "must have `gate`, `draft` and `scorer_digest` for each draft"
        raise ModelError(f"{path}: tuned.{precision}.{_CASCADES} {words}") from None


def of_model(folder: Path | None, file: str, precision: str, default_plan: str) -> dict[str, dict[str, Any]]:
    """Return the plans of the model in this folder, or of `file` if that is given.

    Raises `ModelError`, also for `default_plan`, the default plan of requests, where there is no such plan.
    """
    path = _file_of(folder, file)
    plans = {} if path is None else read_plans(path, precision)
    if default_plan:
        try:
            tuned.named(default_plan, plans)
        except Invalid as error:
            raise ModelError(f"{error}; {path or 'the model'} has plans for {precision} only by these names") from error
    return plans


def gates_of_model(folder: Path | None, file: str, precision: str) -> dict[str, TunedGate]:
    """Return the gates of the model in this folder, or of `file` if that is given. Raises `ModelError`."""
    path = _file_of(folder, file)
    return {} if path is None else read_gates(path, precision)


def write(path: Path, precision: str, entry: dict[str, Any]) -> None:
    """Write the plans of this precision; its gates and other precisions stay. `entry` has `plans`, and how they were
    found.

    Raises `ModelError` for a file that is no `plans.json`, and OSError.
    """
    _plans(path, entry["plans"])
    previous = _entry(path, precision)
    _write(path, precision, entry | {name: previous[name] for name in (_CASCADES,) if name in previous})


def write_gate(path: Path, precision: str, draft: str, entry: dict[str, Any]) -> None:
    """Write the `gate` of this draft model, and how it was found; all else stays. Raises as `write`."""
    previous = _entry(path, precision)
    _write(path, precision, previous | {_CASCADES: previous.get(_CASCADES, {}) | {draft: entry}})


def _write(path: Path, precision: str, entry: dict[str, Any]) -> None:
    entries = _tuned(path) | {precision: entry}
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"version": _VERSION, "tuned": entries}, indent=1, allow_nan=False) + "\n", "utf-8")
    partial.replace(path)


def _file_of(folder: Path | None, file: str) -> Path | None:
    """Return the file, by default that in a model's folder. Raises `ModelError` for a file that is not there."""
    if file and not Path(file).expanduser().is_file():
        raise ModelError(f"plans: there is no file {file}")
    return Path(file).expanduser() if file else None if folder is None else folder / FILE


def _entry(path: Path, precision: str) -> dict[str, Any]:
    """Read what is for this precision."""
    entry = _tuned(path).get(precision, {})
    if not isinstance(entry, dict):
        raise ModelError(f"{path}: tuned.{precision} must be an object")
    return entry


def _tuned(path: Path) -> dict[str, Any]:
    """Read the entry of each precision in the file."""
    if not path.exists():
        return {}
    document = read_object(path, ModelError)
    if document.get("version") != _VERSION or not isinstance(document.get("tuned"), dict):
        raise ModelError(f"{path}: is no {FILE} of version {_VERSION}")
    return dict(document["tuned"])


def _plans(path: Path, data: object) -> dict[str, dict[str, Any]]:
    try:
        return tuned.read(data)
    except Invalid as error:
        raise ModelError(f"{path}: {error}") from error
