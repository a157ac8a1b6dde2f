"""Low-rank branches on both lowerings: as torch computes them, by rows, and the same bits in any company."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.cuda_graphs import CapturedGraph
from core.ops.branches import LowRank, branch
from core.ops.cpu import CpuLowering
from core.ops.cuda import CudaLowering
from core.ops.ops import Walk
from core.ops.reference import TorchLowering
from core.quant.dynamic import Int8DynamicConv2d, Int8DynamicLinear, quantize_rows
from tests.core.ops.stage import between, conv, eight, inverse, linear, point
from tests.core.quant.stage import check_close, kernels, normal, threads
from tests.core.tape import Tape

IMAGES = 4
FLOATS, STATIC, DYNAMIC = "floats", "static", "dynamic"
Factors = Mapping[str, LowRank]
Rows = Sequence[Sequence[tuple[Factors, float]]]
Packed = Sequence[Sequence[tuple[Any, float]]]


class Bench:
    """A walk over named layers, on a lowering and on torch with hooks that add branches."""

    def __init__(
        self, on: str, kind: str, layers: Mapping[str, nn.Module], channels: int = 32, *, by: Tensor | None = None
    ) -> None:
        """`layers` in floats all read the input, whose channels `by` quantizes in the kind static."""
        self.on, self.kind, self.floats = on, kind, dict(layers)
        self.by = inverse(9, channels) if by is None else by
        self.layers: dict[str, Any] = {name: self._quantized(layer) for name, layer in layers.items()}
        self.lower()

    def lower(self, **options: Any) -> None:
        model = nn.ModuleDict(self.layers)
        self.lowering: Any = (
            CpuLowering(kernels(), model, **options)
            if self.on == "cpu"
            else CudaLowering(torch.float32, IMAGES + 1, model)
        )

    def _quantized(self, layer: Any) -> Any:
        if self.kind == STATIC:
            return eight(layer, self.by)
        if self.kind == DYNAMIC:
            return (Int8DynamicLinear if isinstance(layer, nn.Linear) else Int8DynamicConv2d).scaled(layer, None)
        return layer

    def walk(self, ops: Any, x: Any) -> Any:
        """All layers, side by side."""
        return ops.linear(x, *self.layers.values())

    def inputs(self, *shape: int) -> Tensor:
        return between(3, self.by, *shape) if self.kind == STATIC else normal(3, *shape)

    def factors(self, seed: int, rank: int, names: Sequence[str]) -> dict[str, LowRank]:
        """A random adapter, whose branches are as large as the layers' own results."""
        made = {}
        for number, name in enumerate(names):
            weight: Any = self.floats[name].weight
            down = normal(seed + 2 * number, rank, *weight.shape[1:], scale=weight[0].numel() ** -0.5)
            up = normal(seed + 2 * number + 1, weight.shape[0], rank, *[1] * (weight.dim() - 2))
            made[name] = LowRank(down, up, 0.5)
        return made

    def expected(self, walk: Walk, x: Tensor, rows: Rows) -> tuple[Tensor, ...]:
        """On torch, with the inputs that the quantized layers read."""

        def add(name: str, layer: Any, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
            read = self._read(given[0], layer)
            made = made.clone()
            for row, uses in enumerate(rows):
                for factors, scale in uses:
                    if name in factors:
                        own = factors[name]
                        made[row : row + 1] += branch(self.floats[name], read[row : row + 1], own, own.scale * scale)
            return made

        hooks = [layer.register_forward_hook(partial(add, name)) for name, layer in self.layers.items()]
        try:
            return TorchLowering(torch.float32).lower(walk, "walk")(x)
        finally:
            for hook in hooks:
                hook.remove()

    def _read(self, x: Tensor, layer: Any) -> Tensor:
        last = x if x.dim() != 4 else x.permute(0, 2, 3, 1)
        if self.kind == STATIC:
            last = (last * self.by).round().clamp(-127, 127) / self.by
        elif self.kind == DYNAMIC:
            levels, scale = quantize_rows(last)
            last = levels.float() * scale
        return last if x.dim() != 4 else last.permute(0, 3, 1, 2)

    @torch.inference_mode()
    def drawn(self, walk: Walk, x: Tensor, rows: Packed) -> list[Tensor]:
        with self.lowering.adapted(rows):
            return [out.clone() for out in self.lowering.lower(walk, "walk")(x)]

    def pack(self, rows: Rows) -> Packed:
        packed: dict[int, Any] = {}
        for uses in rows:
            packed |= {id(f): self.lowering.pack_branches(f) for f, _ in uses if id(f) not in packed}
        return [[(packed[id(factors)], scale) for factors, scale in uses] for uses in rows]

    def company(self, ranks: tuple[int, int]) -> Rows:
        """Rows with one adapter, with none, with two, and with the second at another scale."""
        names = list(self.layers)
        first, second = self.factors(10, ranks[0], names), self.factors(50, ranks[1], names[-1:])
        return [[(first, 1.0)], [], [(second, 0.3), (first, -1.0)], [(second, 2.0)]]

    def check(self, walk: Walk, x: Tensor, rows: Rows) -> None:
        """As torch; and each row has the bits that it has alone, as without branches where it gets none."""
        expected, none = self.expected(walk, x, rows), [[]] * len(rows)  # first: a lowering may lay weights out anew
        self.lowering.prepare(walk, tuple(x.shape))
        plain, own = self.drawn(walk, x, none), self.pack(rows)
        together = self.drawn(walk, x, own)
        with threads(2):
            assert self.on == "cuda" or all(map(torch.equal, self.drawn(walk, x, own), together))
        for result, wanted in zip(together, expected, strict=True):
            check_close(result, wanted, relative=1e-4)
        # A product of torch itself, in floats, may have other bits at another number of rows.
        exact = self.on == "cpu" or self.kind == STATIC
        for row, uses in enumerate(own):
            alone = self.drawn(walk, x[row : row + 1], [uses])
            for result, single, without in zip(together, alone, plain, strict=True):
                torch.testing.assert_close(result[row], single[0], rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4)
                assert uses or torch.equal(result[row], without[row]), f"row {row} gets none"
        assert all(map(torch.equal, self.drawn(walk, x, none), plain)), "nothing is left behind"


def one_layer(*, prepared: tuple[int, ...] = (1, 3, 32), on: str = "cpu") -> Bench:
    """One small layer in floats."""
    small = Bench(on, FLOATS, {"a": linear(0, 32, 16)})
    small.lowering.prepare(small.walk, prepared)
    return small


BOTH = pytest.mark.parametrize("on", ["cpu", "cuda"])
ON_CUDA = [("cuda", FLOATS), ("cuda", STATIC)]
EACH = [("cpu", FLOATS), ("cpu", STATIC), ("cpu", DYNAMIC), *ON_CUDA]
KINDS = pytest.mark.parametrize(("on", "kind"), EACH)
CUDA_KINDS = pytest.mark.parametrize(("on", "kind"), ON_CUDA)


@KINDS
def test_vectors_of_images(on: str, kind: str) -> None:
    bench = Bench(on, kind, {"time": linear(0, 32, 40), "other": linear(1, 32, 24)})

    bench.check(lambda ops, x: ops.biases(x, *bench.layers.values()), bench.inputs(IMAGES, 32), bench.company((4, 9)))


def gated(on: str, kind: str, apart: bool, act: Any, out: Any) -> tuple[Bench, Walk]:
    """With two layers for hidden half and gate, or with one."""
    layers = {"hidden": linear(0, 32, 48), "gate": linear(1, 32, 48)} if apart else {"both": linear(0, 32, 96)}
    bench = Bench(on, kind, layers)

    return bench, lambda ops, x: ops.linear(ops.gated(x, *bench.layers.values(), act=act, to=out), out)


@KINDS
@pytest.mark.parametrize("act", ["gelu", "silu"])
@pytest.mark.parametrize("apart", [False, True])
def test_both_halves_of_a_gated_layer(on: str, kind: str, act: Any, apart: bool) -> None:
    bench, walk = gated(on, kind, apart, act, linear(5, 48, 16))
    bench.check(walk, bench.inputs(IMAGES, 9, 32), bench.company((4, 17)))


@CUDA_KINDS
@pytest.mark.parametrize("act", ["gelu", "silu"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_gated_layer_that_ends_in_the_next_ones_bytes(on: str, kind: str, act: Any, apart: bool) -> None:
    bench, walk = gated(on, kind, apart, act, eight(linear(5, 48, 16), 4 * inverse(8, 48)))
    x, rows = bench.inputs(IMAGES, 9, 32), bench.company((4, 17))
    wanted = bench.expected(walk, x, rows)[0]
    bench.lowering.prepare(walk, tuple(x.shape))
    plain, own = bench.drawn(walk, x, [])[0], bench.pack(rows)
    together = bench.drawn(walk, x, own)[0]
    assert float((together - wanted).norm() / wanted.norm()) < 0.02, "but for halves between two levels"
    assert torch.equal(together[1], plain[1])
    if kind == STATIC:
        assert all(torch.equal(bench.drawn(walk, x[n : n + 1], [own[n]])[0][0], together[n]) for n in range(IMAGES))


@pytest.mark.parametrize(
    ("on", "kind", "stride", "padding"),
    [
        (on, kind, stride, padding)
        for on, kind in EACH
        for stride, padding in ((1, 1), (2, 1), (2, 0))
        if (on, kind, padding) != ("cuda", STATIC, 0)  # the 8-bit kernels there pad on all sides
    ],
)
@pytest.mark.parametrize("act", ["silu", "relu"])
def test_convolutions_with_all_that_is_added(on: str, kind: str, stride: int, padding: int, act: Any) -> None:
    bench = Bench(on, kind, {"conv": conv(0, 16, 24, stride=stride, padding=padding)}, 16)

    def walk(ops: Any, x: Any) -> Any:
        made = ops.conv(x, bench.layers["conv"], act=act)
        return made, ops.conv(x, bench.layers["conv"], residual=made)

    bench.check(walk, bench.inputs(IMAGES, 6, 8, 16), bench.company((4, 2)))


@KINDS
@pytest.mark.parametrize("cut", [False, True])
def test_convolutions_of_a_doubled_map(on: str, kind: str, cut: bool) -> None:
    bench = Bench(on, kind, {"conv": conv(0, 16, 16)}, 16)

    def whole(ops: Any, x: Any) -> Any:
        return ops.upsample(x, bench.layers["conv"])

    def walk(ops: Any, x: Any) -> Any:
        return ops.upsample(x, bench.layers["conv"], target=normal(1, IMAGES, 5, 8, 1)) if cut else whole(ops, x)

    x, rows = bench.inputs(IMAGES, 3, 4, 16), bench.company((4, 2))
    if on == "cpu":
        return bench.check(whole, x, rows)
    bench.lowering.prepare(whole, (1, 3, 4, 16))
    wanted, plain = bench.expected(walk, x, rows)[0], bench.drawn(walk, x, [])[0]
    without = bench.expected(walk, x, [[]] * IMAGES)[0]
    together = bench.drawn(walk, x, bench.pack(rows))[0]
    # In 8 bits the summed taps are rounded anew: the shares are compared.
    check_close(together - plain, wanted - without, relative=1e-4, least=1e-4)
    assert torch.equal(together[1], plain[1])


@CUDA_KINDS
def test_maps_into_slots(on: str, kind: str) -> None:
    """As concatenated later: results and inputs lie side by side in wider pixels."""
    bench = Bench(on, kind, {"conv": conv(0, 16, 8)}, 16)
    bench.floats["point"] = bench.layers["point"] = point(1, 16, 24)
    bench.lower()

    def walk(ops: Any, x: Any) -> Any:
        left, right = ops.joint(x, (8, 24), 0)
        made = ops.conv(x, bench.layers["conv"], out=left)
        return made, ops.linear(x, bench.layers["point"], out=right)

    x, rows = bench.inputs(IMAGES, 6, 4, 16), bench.company((4, 2))
    if kind == FLOATS:
        return bench.check(walk, x, rows)
    bench.lowering.prepare(walk, tuple(x.shape))
    assert bench.drawn(walk, x, bench.pack(rows))[0].shape == (IMAGES, 6, 4, 8)


def test_a_layer_over_two_arrays_gets_both_shares() -> None:
    bench = Bench("cpu", FLOATS, {"first": linear(1, 24, 8), "pair": linear(0, 32, 24)})

    def walk(ops: Any, x: Any) -> Any:
        other = ops.linear(x, bench.layers["first"], act="silu")
        return ops.linear(ops.cat(x, other), bench.layers["pair"])

    bench.check(walk, normal(3, IMAGES, 5, 24), bench.company((4, 2)))


def test_weights_in_bf16_leave_branches_in_fp32() -> None:
    layer = linear(0, 32, 24)
    layer.weight.data = layer.weight.data.bfloat16().float()
    bench = Bench("cpu", FLOATS, {"a": layer})
    bench.lower(half=True)
    bench.check(bench.walk, normal(3, IMAGES, 7, 32), bench.company((4, 16)))


@settings(max_examples=100)
@given(st.data())
def test_any_rows_get_any_adapters(data: st.DataObject) -> None:
    """Of layers side by side, each row is what it is alone, whatever adapters, scales and ranks the others have.

    Scales of channels may differ a thousandfold: a branch of one matrix of levels would lose a hundred times as much.
    """
    on, kind = data.draw(st.sampled_from(EACH))
    channels, tokens = 4 * data.draw(st.integers(1, 9)), data.draw(st.integers(1, 14))
    widths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    layers = {f"l{n}": linear(n, channels, width) for n, width in enumerate(widths)}
    bench = Bench(on, kind, layers, channels, by=data.draw(st.none() | st.just(torch.logspace(0, 3, channels))))
    some = st.lists(st.sampled_from([*bench.layers]), min_size=1, unique=True)
    adapters = [
        bench.factors(100 * n, data.draw(st.integers(1, 33)), names)
        for n, names in enumerate(data.draw(st.lists(some, min_size=1, max_size=4)))
    ]
    use = st.tuples(st.sampled_from(adapters), st.floats(-2, 2, width=32))
    rows = data.draw(st.lists(st.lists(use, max_size=3), min_size=1, max_size=5))

    def walk(ops: Any, x: Any) -> Any:
        made = bench.walk(ops, x)
        return made, ops.linear(x, *bench.layers.values(), residual=made, act="relu")

    bench.check(walk, bench.inputs(len(rows), tokens, channels), rows)


@CUDA_KINDS
def test_a_recorded_graph_runs_any_adapters_of_its_shape(on: str, kind: str) -> None:
    """Recorded with none, it is replayed for every mixture, also of adapters that came later."""
    bench = Bench(on, kind, {"a": linear(0, 32, 48)})
    bench.floats["b"] = bench.layers["b"] = linear(1, 48, 16)
    bench.lower()

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(ops.linear(x, bench.layers["a"]), bench.layers["b"])

    x = bench.inputs(IMAGES, 5, 32)
    bench.lowering.prepare(walk, tuple(x.shape))
    run = bench.lowering.lower(walk, "walk")
    first, second = bench.pack([[(bench.factors(1, 4, ["a", "b"]), 1.0)], [(bench.factors(7, 9, ["b"]), 0.5)]])
    with torch.inference_mode(), bench.lowering.adapted([first, second]):
        shape = bench.lowering.branch_shape
    assert shape is not None and bench.lowering.branch_shape is None
    with torch.inference_mode(), bench.lowering.adapted_like(shape):
        graph = CapturedGraph(run, (x,), {}, Tape())
    third = bench.pack([[(bench.factors(20, 30, ["a"]), -1.0)]])[0]
    for rows in ([first, second], [[], third, first, second], [[], [], third], [first] * 4):
        with torch.inference_mode(), bench.lowering.adapted(rows):
            assert bench.lowering.branch_shape == shape
            replayed = graph(x)[0].clone()
            assert torch.equal(replayed, run(x)[0])
        assert not torch.equal(replayed, bench.drawn(walk, x, [])[0])


def test_shapes_of_batches_are_few() -> None:
    """Numbers of adapters and ranks are rounded up; layers that any adapter had stay."""
    bench = Bench("cuda", FLOATS, {"a": linear(0, 32, 48), "b": linear(1, 32, 16)})

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


@BOTH
@pytest.mark.parametrize(("down", "up"), [((4, 31), (16, 4)), ((4, 32), (15, 4)), ((4, 32), (16, 3))])
def test_a_factor_that_does_not_fit_is_refused_with_its_layer(on: str, down: Any, up: Any) -> None:
    bench = Bench(on, FLOATS, {"a": linear(0, 32, 16), "b": linear(1, 32, 16)})
    bench.lowering.prepare(bench.walk, (1, 3, 32))
    with pytest.raises(ValueError, match=r"^layer b: its branch does not fit"):
        bench.lowering.pack_branches({"b": LowRank(torch.zeros(down), torch.zeros(up), 1.0)})
    if on == "cuda":
        with pytest.raises(ValueError, match=r"^layer c: the kernels do not run it"):
            bench.lowering.pack_branches({"c": LowRank(torch.zeros(4, 32), torch.zeros(16, 4), 1.0)})


@pytest.mark.parametrize(
    ("on", "rows", "images", "message"),
    [
        ("cpu", 2, 3, r"^adapters of 2 rows do not fit a batch of 3"),
        ("cuda", 6, 5, "adapters of 6 rows, and there is room for 5"),
        ("cuda", 1, 6, "6 rows, and there is room for adapters of 5"),
    ],
)
def test_rows_of_another_number_than_the_batch_are_refused(on: str, rows: int, images: int, message: str) -> None:
    small = one_layer(on=on)
    own = small.pack([[(small.factors(1, 4, ["a"]), 1.0)]]) * rows
    with pytest.raises(ValueError, match=message):
        small.drawn(small.walk, normal(0, images, 3, 32), own)


@BOTH
def test_programs_do_not_keep_adapters(on: str) -> None:
    """Nor does a batch without any meet what is left of them."""
    small, x = one_layer(on=on), normal(0, 2, 3, 32)
    (plain,) = small.drawn(small.walk, x, [[], []])
    packed = small.lowering.pack_branches(small.factors(1, 4, ["a"]))
    gone = weakref.ref(packed)
    small.drawn(small.walk, x, [[(packed, 1.0)], []])
    del packed
    small.lowering.clear_branches()
    gc.collect()
    assert gone() is None
    assert torch.equal(small.drawn(small.walk, x, [[], []])[0], plain)


def test_adapters_stay_when_another_thread_lets_go_of_the_last() -> None:
    class Raced(CpuLowering):
        """What a release on the engine's thread does at the worst moment: the last ones are gone after each look."""

        _kept: Any = None

        @property
        def _last(self) -> Any:
            found, self._kept = self._kept, None
            return found

        @_last.setter
        def _last(self, value: Any) -> None:
            self._kept = value

    small, x = one_layer(), normal(0, 2, 3, 32)
    small.lowering = Raced(kernels(), nn.ModuleDict(small.layers))
    small.lowering.prepare(small.walk, (1, 3, 32))
    rows = small.pack([[(small.factors(1, 4, ["a"]), 1.0)], []])
    first, second = (small.drawn(small.walk, x, rows)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, small.drawn(small.walk, x, [[], []])[0])
