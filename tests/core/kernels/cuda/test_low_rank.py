"""Branches of a batch's rows against their plain twin, rows in any company, and what the packing keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.core.kernels.cuda.device import CUDA, DEVICE, DTYPE

# isort: split
from core.kernels.branches import BranchPart
from core.kernels.cuda.conv import conv3x3_int8, upsample_conv3x3_int8
from core.kernels.cuda.linear import linear_geglu_int8, linear_int8
from core.kernels.cuda.low_rank import (
    ENTRY,
    BranchShares,
    RowAdapters,
    Window,
    add_reference,
    as_levels,
    down,
    pack,
    up,
)
from core.kernels.cuda.tiles import Tile, candidates
from tests.core.quant.stage import Many, Seed, Several

SLACK = 2e-2 if CUDA else 1e-5


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Adapter:
    """Branches of one layer, the second of a table of three, in memory of its own."""

    def __init__(
        self, seed: int, channels: int, columns: int, taps: int, ranks: list[tuple[int, int, int]], eight: bool = False
    ) -> None:
        """`ranks`: of each part the rank, and its first and behind its last column."""
        self.parts = []
        for n, (rank, start, end) in enumerate(ranks):
            down = normal(seed + n, rank, taps * taps, channels) / channels
            self.parts.append(BranchPart(start, down, normal(seed + 50 + n, end - start, rank)))
        *factors, self.ranks = pack(self.parts, columns, DTYPE, eight=eight)
        self.factors = [part.to(DEVICE) for part in factors]
        table = torch.zeros(3, ENTRY, dtype=torch.int64)
        table[1] = torch.tensor([*(part.data_ptr() for part in self.factors), self.ranks])
        self.table = table.to(DEVICE)

    def made(self, x: Tensor, window: Window) -> Tensor:
        """up(down(x)) [pixels, columns] of one image [H, W, C], by torch's own convolution."""
        maps = x.float().permute(2, 0, 1)[None]
        if window.doubled:
            maps = F.interpolate(maps, size=window.sides)
        found = []
        for part in self.parts:
            kernel = part.down.unflatten(1, (window.taps, window.taps)).permute(0, 3, 1, 2)
            padding = window.padding
            seen = maps if padding or window.taps == 1 else F.pad(maps, (0, 1, 0, 1))
            low = F.conv2d(seen, kernel, stride=window.stride, padding=padding)
            found.append((part.start, (part.up @ low[0].flatten(1)).t()))
        columns = max(start + len(y[0]) for start, y in found)
        whole = torch.zeros(len(found[0][1]), columns)
        for start, y in found:
            whole[:, start : start + y.shape[1]] += y
        return whole


def launch(
    x: Tensor, out: Tensor, rows: RowAdapters, window: Window, by: Tensor | None = None, *, alone: bool = False
) -> None:
    """By the kernels, which the interpreter runs where there is no GPU."""
    shares = BranchShares(x, rows, 1, window, by, out.dtype)
    up(shares, down(shares), out, alone=alone)


def rows_of(uses: list[list[tuple[Adapter, float]]]) -> RowAdapters:
    most = max(1, *(len(row) for row in uses))
    addresses, scales = torch.zeros(len(uses) + 2, most, dtype=torch.int64), torch.zeros(len(uses) + 2, most)
    for row, own in enumerate(uses):
        for n, (adapter, scale) in enumerate(own):
            addresses[row, n], scales[row, n] = adapter.table.data_ptr(), scale
    ranks = max([1, *(adapter.ranks for own in uses for adapter, _ in own)])
    return RowAdapters(addresses.to(DEVICE), scales.to(DEVICE), ranks)


def tokens(count: int) -> Window:
    return Window(1, count, (1, count))


def around(height: int, width: int, *, doubled: bool = False) -> Window:
    """Of a 3×3 convolution."""
    return Window(height, width, (height, width), 3, 1, 1, doubled)


WINDOWS = {
    "linear": (tokens(21), (1, 21)),
    "vectors": (tokens(1), (1, 1)),
    "conv": (around(5, 6), (5, 6)),
    "stride": (Window(3, 4, (5, 8), 3, 2, 1), (5, 8)),
    "end-padded": (Window(2, 4, (4, 8), 3, 2, 0), (4, 8)),
    "doubled": (around(6, 8, doubled=True), (3, 4)),
    "doubled, cut": (around(5, 7, doubled=True), (3, 4)),
}


# In the interpreter, where each program is dear, each window reads one kind of values.
KINDS = [(name, eight) for n, name in enumerate(WINDOWS) for eight in (False, True) if CUDA or n % 2 == eight]


