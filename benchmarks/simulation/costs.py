"""Reads and writes cost tables: measured seconds of an iteration by phase, size and rows, as JSON with their source.

A `CostCurve` interpolates between measured widths, as in the scheduler; there is no extrapolation, so no
forward is wider than the widest measured one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import BenchError
from core.batching.cost import CostCurve

SHIPPED = Path(__file__).resolve().parent.parent / "costs"
ENCODE, DEEP, VAE = "encode", "deep", "vae"
SHALLOW = {"block": "shallow", "resnet": "shallow-resnet"}  # by DeepCache's depth
STEPS = (DEEP, *SHALLOW.values())
PHASES = (ENCODE, *STEPS, VAE)
ANY = (0, 0)  # the size of a phase to which it does not matter; "any" in a table

Size = tuple[int, int]
Seconds = Mapping[int, float]


class CostError(BenchError):
    """A cost table is invalid. The message names the file and the field."""


class Costs:
    """One device's table. `held` is bytes by size and part ("request", "row", or a shallow phase's features a row)."""

    def __init__(
        self,
        name: str,
        measured: Mapping[tuple[str, Size], Seconds],
        *,
        device: str = "",
        source: str = "",
        held: Mapping[Size, Mapping[str, int]] | None = None,
    ) -> None:
        self.name = name
        self.device = device
        self.source = source
        self.measured = {key: dict(sorted(rows.items())) for key, rows in measured.items()}
        self.held = dict(held or {})
        self._curves: dict[tuple[str, Size], CostCurve] = {}
        self._known: dict[tuple[str, Size, int], float] = {}
        for key, rows in self.measured.items():
            curve = self._curves[key] = CostCurve()
            # From wide to narrow: a curve takes an observation for no more than four times what it expects.
            for count, seconds in sorted(rows.items(), reverse=True):
                while not math.isclose(curve.measured.get(count, 0.0), seconds, rel_tol=1e-9):
                    curve.observe(count, seconds)

    def __call__(self, phase: str, size: Size, rows: int) -> float:
        """Seconds of one iteration of that many rows. A phase that the table omits takes no time."""
        found = self._known.get((phase, size, rows))
        if found is None:
            curve = self._curves.get((phase, size))
            found = self._known[phase, size, rows] = 0.0 if curve is None else curve(rows)
        return found

    def widest(self, phase: str, size: Size) -> int | None:
        """The largest measured number of rows; None without measurements."""
        return max(self.measured.get((phase, size), ()), default=None)

    def least_s(self, phase: str, size: Size, rows: int, limit: int) -> float:
        """Seconds that `rows` rows cost at the width, up to `limit`, at which a row costs least."""
        return rows * min(self(phase, size, wide) / wide for wide in range(1, limit + 1))

    @property
    def sizes(self) -> list[Size]:
        """Sizes for which both a deep step and the VAE were measured."""
        return sorted(size for phase, size in self.measured if phase == DEEP and (VAE, size) in self.measured)

    def as_json(self) -> dict[str, Any]:
        """The table as `read` reads it."""
        table: dict[str, Any] = {"device": self.device, "source": self.source}
        for (phase, size), rows in sorted(self.measured.items(), key=lambda item: (PHASES.index(item[0][0]), item[0])):
            table.setdefault(phase, {})[_word(size)] = {str(count): seconds for count, seconds in rows.items()}
        if self.held:
            table["held_bytes"] = {_word(size): dict(parts) for size, parts in self.held.items()}
        return table


def find(name: str) -> Path:
    """The file of a table: a shipped one by name, or any other by path."""
    shipped = SHIPPED / f"{name}.json"
    return shipped if re.fullmatch(r"[a-z0-9-]+", name) and shipped.is_file() else Path(name)


def shipped() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def read(path: Path) -> Costs:
    """Raises `CostError`, which names the file and the field."""
    try:
        table = json.loads(path.read_text("utf-8"), object_pairs_hook=_once)
    except OSError as error:
        there = f"; shipped are {', '.join(shipped())}"
        raise CostError(f"--costs: {path} cannot be read ({error.strerror}){there}") from error
    except ValueError as error:
        raise CostError(f"{path}: is not JSON ({error})") from error
    try:
        return _read(path.name, table)
    except ValueError as error:
        raise CostError(f"{path}: {error}") from error


def _read(name: str, table: Any) -> Costs:
    if not isinstance(table, dict):
        raise ValueError("must be an object")
    for field in table.keys() - {*PHASES, "device", "source", "held_bytes"}:
        raise ValueError(f"{field}: is not known; phases are {', '.join(PHASES)}")
    for field in ("device", "source"):
        if not isinstance(table.get(field), str) or not table[field].strip():
            raise ValueError(f"{field}: must say in words {'what' if field == 'device' else 'how it'} was measured")
    measured = {}
    for phase in PHASES:
        for size, where, rows in _by_size(table, phase):
            if (size == ANY) != (phase == ENCODE):
                raise ValueError(f"{where}: must be {'any' if phase == ENCODE else 'a size such as 1024x1024'}")
            measured[phase, size] = _seconds(where, rows)
    for phase in (DEEP, VAE):
        if phase not in table:
            raise ValueError(f"{phase}: is missing")
    held = {size: _held(where, parts) for size, where, parts in _by_size(table, "held_bytes")}
    return Costs(name, measured, device=table["device"], source=table["source"], held=held)


def _held(where: str, parts: dict[str, Any]) -> dict[str, int]:
    for part, value in parts.items():
        if part not in ("request", "row", *SHALLOW.values()):
            raise ValueError(f"{where}.{part}: is not known")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{where}.{part}: must be a whole number of bytes")
    return parts


def _by_size(table: Mapping[str, Any], field: str) -> list[tuple[Size, str, dict[str, Any]]]:
    found = table.get(field, {})
    if not isinstance(found, dict) or (field in table and not found):
        raise ValueError(f"{field}: must be an object with a size or more")
    for word, inner in found.items():
        if not isinstance(inner, dict) or not inner:
            raise ValueError(f"{field}.{word}: must be an object that is not empty")
    return [(_size(f"{field}.{word}", word), f"{field}.{word}", inner) for word, inner in found.items()]


def _size(where: str, word: str) -> Size:
    if word == "any":
        return ANY
    if not re.fullmatch(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", word):
        raise ValueError(f"{where}: must be named by a size such as 1024x1024, or any")
    width, height = word.split("x")
    return int(width), int(height)


def _word(size: Size) -> str:
    return "any" if size == ANY else f"{size[0]}x{size[1]}"


def _seconds(where: str, rows: Mapping[str, Any]) -> dict[int, float]:
    found = {}
    for word, seconds in rows.items():
        if not re.fullmatch(r"[1-9][0-9]{0,4}", word):
            raise ValueError(f"{where}.{word}: must be a number of rows, 1 or more")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ValueError(f"{where}.{word}: must be seconds above 0")
        found[int(word)] = float(seconds)
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise ValueError(f"{twice}: stands twice in one object")
    return found
