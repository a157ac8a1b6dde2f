"""The choice of a product's tile, and the order in which the kernel computes tiles."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.kernels.cuda import tiles
from core.kernels.cuda.gemm import GemmArguments
from core.kernels.cuda.gemm_source import LOCATE, TYPES
from core.kernels.cuda.tiles import Tile

PROCESSORS = 132  # of an H200
# (kernel, N, K): Z-Image's, over 4,096 tokens of an image and 128 of a prompt
PRODUCTS = [("linear", 11520, 3840), ("linear", 3840, 3840), ("geglu", 20480, 3840), ("linear", 3840, 10240)]


@pytest.mark.parametrize("images", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(("kernel", "columns", "depth"), PRODUCTS)
def test_shapes_that_nobody_measured_get_wide_tiles_that_fill_the_device(
    kernel: str, columns: int, depth: int, images: int
) -> None:
    rows = images * (4096 + 128)
    tile = tiles.choose("no such device", kernel, rows, columns, depth, PROCESSORS)
    assert tile.rows * tile.columns >= 128 * 128 and tile.efficiency() >= 0.95
    waves = math.ceil(math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns) / PROCESSORS)
    assert rows * columns >= 0.8 * waves * PROCESSORS * tile.rows * tile.columns


def test_a_measured_tile_is_taken_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"linear": {"3840,3840": {"8192": [2, 128, 2, 0, 8], "16384": [1, 256, 1, 0], "32768": [7, 7, 7, 7]}}}
    monkeypatch.setattr(tiles, "table", lambda *_: measured)
    tiles.choose.cache_clear()
    made = [tiles.choose("measured", "linear", rows, 3840, 3840, PROCESSORS) for rows in (4224, 8448, 16896)]
    tiles.choose.cache_clear()
    assert made[:2] == [Tile(2, 128, 2, 0, 8), Tile(1, 256, 1)]
    assert made[2] in tiles.candidates(3840), "no tile of the kernel's: not taken"


@pytest.fixture
def folders() -> Iterator[None]:
    yield
    tiles._folders[:] = [tiles.SHIPPED]
    tiles._forget()


@pytest.mark.usefixtures("folders")
def test_each_shape_has_the_owners_tiles_else_the_shipped_else_a_siblings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    h100, h200 = (tiles.read(tiles.path_of(tiles.SHIPPED, name)) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"))
    assert h100 and h200 and h100 != h200
    shipped = tiles.table("NVIDIA H100 80GB HBM3", PROCESSORS)
    assert shipped == {kernel: {**h200[kernel], **h100[kernel]} for kernel in h200}
    assert tiles.table("NVIDIA H200", PROCESSORS) == h200
    assert tiles.table("NVIDIA H100 NVL", PROCESSORS) == shipped
    assert tiles.table("NVIDIA H100 PCIe", 114) == {}, "another number of multiprocessors"
    tiles.keep_in(tmp_path)
    own = tiles.path_of(tmp_path, "NVIDIA H100 80GB HBM3")
    for text in ("no JSON", "[]", "{}", '{"multiprocessors": 132, "linear": 3}'):
        own.write_text(text)
        tiles._forget()
        assert tiles.table("NVIDIA H100 80GB HBM3", PROCESSORS) == shipped
        assert f"{own} is not read" in caplog.text
        caplog.clear()
    measured = {shape: {"8": [1, 64, 1, 0]} for shape in ("64,32", next(iter(h100["linear"])))}
    own.write_text(json.dumps({"multiprocessors": PROCESSORS, "linear": measured}))
    tiles._forget()
    assert tiles.table("NVIDIA H100 80GB HBM3", PROCESSORS) == {**shipped, "linear": {**shipped["linear"], **measured}}
    with tiles.using({}):
        assert tiles.table("NVIDIA H100 80GB HBM3", PROCESSORS) == {}


PROGRAM = """
#define __device__
#define __forceinline__ inline
#define TURNS 0
#define WM 1
#define BN 128
typedef unsigned char u8; typedef unsigned int u32; typedef unsigned long long u64;
"""
WRAPPER = """
extern "C" void locate_tile(const Problem* p, int tile, unsigned rank, int* to) {
  Where t = locate(*p, tile, rank);
  to[0] = t.image; to[1] = t.h; to[2] = t.w; to[3] = t.phase; to[4] = t.n;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a part of the kernel for the processor")
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("group", [1, 8])
def test_every_tile_is_computed_once(cluster: int, group: int, tmp_path: Path) -> None:
    """The kernel's own mapping of numbers to tiles: none twice, none left out, a group's rows next to each other."""
    defines = f"#define CLUSTER {cluster}\n#define GROUP {group}\n#define FP8 0\n"
    (tmp_path / "locate.cpp").write_text(defines + PROGRAM + TYPES + LOCATE + WRAPPER)
    library = tmp_path / "locate.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "locate.cpp"], check=True)
    locate = ctypes.CDLL(str(library)).locate_tile
    for down, across in ((1, 2), (5, 4), (8, 6), (17, 30), (16, 2)):
        problem = GemmArguments(
            images=1, tiles_h=1, tiles_w=down, log_tile_w=6, phases=1, column_tiles=across, columns=128 * across
        )
        found, where = [], (ctypes.c_int * 5)()
        for tile in range(down * across // cluster):
            for rank in range(cluster):
                locate(ctypes.byref(problem), tile, rank, where)
                found.append((where[2] // 64, where[4] // 128))
                assert (where[0], where[1], where[3]) == (0, 0, 0)
        assert sorted(found) == [(m, n) for m in range(down) for n in range(across)]
        first = {m for m, n in found[: min(group, down) * cluster]}
        assert first == set(range(min(group, down)))