@pytest.mark.quick("linear-False", "conv-False", "doubled, cut-False", "vectors-True")
@pytest.mark.parametrize(("name", "eight"), KINDS)
def test_rows_get_their_own(name: str, eight: bool) -> None:
    """With one adapter, none, two, and one that has no share in the layer; the padding of a batch gets none."""
    (window, sides), channels, columns = WINDOWS[name], 24, 80
    first = Adapter(1, channels, columns, window.taps, [(4, 0, columns)], eight)
    second = Adapter(9, channels, columns, window.taps, [(2, 0, 64), (35, 64, columns)], eight)
    other = Adapter(19, channels, columns, window.taps, [(3, 0, columns)], eight)
    other.table[1, 3] = 0
    uses: list[list[tuple[Adapter, float]]] = [[(first, 1.0)], [], [(second, 0.5), (first, -2.0)], [(other, 1.0)], []]
    images, pixels = len(uses), window.height * window.width
    x = (30 * normal(3, images, *sides, channels)).to(torch.int8 if eight else DTYPE).to(DEVICE)
    wide = normal(4, images * pixels, columns + 16).to(DEVICE, DTYPE)
    by = (1 + normal(5, images * pixels).abs()).to(DEVICE) if name == "linear" else None
    rows, out, before = rows_of(uses), wide[:, 8 : 8 + columns], wide.clone()
    launch(x, out, rows, window, by)
    shares = torch.zeros(images, pixels, columns)
    for row, own in enumerate(uses[:3]):
        for adapter, scale in own:
            shares[row] += scale * adapter.made(x[row].cpu(), window)
    shares = shares.flatten(0, 1) if by is None else shares.flatten(0, 1) * by.cpu()[:, None]
    wanted = before[:, 8 : 8 + columns].cpu().float() + shares
    slack = max(SLACK, 1e-4) if eight else SLACK  # levels of 16 bits
    torch.testing.assert_close(out.cpu().float(), wanted, rtol=slack, atol=slack * float(shares.abs().max()))
    plain = torch.tensor([1, 3, 4])
    own_rows = [each.view(images, pixels, -1)[plain] for each in (wide, before)]
    assert torch.equal(*own_rows), "rows without a share are not touched"
    assert torch.equal(wide[:, :8], before[:, :8]) and torch.equal(wide[:, -8:], before[:, -8:])
    for row in (0, 2):
        alone = before.view(images, pixels, -1)[row].clone()
        part = None if by is None else by[row * pixels : (row + 1) * pixels]
        launch(x[row : row + 1], alone[:, 8 : 8 + columns], rows_of(uses[row : row + 1]), window, part)
        assert torch.equal(alone, wide.view(images, pixels, -1)[row]), "it depends on others"
    if not CUDA:
        twin = before.clone()
        BranchShares(x, rows, 1, window, by, DTYPE).add(twin[:, 8 : 8 + columns])
        torch.testing.assert_close(twin, wide, rtol=SLACK, atol=SLACK * float(shares.abs().max()))
        assert torch.equal(twin.view(images, pixels, -1)[plain], own_rows[1])


