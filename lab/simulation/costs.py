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
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.batching.cost import CostCurve
from lab.bench.harness.record import BenchError

SHIPPED = Path(__file__).resolve().parent / "tables"
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
    """The costs of one device. `held_bytes`: by size and part ("request", "row", a shallow phase's features a row)."""

    def __init__(
        self,
        name: str,
        measured: Mapping[tuple[str, Size], Seconds],
        *,
        device: str = "",
        source: str = "",
        held_bytes: Mapping[Size, Mapping[str, int]] | None = None,
    ) -> None:
        self.name = name
        self.device = device
        self.source = source
        self.measured = {key: dict(sorted(rows.items())) for key, rows in measured.items()}
        self.held_bytes = dict(held_bytes or {})
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
        seconds = self._known.get((phase, size, rows))
        if seconds is None:
            curve = self._curves.get((phase, size))
            seconds = self._known[phase, size, rows] = 0.0 if curve is None else curve(rows)
        return seconds

    def widest(self, phase: str, size: Size) -> int | None:
        """The largest measured number of rows; None without measurements."""
        return max(self.measured.get((phase, size), ()), default=None)

    def least_s(self, phase: str, size: Size, rows: int, limit: int) -> float:
        """Seconds that `rows` rows cost at the width, up to `limit`, at which a row costs least."""
        return rows * min(self(phase, size, width) / width for width in range(1, limit + 1))

    @property
    def sizes(self) -> list[Size]:
        """Sizes for which both a deep step and the VAE were measured."""
        return sorted(size for phase, size in self.measured if phase == DEEP and (VAE, size) in self.measured)

    def as_json(self) -> dict[str, Any]:
        """The table as `read` reads it."""
        table: dict[str, Any] = {"device": self.device, "source": self.source}
        for (phase, size), rows in sorted(self.measured.items(), key=lambda item: (PHASES.index(item[0][0]), item[0])):
            table.setdefault(phase, {})[_word(size)] = {str(count): seconds for count, seconds in rows.items()}
        if self.held_bytes:
            table["held_bytes"] = {_word(size): dict(parts) for size, parts in self.held_bytes.items()}
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
        fields = json.loads(path.read_text("utf-8"), object_pairs_hook=_once)
        table = _Table.model_validate(fields)
    except OSError as error:
        available = f"; shipped are {', '.join(shipped())}"
        raise CostError(f"--costs: {path} cannot be read ({error.strerror}){available}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise CostError(f"{path}: {field}: {first['msg']}".replace(": :", ":")) from error
    except ValueError as error:
        raise CostError(f"{path}: is not JSON ({error})") from error
    rows = table.model_dump(by_alias=True, exclude_none=True)
    measured = {
        (phase, _size(word)): {int(count): seconds for count, seconds in by_rows.items()}
        for phase in PHASES
        for word, by_rows in rows.get(phase, {}).items()
    }
    held_bytes = {_size(word): parts for word, parts in rows.get("held_bytes", {}).items()}
    return Costs(path.name, measured, device=table.device, source=table.source, held_bytes=held_bytes)


Words = Annotated[str, Field(pattern=r"\S")]
SizeName = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")]
ByRows = Annotated[
    dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}$")], Annotated[float, Field(gt=0, allow_inf_nan=False)]],
    Field(min_length=1),
]
BySize = Annotated[dict[SizeName, ByRows], Field(min_length=1)]
Part = Literal["request", "row", "shallow", "shallow-resnet"]


class _Table(BaseModel):
    """The file's fields. Keys of rows are numbers in words, as JSON has them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    device: Words
    source: Words
    encode: Annotated[dict[Literal["any"], ByRows], Field(min_length=1)] | None = None
    deep: BySize
    shallow: BySize | None = None
    shallow_resnet: BySize | None = Field(None, alias="shallow-resnet")
    vae: BySize
    held_bytes: Annotated[dict[SizeName, dict[Part, Annotated[int, Field(ge=0)]]], Field(min_length=1)] | None = None


def _size(word: str) -> Size:
    width, _, height = word.partition("x")
    return ANY if word == "any" else (int(width), int(height))


def _word(size: Size) -> str:
    return "any" if size == ANY else f"{size[0]}x{size[1]}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise ValueError(f"{twice}: stands twice in one object")
    return fields
