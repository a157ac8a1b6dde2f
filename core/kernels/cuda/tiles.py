"""Chooses a product's tile: the measured best if there is one, else the cheapest by a cost model.

A table is a JSON file per device, written by `diptych tune-kernels`: kernel → "N,K" → bucket of rows → tile, and the
device's number of multiprocessors. Some are beside this file, others where `keep_in` says. Nothing is tuned at
start-up.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tile:
    """`blocks` × 128 rows by `columns`, or × 64 where two consumers take tiles by `turns` (1) instead of together (0).

    `cluster` blocks side by side share their rows. `group` rows of tiles are computed side by side, so that a weight
    larger than the L2 cache is read from memory once for all of them.
    """

    blocks: int
    columns: int
    cluster: int
    turns: int = 0
    group: int = 1

    @property
    def rows(self) -> int:
        return (64 if self.turns else 128) * self.blocks

    def efficiency(self) -> float:
        """The approximate share of peak throughput measured for a long run of such tiles."""
        shares = {(2, 128): 1.0, (2, 160): 0.98, (1, 256): 0.95, (1, 160): 0.85, (1, 128): 0.8, (1, 64): 0.6}
        return 0.95 if self.turns else shares.get((self.blocks, self.columns), 0.5)


SHAPES = ((2, 128, 0), (2, 160, 0), (1, 256, 0), (1, 160, 0), (1, 128, 0), (1, 64, 0), (2, 128, 1), (2, 160, 1))


def candidates(columns: int, *, gated: bool = False) -> list[Tile]:
    """Possible tiles for `columns` columns of the product; a cluster needs an even number of them."""
    tiles = []
    for blocks, width, turns in SHAPES:
        if gated and width % 64:
            continue
        tiles.append(Tile(blocks, width, 1, turns))
        if math.ceil(columns / width) % 2 == 0:
            tiles.append(Tile(blocks, width, 2, turns))
    return tiles


def bucket(rows: int) -> int:
    """Rows are looked up by the next power of two."""
    return 1 << max(rows - 1, 1).bit_length()


SHIPPED = Path(__file__).parent
_folders: list[Path] = [SHIPPED]
_chosen: list[dict[str, Any]] = []  # by `using`


def keep_in(folder: Path) -> None:
    """Look for tables in this folder too, before the shipped ones."""
    _folders[:] = [folder, SHIPPED]
    _forget()


def path_of(folder: Path, device: str) -> Path:
    """The file of a device's table."""
    return folder / f"{'_'.join(device.lower().split())}.json"


@functools.cache
def table(device: str, multiprocessors: int) -> dict[str, Any]:
    """The tiles of this device, shape by shape: as its owner measured them, else as shipped, else those of a sibling,
    which has as many multiprocessors.

    Empty where there are none. A file that cannot be read is logged and left out.
    """
    if _chosen:
        return _chosen[-1]
    entries: dict[str, Any] = {}
    own = (path_of(folder, device) for folder in _folders)
    for path in dict.fromkeys((*own, *sorted(SHIPPED.glob("*.json")))):
        if path.is_file() and (measured := read(path, multiprocessors)):
            log.info("tiles of %s: %s", device, path)
            for kernel, shapes in measured.items():
                entries[kernel] = {**shapes, **entries.get(kernel, {})}
    return entries


def read(path: Path, multiprocessors: int | None = None) -> dict[str, Any]:
    """A table; empty for a device of other multiprocessors, and for a file that cannot be read, which is logged."""
    try:
        entries: dict[str, Any] = json.loads(path.read_text())
        measured_on = entries.pop("multiprocessors")
        if not all(isinstance(shapes, dict) for shapes in entries.values()):
            raise ValueError
        return entries if multiprocessors in (None, measured_on) else {}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        log.warning("%s is not read: %s", path, error)
        return {}


@contextlib.contextmanager
def using(entries: dict[str, Any]) -> Iterator[None]:
    """Context: every device has these tiles."""
    _chosen.append(entries)
    try:
        _forget()
        yield
    finally:
        _chosen.pop()
        _forget()


def _forget() -> None:
    table.cache_clear()
    choose.cache_clear()


def cheapest(rows: int, columns: int, multiprocessors: int, choices: list[Tile]) -> Tile:
    """The tile with the lowest cost of waves over the multiprocessors."""

    def cost(tile: Tile) -> float:
        tiles = math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns)
        waves = math.ceil(tiles / (multiprocessors // tile.cluster * tile.cluster))
        return waves * tile.rows * tile.columns / tile.efficiency()

    return min(choices, key=cost)


@functools.cache
def choose(device: str, kernel: str, rows: int, columns: int, depth: int, multiprocessors: int) -> Tile:
    """The tile for a product of `rows` × `columns` over `depth`; `kernel`: linear, geglu, conv or upsample."""
    choices = candidates(columns, gated=kernel == "geglu")
    measured = table(device, multiprocessors).get(kernel, {}).get(f"{columns},{depth}", {}).get(str(bucket(rows)))
    if measured is not None and replace(tile := Tile(*measured), group=1) in choices:
        return tile
    return cheapest(rows, columns, multiprocessors, choices)
