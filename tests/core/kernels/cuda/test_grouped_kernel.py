"""The products of a mixture of experts: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.core.kernels.cuda.device import CUDA, DEVICE, DTYPE, EIGHT, draw, normal, uniform

# isort: split
from core.kernels.cuda import grouped_kernel as kernels
from core.kernels.cuda.grouped_kernel import GroupTile
from core.kernels.cuda.quantize import to_levels, to_type

TYPES = [*EIGHT, DTYPE]
WIDTH, INNER = 96, 80


class Case:
    """Rows, a router and experts, of which the last is never chosen."""

    def __init__(self, rows: int, experts: int, top: int, dtype: torch.dtype) -> None:
        generator = draw(rows)
        self.experts, self.top, self.dtype = experts, top, dtype
        self.x = normal(generator, rows, WIDTH).to(DTYPE)
        self.router = normal(generator, experts, WIDTH).to(DTYPE)
        self.router[-1] = 0
        self.x[:, 0], self.router[:-1, 0] = 30, 1  # all others are likelier
        quantized = dtype in EIGHT
        self.inverses = [20 + normal(generator, n) if quantized else None for n in (WIDTH, INNER)]
        shapes = ((experts * 2 * INNER, WIDTH), (experts * WIDTH, INNER))
        self.weights = [
            to_levels(40 * normal(generator, *shape), dtype)
            if quantized
            else (normal(generator, *shape) / 10).to(dtype)
            for shape in shapes
        ]
        self.scales = [uniform(generator, n) * 1e-3 if quantized else None for n, _ in shapes]

    def route(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the experts, their weights, and the rows as `dtype`."""
        return kernels.route(
            self.x[rows], self.router, self.top, normalized=True, inverse=self.inverses[0], dtype=self.dtype
        )

    def products(self, experts: Tensor, weights: Tensor, x: Tensor, tile: GroupTile | None = None) -> Tensor:
        """Return the weighted outputs of the rows' experts, [top, T, WIDTH]."""
        first, second = (
            tile or kernels.choose(experts.numel(), self.experts, WIDTH, self.dtype.itemsize, gated=gated)
            for gated in (True, False)
        )
        places = kernels.sort(experts, self.experts, first.rows)
        hidden = kernels.gated(
            x, self.weights[0], self.scales[0], self.inverses[1], self.dtype, places, self.top, self.experts, first
        )
        return kernels.down(hidden, self.weights[1], self.scales[1], weights, DTYPE, places, self.experts, second)


def route_reference(
    x: Tensor, router: Tensor, top: int, *, normalized: bool, inverse: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    weights, experts = (x.double() @ router.double().t()).softmax(-1).topk(top, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True) if normalized else weights
    return experts.int(), weights.float(), x if inverse is None else to_type(x.float() * inverse, dtype)


def gated_reference(
    x: Tensor, weight: Tensor, scale: Tensor | None, inverse: Tensor | None, dtype: torch.dtype, experts: Tensor,
    count: int, *, gelu: bool = False,
) -> Tensor:  # fmt: skip
    gate, up = _product(x.repeat_interleave(experts.shape[1], 0), weight, scale, experts, count).chunk(2, dim=1)
    y = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    return to_type(y if inverse is None else y * inverse, dtype)


def down_reference(
    x: Tensor, weight: Tensor, scale: Tensor | None, weights: Tensor, dtype: torch.dtype, experts: Tensor, count: int
) -> Tensor:
    y = _product(x, weight, scale, experts, count) * weights.flatten()[:, None]
    return y.to(dtype).view(*experts.shape, -1).transpose(0, 1).contiguous()


def _product(x: Tensor, weight: Tensor, scale: Tensor | None, experts: Tensor, count: int) -> Tensor:
    """Each row of x [assignments, K] by its expert's weights, fp32 [assignments, N]."""
    chosen = experts.flatten().long()
    stacked = weight.double().unflatten(0, (count, -1))
    y = torch.einsum("ak,ank->an", x.double(), stacked[chosen]).float()
    return y if scale is None else y * scale.view(count, -1)[chosen]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "experts", "top"), [(1, 8, 2), (37, 5, 3)])
