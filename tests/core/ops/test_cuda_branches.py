"""Low-rank branches on the fused lowering: as torch computes them, by rows, and the same bits in any company."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.cuda_graphs import CapturedGraph
from core.ops.branches import LowRank
from core.ops.cuda import CudaLowering
from core.ops.cuda_branches import CudaBranches
from core.ops.ops import Walk
from tests.core.ops.stage import conv, inverse, linear, point
from tests.core.ops.test_branches import FLOATS, IMAGES, STATIC, Bench, Rows, company, inputs
from tests.core.quant.stage import check_close, normal
from tests.core.tape import Tape

KINDS = pytest.mark.parametrize("kind", [FLOATS, STATIC])
Packed = Sequence[Sequence[tuple[CudaBranches, float]]]


class CudaBench(Bench):
    """The same walk over named layers, on the fused lowering."""

    def __init__(self, layers: Mapping[str, nn.Module], kind: str, by: Tensor) -> None:
        self.floats = dict(layers)
        self.kind, self.by = kind, by
        self.layers: dict[str, Any] = {name: self._made(layer) for name, layer in layers.items()}
        self.lowering: Any = CudaLowering(torch.float32, IMAGES + 1, nn.ModuleDict(self.layers))

    @torch.inference_mode()
    def drawn(self, walk: Walk, x: Tensor, rows: Any) -> list[Tensor]:
        with self.lowering.adapted(rows):
            return [out.clone() for out in self.lowering.lower(walk, "walk")(x)]


def packed(bench: CudaBench, rows: Rows) -> Packed:
    made: dict[int, CudaBranches] = {}
    for uses in rows:
        made |= {id(f): bench.lowering.pack_branches(f) for f, _ in uses if id(f) not in made}
    return [[(made[id(factors)], scale) for factors, scale in uses] for uses in rows]


def check(bench: CudaBench, walk: Walk, x: Tensor, rows: Rows) -> None:
    """As torch; each row has the bits that it has alone, and that it has without branches where it gets none."""
    wanted = bench.expected(walk, x, rows)  # first: the lowering lays weights out anew
    bench.lowering.prepare(walk, tuple(x.shape))
    plain = bench.drawn(walk, x, [])
    own = packed(bench, rows)
    found = bench.drawn(walk, x, own)
    for made, one in zip(found, wanted, strict=True):
        check_close(made, one, relative=1e-4)
    for row, uses in enumerate(own):
        alone = bench.drawn(walk, x[row : row + 1], [uses])
        for made, one, without in zip(found, alone, plain, strict=True):
            # A product of torch itself, in floats, may have other bits at another number of rows.
            exact, close = torch.equal(made[row], one[0]), torch.allclose(made[row], one[0], 1e-4, 1e-4)
            assert exact if bench.kind == STATIC else close, f"row {row} depends on others"
            assert uses or torch.equal(made[row], without[row]), f"row {row} gets none"
    for again, before in zip(bench.drawn(walk, x, []), plain, strict=True):
        assert torch.equal(again, before), "nothing is left behind"


@KINDS
@pytest.mark.parametrize("widths", [(48, 16), (20, 12), (7,), (64, 64, 64)])
@pytest.mark.parametrize(("tokens", "ranks"), [(1, (4, 16)), (5, (8, 3)), (31, (1, 20))])
def test_layers_side_by_side(kind: str, widths: Sequence[int], tokens: int, ranks: tuple[int, int]) -> None:
    bench = CudaBench({f"l{n}": linear(n, 32, width) for n, width in enumerate(widths)}, kind, inverse(9, 32))

    def walk(ops: Any, x: Any) -> Any:
        made = ops.linear(x, *bench.layers.values())
        return ops.linear(x, *bench.layers.values(), residual=made, act="relu")

    check(bench, walk, inputs(bench, 3, IMAGES, tokens, 32), company(bench, ranks))


@KINDS
def test_vectors_of_images(kind: str) -> None:
    bench = CudaBench({"time": linear(0, 32, 40), "other": linear(1, 32, 24)}, kind, inverse(9, 32))

    def walk(ops: Any, x: Any) -> Any:
        return ops.biases(x, *bench.layers.values())

    check(bench, walk, inputs(bench, 3, IMAGES, 32), company(bench, (4, 9)))


@KINDS
@pytest.mark.parametrize("act", ["gelu", "silu"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_both_halves_of_a_gated_layer(kind: str, act: Any, apart: bool, fused: bool) -> None:
    """With one layer for hidden half and gate, and with two; ending in the 8 bits of the next one, and in floats."""
    layers = {"hidden": linear(0, 32, 48), "gate": linear(1, 32, 48)} if apart else {"both": linear(0, 32, 96)}
    bench = CudaBench(layers, kind, inverse(9, 32))
    out: Any = linear(5, 48, 16)
    if fused:
        out = Bench({"out": out}, STATIC, 4 * inverse(8, 48)).layers["out"]

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(ops.gated(x, *bench.layers.values(), act=act, to=out), out)

    x, rows = inputs(bench, 3, IMAGES, 9, 32), company(bench, (4, 17))
    if not fused:
        return check(bench, walk, x, rows)
    wanted = bench.expected(walk, x, rows)[0]
    bench.lowering.prepare(walk, tuple(x.shape))
    plain, own = bench.drawn(walk, x, [])[0], packed(bench, rows)
    found = bench.drawn(walk, x, own)[0]
    assert float((found - wanted).norm() / wanted.norm()) < 0.02, "but for halves between two levels"
    assert torch.equal(found[1], plain[1])
    if kind == STATIC:
        assert all(torch.equal(bench.drawn(walk, x[n : n + 1], [own[n]])[0][0], found[n]) for n in range(IMAGES))


@KINDS
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (2, 0)])
@pytest.mark.parametrize("act", ["silu", "relu"])
def test_convolutions_with_all_that_is_added(kind: str, stride: int, padding: int, act: Any) -> None:
    if kind == STATIC and not padding:
        pytest.skip("the 8-bit kernels pad on all sides")
    bench = CudaBench({"conv": conv(0, 16, 24, stride=stride, padding=padding)}, kind, inverse(9, 16))

    def walk(ops: Any, x: Any) -> Any:
        made = ops.conv(x, bench.layers["conv"], act=act)
        return made, ops.conv(x, bench.layers["conv"], residual=made)

    check(bench, walk, inputs(bench, 3, IMAGES, 6, 8, 16), company(bench, (4, 2)))


@KINDS
@pytest.mark.parametrize("cut", [False, True])
def test_convolutions_of_a_doubled_map(kind: str, cut: bool) -> None:
    bench = CudaBench({"conv": conv(0, 16, 16)}, kind, inverse(9, 16))

    def walk(ops: Any, x: Any) -> Any:
        like = normal(1, IMAGES, 5, 8, 1) if cut else None
        return ops.upsample(x, bench.layers["conv"], target=like)

    bench.lowering.prepare(lambda ops, x: ops.upsample(x, bench.layers["conv"]), (1, 3, 4, 16))
    x, rows = inputs(bench, 3, IMAGES, 3, 4, 16), company(bench, (4, 2))
    wanted, plain = bench.expected(walk, x, rows)[0], bench.drawn(walk, x, [])[0]
    without = bench.expected(walk, x, [[]] * IMAGES)[0]
    own = packed(bench, rows)
    found = bench.drawn(walk, x, own)[0]
    # In 8 bits the summed taps are rounded anew: the shares are compared.
    check_close(found - plain, wanted - without, relative=1e-4, least=1e-4)
    assert torch.equal(found[1], plain[1])


@KINDS
def test_maps_into_slots(kind: str) -> None:
    """As concatenated later: results and inputs lie side by side in wider pixels."""
    layers = {"conv": conv(0, 16, 8), "point": point(1, 16, 24)}
    bench = CudaBench({"conv": layers["conv"]}, kind, inverse(9, 16))
    bench.floats["point"] = bench.layers["point"] = layers["point"]
    bench.lowering = CudaLowering(torch.float32, IMAGES + 1, nn.ModuleDict(bench.layers))

    def walk(ops: Any, x: Any) -> Any:
        left, right = ops.joint(x, (8, 24), 0)
        made = ops.conv(x, bench.layers["conv"], out=left)
        return made, ops.linear(x, bench.layers["point"], out=right)

    x, rows = inputs(bench, 3, IMAGES, 6, 4, 16), company(bench, (4, 2))
    if kind == FLOATS:
        check(bench, walk, x, rows)
    else:
        bench.lowering.prepare(walk, tuple(x.shape))
        conv_alone = bench.drawn(walk, x, packed(bench, rows))[0]
        assert conv_alone.shape == (IMAGES, 6, 4, 8)


@settings(max_examples=25)
@given(st.data())
def test_any_rows_get_any_adapters(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([FLOATS, STATIC]))
    channels, tokens = 4 * data.draw(st.integers(1, 9)), data.draw(st.integers(1, 14))
    widths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    layers = {f"l{n}": linear(n, channels, width) for n, width in enumerate(widths)}
    bench = CudaBench(layers, kind, inverse(9, channels))
    shares = st.lists(st.sampled_from([*bench.layers]), min_size=1, unique=True)
    adapters = [
        bench.factors(100 * n, data.draw(st.integers(1, 33)), names)
        for n, names in enumerate(data.draw(st.lists(shares, min_size=1, max_size=4)))
    ]
    use = st.tuples(st.sampled_from(adapters), st.floats(-2, 2, width=32))
    rows = data.draw(st.lists(st.lists(use, max_size=3), min_size=1, max_size=5))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, *bench.layers.values())

    check(bench, walk, inputs(bench, 3, len(rows), tokens, channels), rows)


@KINDS
def test_a_recorded_graph_runs_any_adapters_of_its_shape(kind: str) -> None:
    """Recorded with none, it is replayed for every mixture, also of adapters that came later."""
    bench = CudaBench({"a": linear(0, 32, 48)}, kind, inverse(9, 32))
    bench.floats["b"] = bench.layers["b"] = linear(1, 48, 16)
    bench.lowering = CudaLowering(torch.float32, IMAGES + 1, nn.ModuleDict(bench.layers))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(ops.linear(x, bench.layers["a"]), bench.layers["b"])

    x = inputs(bench, 3, IMAGES, 5, 32)
    bench.lowering.prepare(walk, tuple(x.shape))
    run = bench.lowering.lower(walk, "walk")
    first, second = packed(bench, [[(bench.factors(1, 4, ["a", "b"]), 1.0)], [(bench.factors(7, 9, ["b"]), 0.5)]])
    with torch.inference_mode(), bench.lowering.adapted([first, second]):
        shape = bench.lowering.branch_shape
    assert shape is not None and bench.lowering.branch_shape is None
    with torch.inference_mode(), bench.lowering.adapted_like(shape):
        graph = CapturedGraph(run, (x,), {}, Tape())
    third = packed(bench, [[(bench.factors(20, 30, ["a"]), -1.0)]])[0]
    for rows in ([first, second], [[], third, first, second], [[], [], third], [first] * 4):
        with torch.inference_mode(), bench.lowering.adapted(rows):
            assert bench.lowering.branch_shape == shape
            replayed = graph(x)[0].clone()
            assert torch.equal(replayed, run(x)[0])
        assert not torch.equal(replayed, bench.drawn(walk, x, [])[0])


def test_shapes_of_batches_are_few() -> None:
    """Numbers of adapters and ranks are rounded up; layers that any adapter had stay."""
    bench = CudaBench({"a": linear(0, 32, 48), "b": linear(1, 32, 16)}, FLOATS, inverse(9, 32))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, bench.layers["a"]), ops.linear(x, bench.layers["b"])

    bench.lowering.prepare(walk, (1, 3, 32))
    wanted = bench.factors(1, 4, ["a"]), bench.factors(3, 40, ["b"]), bench.factors(5, 4, ["a", "b"])
    small, large, both = (bench.lowering.pack_branches(factors) for factors in wanted)
    found = []
    for rows in ([[(small, 1.0)]], [[], [(small, 2.0)]], [[(small, 1.0), (large, 1.0)] * 2], [[(both, 1.0)]]):
        with bench.lowering.adapted(rows):
            found.append(bench.lowering.branch_shape)
    assert found == [(1, 32, 0b01), (1, 32, 0b01), (4, 64, 0b11), (1, 32, 0b11)]


@pytest.mark.parametrize(("down", "up"), [((4, 31), (16, 4)), ((4, 32), (15, 4)), ((4, 32), (16, 3))])
def test_a_factor_that_does_not_fit_is_refused_with_its_layer(down: Any, up: Any) -> None:
    bench = CudaBench({"a": linear(0, 32, 16), "b": linear(1, 32, 16)}, FLOATS, inverse(9, 32))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, *bench.layers.values())

    bench.lowering.prepare(walk, (1, 3, 32))
    with pytest.raises(ValueError, match=r"^layer b: its branch does not fit"):
        bench.lowering.pack_branches({"b": LowRank(torch.zeros(down), torch.zeros(up), 1.0)})
    with pytest.raises(ValueError, match=r"^layer c: the kernels do not run it"):
        bench.lowering.pack_branches({"c": LowRank(torch.zeros(4, 32), torch.zeros(16, 4), 1.0)})


def test_more_rows_than_there_is_room_for_are_refused() -> None:
    bench = CudaBench({"a": linear(0, 32, 16)}, FLOATS, inverse(9, 32))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, bench.layers["a"])

    bench.lowering.prepare(walk, (1, 3, 32))
    ((one, _),) = packed(bench, [[(bench.factors(1, 4, ["a"]), 1.0)]])[0]
    with pytest.raises(ValueError, match="adapters of 6 rows, and there is room for 5"):
        bench.drawn(walk, normal(0, 5, 3, 32), [[(one, 1.0)]] * 6)
    with pytest.raises(ValueError, match="6 rows, and there is room for adapters of 5"):
        bench.drawn(walk, normal(0, 6, 3, 32), [[(one, 1.0)]])


@pytest.mark.usefixtures("young")
def test_the_last_adapters_are_let_go() -> None:
    bench = CudaBench({"a": linear(0, 32, 16)}, FLOATS, inverse(9, 32))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, bench.layers["a"])

    x = normal(0, 2, 3, 32)
    bench.lowering.prepare(walk, (1, 3, 32))
    plain = bench.drawn(walk, x, [])
    one = bench.lowering.pack_branches(bench.factors(1, 4, ["a"]))
    gone = weakref.ref(one)
    bench.drawn(walk, x, [[(one, 1.0)], []])
    del one
    bench.lowering.clear_branches()
    gc.collect()
    assert gone() is None
    assert torch.equal(bench.drawn(walk, x, [])[0], plain[0])