def test_alone_it_is_zero_where_there_is_no_share() -> None:
    adapter = Adapter(1, 16, 40, 1, [(4, 0, 40)])
    x, window = normal(2, 2, 1, 7, 16).to(DEVICE, DTYPE), tokens(7)
    made = [torch.full((14, 40), 9.0, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    rows = rows_of([[], [(adapter, 2.0)]])
    launch(x, made[0], rows, window, alone=True)
    assert not made[0][:7].any()
    torch.testing.assert_close(made[0][7:].cpu().float(), 2 * adapter.made(x[1].cpu(), window), rtol=SLACK, atol=SLACK)
    if not CUDA:
        add_reference(x, made[1], rows, 1, window, alone=True)
        torch.testing.assert_close(*made, rtol=SLACK, atol=SLACK)


Part = st.tuples(st.integers(1, 150), st.integers(0, 80))  # columns and a rank
Parts = Annotated[
    list[tuple[int, int]], st.lists(Part, min_size=1, max_size=4).filter(lambda parts: any(r for _, r in parts))
]


@settings(max_examples=20 if CUDA else 10)
@given(...)
def test_any_parts_of_a_layer(widths: Parts, channels: Many, count: Many, eight: bool) -> None:
    """Layers side by side whose columns do not fill tiles, some of them without a branch."""
    parts, end = [], 0
    for width, rank in widths:
        parts += [(rank, end, end + width)] if rank else []
        end += width
    adapter = Adapter(5, channels, end, 1, parts, eight)
    x, window = (30 * normal(2, 1, 1, count, channels)).round().clamp(-128, 127), tokens(count)
    x = x.to(DEVICE, torch.int8 if eight else DTYPE)
    out = torch.zeros(count, end, dtype=DTYPE, device=DEVICE)
    launch(x, out, rows_of([[(adapter, 1.0)]]), window)
    wanted = torch.zeros(count, end)
    share = adapter.made(x[0].cpu(), window)
    wanted[:, : share.shape[1]] = share
    slack = max(SLACK, 1e-4) if eight else SLACK
    torch.testing.assert_close(out.cpu().float(), wanted, rtol=slack, atol=max(1e-5, slack * float(share.abs().max())))


def product_of(name: str, channels: int, columns: int) -> Callable[..., Tensor]:
    """An 8-bit product with scales, bias and residual: of x, the residual, `shares`, their `row_scale` and a tile."""
    g, phases, gated = torch.Generator().manual_seed(8), 4 if name == "doubled" else 1, name == "gated"
    taps = {"conv": 9, "stride": 9, "doubled": 4}.get(name, 1)
    weight = torch.randint(-127, 128, (phases * (1 + gated) * columns, taps * channels), generator=g)
    scale = (1e-4 * (1 + torch.rand(len(weight), generator=g))).to(DEVICE)
    bias = torch.randn((1 + gated) * columns, generator=g).to(DEVICE)
    levels, inverse = weight.to(DEVICE, torch.int8), (10 + torch.rand(columns, generator=g)).to(DEVICE)

    def product(
        x: Tensor, residual: Tensor, shares: BranchShares | None, by: Tensor | None, tile: Tile | None
    ) -> Tensor:
        ways: dict[str, Any] = {"tile": tile, "shares": shares}
        if gated:
            return linear_geglu_int8(x.flatten(0, 2), levels, scale, bias, inverse, **ways)
        if name == "doubled":
            filters = levels.view(4, columns, 2, 2, channels)
            return upsample_conv3x3_int8(x, filters, scale.view(4, columns), bias, DTYPE, **ways)
        if taps == 9:
            filters, stride = levels.view(columns, 3, 3, channels), 2 if name == "stride" else 1
            return conv3x3_int8(x, filters, scale, bias, None, residual, stride, DTYPE, **ways)
        return linear_int8(x.flatten(0, 2), levels, scale, bias, by, residual.flatten(0, 2), DTYPE, **ways)

    return product


# What a result's pixels read, and columns: in the interpreter fewer programs, across the same edges of tiles.
SHARED = {
    "linear": (tokens(48), 320 if CUDA else 160),
    "scaled rows": (tokens(48), 320 if CUDA else 160),
    "few tokens": (tokens(21), 160),
    "many tokens": (tokens(300), 640) if CUDA else (tokens(140), 160),
    "vectors": (tokens(1), 96),
    "gated": (tokens(37), 320 if CUDA else 160),
    "conv": (around(9, 14), 160) if CUDA else (around(5, 6), 96),
    "stride": (Window(5, 7, (9, 14), 3, 2, 1), 64),
    "doubled": (around(10, 12, doubled=True), 160) if CUDA else (around(6, 8, doubled=True), 96),
}


@pytest.mark.quick("linear", "conv", "gated", "vectors", "scaled rows")
@pytest.mark.parametrize("name", SHARED)
def test_products_add_shares_themselves(name: str) -> None:
    """As the kernel behind them does; rows without as without any, in any company. Elsewhere than on Hopper: by it."""
    (window, columns), channels = SHARED[name], 48
    width = columns * (2 if name == "gated" else 1)
    first = Adapter(1, channels, width, window.taps, [(4, 0, width)], eight=True)
    second = Adapter(9, channels, width, window.taps, [(8, 0, 64), (35, 64, width)], eight=True)
    third = Adapter(19, channels, width, window.taps, [(130, 0, width)], eight=True)
    # Before a gate of no more than the product: it multiplies both ways' rounding of a large share.
    by = 0.03 if name == "gated" else 1.0
    uses = [[(first, by)], [], [(second, 0.5 * by), (first, -2.0 * by)], [], [(third, by)]]
    sides = [side // (2 if window.doubled else 1) for side in window.sides]
    x = (40 * normal(3, len(uses), *sides, channels)).to(torch.int8).to(DEVICE)
    residual = normal(4, len(uses), window.height, window.width, columns).to(DEVICE, DTYPE)
    by_row = (1 + normal(5, len(uses), window.height * window.width).abs()).to(DEVICE)
    product = product_of(name, channels, columns)

    def run(tile: Tile | None, rows: slice, folds: bool | None) -> Tensor:
        """[B, pixels, N]; without shares if `folds` is None."""
        scaled = by_row[rows].flatten() if name == "scaled rows" else None
        shares = BranchShares(x[rows], rows_of(uses[rows]), 1, window, scaled, DTYPE, bool(folds)).computed()
        made = product(x[rows], residual[rows], None if folds is None else shares, scaled, tile)
        return made.view(len(x[rows]), -1, columns)

    # Linear layers and convolutions are one program, which compiles for seconds: of each shape one is tested.
    tiles = candidates(width, gated=name == "gated") if CUDA else []
    by_shape: dict[Any, Tile | None] = {(t.blocks, t.columns, t.turns): t for t in tiles} or {None: None}
    for tile in by_shape.values():
        plain, folded = (run(tile, slice(None), way) for way in (None, True))
        behind = run(tile, slice(None), False) if CUDA else folded  # elsewhere by the same kernel
        assert torch.equal(folded[1::2], plain[1::2]), f"{tile}: rows without a share have other bits"
        apart, changed = (folded.float() - behind.float()).abs(), (folded != plain)[::2].float().mean()
        slack = 2.0 if name == "gated" else 2.0**-6 * float(behind.float().abs().max())
        assert float(apart.max()) <= slack and float(changed) > 0.3, tile
        for row in range(len(uses)) if CUDA else (1, 2):
            assert torch.equal(run(tile, slice(row, row + 1), True)[0], folded[row]), f"{tile}: {row} depends on others"


def test_a_small_adapter_is_small_in_memory() -> None:
    down, up, spans, _ = pack([BranchPart(0, normal(1, 4, 9, 32), normal(2, 100, 4))], 100, torch.bfloat16)
    assert (down.numel(), up.numel(), spans.shape) == (8 * 9 * 32, 8 * 128, (2, 3))


COMPILE = """
from core.kernels.cuda.low_rank import _down, _up  # 16 bytes at a time: "cp.async.cg" of the factors

counts = dict.fromkeys(["layer", "pixels", "out_width", "map_height", "map_width", "width", "image_pixels",
                        "stride", "uses", "ranks", "columns"], "i32")
counts |= dict.fromkeys(["width", "image_pixels", "pixels", "stride", "columns", "ranks"], "i32:16")  # as in an SDXL
both = {"addresses": "*i64", "low": "*bf16"} | counts
# Each type, each number of taps and both ways of reading; `make test-gpu` compiles all.
for kind, taps, doubled in (("*i8", 1, False), ("*i8", 3, True), ("*fp8e4nv", 3, False), ("*bf16", 3, True)):
    depth = 64 if kind == "*bf16" else 128
    types = both | {"x": kind, "scales": "*fp32"}
    types.pop("columns")
    shape = dict(C=640, TAPS=taps, STRIDE=1, PADDING=taps // 2, DOUBLED=doubled, BM=128, BR=64, BK=depth)
    made(_down, types, shape, "cp.async.cg", num_warps=8, num_stages=3)
shape = dict(C=1280, TAPS=1, STRIDE=1, PADDING=0, DOUBLED=False, BM=16, BR=64, BK=64)
made(_down, types | {"row_scale": "*fp32"}, shape, "cp.async.cg", num_warps=4, num_stages=3)
# As Triton specializes the vectors of a batch with one adapter a row: ones are constants.
ones = dict.fromkeys(["pixels", "out_width", "map_height", "map_width", "width", "image_pixels", "uses"], 1)
rest = {name: kind for name, kind in types.items() if name not in ones}
made(_down, rest, shape | ones, "cp.async.cg", num_warps=4, num_stages=3)
types = {name: kind for name, kind in both.items() if name in ("addresses", "low", "layer", "pixels", "columns",
                                                             "stride", "uses", "ranks")}
for add, rows in ((True, 128), (False, 128), (True, 16)):
    made(_up, types | {"out": "*bf16"}, dict(ADD=add, BM=rows, BN=64, BR=16), "cp.async.cg", num_warps=4)
rest = {name: kind for name, kind in types.items() if name not in ones}
made(_up, rest | {"out": "*bf16"}, dict(ADD=True, BM=16, BN=64, BR=16, pixels=1, uses=1), num_warps=4)
"""


@given(...)
def test_levels_are_within_half_a_step(
    ranks: Several, depth: Many, size: Annotated[float, st.floats(1e-6, 1e6)], seed: Seed
) -> None:
    """Of a row's largest value in 16 bits; zeros stay zeros."""
    down = size * normal(seed, ranks, depth)
    down[0] = 0
    packed = as_levels(down)
    step, halves = packed[: 4 * ranks].view(torch.float32), packed[4 * ranks :].double().view(2, ranks, depth)
    made = (256 * halves[0] + halves[1]) * step.double()[:, None]
    largest = down.double().abs().amax(1, keepdim=True)
    assert ((made - down.double()).abs() <= largest / 65_000).all() and not made[0].any()