def test_mixture(rows: int, experts: int, top: int, dtype: torch.dtype) -> None:
    case = Case(rows, experts, top, dtype)
    chosen, weights, levels = case.route(slice(None))
    parts = case.products(chosen, weights, levels)
    expected, expected_weights, x = route_reference(
        case.x, case.router, top, normalized=True, inverse=case.inverses[0], dtype=dtype
    )
    assert torch.equal(chosen, expected) and int(chosen.max()) < experts - 1
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-6)
    hidden = gated_reference(
        x, case.weights[0], case.scales[0], case.inverses[1], dtype, chosen, case.experts
    )  # fmt: skip
    wanted = down_reference(hidden, case.weights[1], case.scales[1], weights, DTYPE, chosen, case.experts)
    slack = (0.05 if dtype == torch.float8_e4m3fn else 2e-2) if CUDA else 2e-2 if dtype in EIGHT else 1e-4
    torch.testing.assert_close(parts, wanted, rtol=slack, atol=slack * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", EIGHT[:1])
def test_a_row_does_not_depend_on_its_companions(dtype: torch.dtype) -> None:
    """Nor on the tile, and so on how many rows there are."""
    case = Case(40, 6, 2, dtype)
    experts, weights, x = case.route(slice(None))
    whole = case.products(experts, weights, x)
    for rows, tile in ((slice(0, 1), None), (slice(5, 22), None), (slice(0, 40), GroupTile(64, 128, 128, 8, 3))):
        alone = case.route(rows)
        assert torch.equal(alone[0], experts[rows]) and torch.equal(alone[2], x[rows])
        torch.testing.assert_close(alone[1], weights[rows])  # of sums of floats
        # Sums of integers are exact, and what follows is by element: the bits are equal on every machine.
        assert torch.equal(case.products(experts[rows], weights[rows], x[rows], tile), whole[:, rows])


def test_assignments_are_in_order_and_blocks_of_one_expert() -> None:
    generator = torch.Generator().manual_seed(0)
    experts = torch.randint(0, 7, (700, 3), generator=generator, dtype=torch.int32).to(DEVICE)
    experts[experts == 4] = 5  # nobody takes it
    order, blocks, rows = kernels.sort(experts, 7, 16)
    flat, lists = experts.flatten().tolist(), order.view(-1, rows).tolist()
    seen: dict[int, list[int]] = {}
    for block, places in zip(blocks.tolist(), lists, strict=True):
        if block >= 0:
            seen.setdefault(block, []).extend(place for place in places if place < len(flat))
    assert seen == {e: [i for i, own in enumerate(flat) if own == e] for e in (0, 1, 2, 3, 5, 6)}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, 3e38, -3e38, torch.nan])
def test_what_is_not_finite_chooses_experts_too(value: float) -> None:
    case = Case(5, 4, 2, DTYPE)
    case.router = case.router.abs() + 1  # all overflow
    case.x[1] = value
    experts, weights, x = case.route(slice(0, 5))
    parts = case.products(experts, weights, x)
    assert {*experts.flatten().tolist()} <= {*range(4)} and all(len({*row}) == 2 for row in experts.tolist())
    assert not parts[:, 1].isfinite().any() and parts[:, 0].isfinite().all()


def test_tiles_fit_the_shared_memory_of_ada() -> None:
    for assignments in (1, 64, 512, 4096):
        for gated in (False, True):
            tile = kernels.choose(assignments, 8, 4096, 1, gated=gated, shared_bytes=101_376)
            taken = tile.stages * (tile.rows + tile.columns * (1 + gated)) * tile.depth
            assert taken <= 101_376 and tile.stages > 1
