"""Low-rank branches on the CPU kernels: as torch computes them, by rows, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.ops.branches import LowRank, PackedBranches, branch
from core.ops.cpu import CpuLowering
from core.ops.ops import Walk
from core.ops.reference import TorchLowering
from core.quant.dynamic import Int8DynamicConv2d, Int8DynamicLinear, quantize_rows
from tests.core.ops.stage import between, conv, eight, inverse, linear
from tests.core.quant.stage import check_close, kernels, normal, seeded, threads

IMAGES = 4
FLOATS, STATIC, DYNAMIC = "floats", "static", "dynamic"
Factors = Mapping[str, LowRank]
Rows = Sequence[Sequence[tuple[Factors, float]]]


class Bench:
    """A walk over named layers, on the kernels and on torch with hooks that add branches."""

    def __init__(self, layers: Mapping[str, nn.Module], kind: str, by: Tensor, *, half: bool = False) -> None:
        """`layers` in floats all read the input, which `by` quantizes in the kind static."""
        self.floats = dict(layers)
        self.kind, self.by = kind, by
        self.layers: dict[str, Any] = {name: self._made(layer) for name, layer in layers.items()}
        self.lowering = CpuLowering(kernels(), nn.ModuleDict(self.layers), half=half)

    def _made(self, layer: Any) -> Any:
        if self.kind == STATIC:
            return eight(layer, self.by)
        if self.kind == DYNAMIC:
            return (Int8DynamicLinear if isinstance(layer, nn.Linear) else Int8DynamicConv2d).scaled(layer, None)
        return layer

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

    def drawn(self, walk: Walk, x: Tensor, rows: Sequence[Sequence[tuple[PackedBranches, float]]]) -> list[Tensor]:
        with self.lowering.adapted(rows):
            return [out.clone() for out in self.lowering.lower(walk, "walk")(x)]


def check(bench: Bench, walk: Walk, x: Tensor, rows: Rows) -> None:
    """As torch; and each row has the bits that it has alone, as without branches where it gets none."""
    bench.lowering.prepare(walk, tuple(x.shape))
    plain = bench.drawn(walk, x, [[]] * len(rows))
    packed: dict[int, PackedBranches] = {}
    for uses in rows:
        packed |= {id(f): bench.lowering.pack_branches(f) for f, _ in uses if id(f) not in packed}
    own = [[(packed[id(factors)], scale) for factors, scale in uses] for uses in rows]
    found = bench.drawn(walk, x, own)
    for made, wanted in zip(found, bench.expected(walk, x, rows), strict=True):
        check_close(made, wanted, relative=1e-4)
    for row, uses in enumerate(own):
        alone = bench.drawn(walk, x[row : row + 1], [uses])
        for made, one, without in zip(found, alone, plain, strict=True):
            assert torch.equal(made[row], one[0]), f"row {row} depends on others"
            assert uses or torch.equal(made[row], without[row]), f"row {row} gets none"
    for again, before in zip(bench.drawn(walk, x, [[]] * len(rows)), plain, strict=True):
        assert torch.equal(again, before), "nothing is left behind"


def inputs(bench: Bench, seed: int, *shape: int) -> Tensor:
    return between(seed, bench.by, *shape) if bench.kind == STATIC else normal(seed, *shape)


def company(bench: Bench, ranks: tuple[int, int]) -> Rows:
    """Rows with one adapter, with none, with two, and with the second at another scale."""
    names = list(bench.layers)
    first, second = bench.factors(10, ranks[0], names), bench.factors(50, ranks[1], names[-1:])
    return [[(first, 1.0)], [], [(second, 0.3), (first, -1.0)], [(second, 2.0)]]


KINDS = pytest.mark.parametrize("kind", [FLOATS, STATIC, DYNAMIC])


@KINDS
@pytest.mark.parametrize("widths", [(48, 16), (20, 12), (7,), (64,)])
@pytest.mark.parametrize(("tokens", "ranks"), [(1, (4, 16)), (5, (8, 3)), (31, (1, 20))])
def test_layers_side_by_side(kind: str, widths: Sequence[int], tokens: int, ranks: tuple[int, int]) -> None:
    bench = Bench({f"l{n}": linear(n, 32, width) for n, width in enumerate(widths)}, kind, inverse(9, 32))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, *bench.layers.values())

    check(bench, walk, inputs(bench, 3, IMAGES, tokens, 32), company(bench, ranks))


@KINDS
def test_vectors_of_images(kind: str) -> None:
    bench = Bench({"time": linear(0, 32, 40), "other": linear(1, 32, 24)}, kind, inverse(9, 32))

    def walk(ops: Any, x: Any) -> Any:
        return ops.biases(x, *bench.layers.values())

    check(bench, walk, inputs(bench, 3, IMAGES, 32), company(bench, (4, 9)))


@KINDS
@pytest.mark.parametrize("act", ["gelu", "silu"])
@pytest.mark.parametrize("apart", [False, True])
def test_both_halves_of_a_gated_layer(kind: str, act: Any, apart: bool) -> None:
    """With one layer for hidden half and gate, and with two."""
    layers = {"hidden": linear(0, 32, 48), "gate": linear(1, 32, 48)} if apart else {"both": linear(0, 32, 96)}
    bench, out = Bench(layers, kind, inverse(9, 32)), linear(5, 48, 16)

    def walk(ops: Any, x: Any) -> Any:
        return ops.gated(x, *bench.layers.values(), act=act, to=out)

    check(bench, walk, inputs(bench, 3, IMAGES, 9, 32), company(bench, (4, 17)))


@KINDS
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (2, 0)])
def test_convolutions_with_all_that_is_added(kind: str, stride: int, padding: int) -> None:
    bench = Bench({"conv": conv(0, 16, 24, stride=stride, padding=padding)}, kind, inverse(9, 16))

    def walk(ops: Any, x: Any) -> Any:
        made = ops.conv(x, bench.layers["conv"], act="silu")
        return made, ops.conv(x, bench.layers["conv"], residual=made)

    check(bench, walk, inputs(bench, 3, IMAGES, 6, 8, 16), company(bench, (4, 2)))


@KINDS
def test_convolutions_of_a_doubled_map(kind: str) -> None:
    bench = Bench({"conv": conv(0, 16, 16)}, kind, inverse(9, 16))

    def walk(ops: Any, x: Any) -> Any:
        return ops.upsample(x, bench.layers["conv"])

    check(bench, walk, inputs(bench, 3, IMAGES, 3, 4, 16), company(bench, (4, 2)))


def test_a_layer_over_two_arrays_gets_both_shares() -> None:
    bench = Bench({"first": linear(1, 24, 8), "pair": linear(0, 32, 24)}, FLOATS, inverse(9, 32))

    def walk(ops: Any, x: Any) -> Any:
        other = ops.linear(x, bench.layers["first"], act="silu")
        return ops.linear(ops.cat(x, other), bench.layers["pair"])

    check(bench, walk, normal(3, IMAGES, 5, 24), company(bench, (4, 2)))


def test_weights_in_bf16_leave_branches_in_fp32() -> None:
    layer = linear(0, 32, 24)
    layer.weight.data = layer.weight.data.bfloat16().float()
    bench = Bench({"a": layer}, FLOATS, inverse(9, 32), half=True)

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, layer)

    check(bench, walk, normal(3, IMAGES, 7, 32), company(bench, (4, 16)))


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    bench = Bench({"a": linear(0, 64, 96)}, STATIC, inverse(9, 64))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, bench.layers["a"])

    x, rows = inputs(bench, 3, IMAGES, 33, 64), company(bench, (8, 4))
    bench.lowering.prepare(walk, tuple(x.shape))
    own = [[(bench.lowering.pack_branches(factors), scale) for factors, scale in uses] for uses in rows]
    made = []
    for count in (1, 2, 3):
        with threads(count):
            made += bench.drawn(walk, x, own)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


@settings(max_examples=40)
@given(st.data())
def test_any_rows_get_any_adapters(data: st.DataObject) -> None:
    """Each row is what it is alone, whichever adapters, scales and ranks the others have, and as torch computes it."""
    kind = data.draw(st.sampled_from([FLOATS, STATIC, DYNAMIC]))
    channels, tokens = 4 * data.draw(st.integers(1, 9)), data.draw(st.integers(1, 14))
    widths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    bench = Bench({f"l{n}": linear(n, channels, width) for n, width in enumerate(widths)}, kind, inverse(9, channels))
    adapters = [
        bench.factors(100 * n, data.draw(st.integers(1, 33)), names)
        for n, names in enumerate(
            data.draw(
                st.lists(st.lists(st.sampled_from([*bench.layers]), min_size=1, unique=True), min_size=1, max_size=4)
            )
        )
    ]
    use = st.tuples(st.sampled_from(adapters), st.floats(-2, 2, width=32))
    rows = data.draw(st.lists(st.lists(use, max_size=3), min_size=1, max_size=5))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, *bench.layers.values())

    check(bench, walk, inputs(bench, 3, len(rows), tokens, channels), rows)


def test_quantized_branches_keep_fifteen_bits_of_large_and_of_small_inputs() -> None:
    """Of channels whose scales differ a thousandfold: one matrix of levels would lose a hundred times as much."""
    by = torch.logspace(0, 3, 64)[torch.randperm(64, generator=seeded(0))]
    bench = Bench({"a": linear(0, 64, 32)}, STATIC, by)

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, bench.layers["a"])

    x, factors = inputs(bench, 3, 1, 40, 64), bench.factors(10, 8, ["a"])
    bench.lowering.prepare(walk, tuple(x.shape))
    packed = bench.lowering.pack_branches(factors)
    (plain,), (made,) = bench.drawn(walk, x, [[]]), bench.drawn(walk, x, [[(packed, 1.0)]])
    own = factors["a"]
    wanted = branch(bench.floats["a"], bench._read(x, None), own, own.scale)
    assert float((made - plain - wanted).norm() / wanted.norm()) < 1e-4


def test_a_factor_that_does_not_fit_is_refused_with_its_layer() -> None:
    bench = Bench({"a": linear(0, 32, 16), "b": linear(1, 32, 16)}, FLOATS, inverse(9, 32))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, *bench.layers.values())

    bench.lowering.prepare(walk, (1, 3, 32))
    for down, up in (((4, 31), (16, 4)), ((4, 32), (15, 4)), ((4, 32), (16, 3))):
        bad = {"b": LowRank(torch.zeros(down), torch.zeros(up), 1.0)}
        with pytest.raises(ValueError, match=r"^layer b: its branch does not fit"):
            bench.lowering.pack_branches(bad)


def test_rows_of_another_number_than_the_batch_are_refused() -> None:
    bench = Bench({"a": linear(0, 32, 16)}, FLOATS, inverse(9, 32))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, bench.layers["a"])

    bench.lowering.prepare(walk, (1, 3, 32))
    packed = bench.lowering.pack_branches(bench.factors(1, 4, ["a"]))
    with pytest.raises(ValueError, match=r"^adapters of 2 rows do not fit a batch of 3"):
        bench.drawn(walk, normal(0, 3, 3, 32), [[(packed, 1.0)], []])


@pytest.mark.usefixtures("young")
def test_programs_do_not_keep_adapters() -> None:
    """Nor does a batch without any meet what is left of them."""
    import gc
    import weakref

    bench = Bench({"a": linear(0, 32, 16)}, FLOATS, inverse(9, 32))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, bench.layers["a"])

    x = normal(0, 2, 3, 32)
    bench.lowering.prepare(walk, (1, 3, 32))
    plain = bench.drawn(walk, x, [[], []])
    packed = bench.lowering.pack_branches(bench.factors(1, 4, ["a"]))
    gone = weakref.ref(packed)
    bench.drawn(walk, x, [[(packed, 1.0)], []])
    del packed
    bench.lowering.clear_branches()
    gc.collect()
    assert gone() is None
    assert torch.equal(bench.drawn(walk, x, [[], []])[0], plain[0])


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

    bench = Bench({"a": linear(0, 32, 16)}, FLOATS, inverse(9, 32))
    bench.lowering = Raced(kernels(), nn.ModuleDict(bench.layers))

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, bench.layers["a"])

    x = normal(0, 2, 3, 32)
    bench.lowering.prepare(walk, (1, 3, 32))
    rows = [[(bench.lowering.pack_branches(bench.factors(1, 4, ["a"])), 1.0)], []]
    first, second = (bench.drawn(walk, x, rows)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, bench.drawn(walk, x, [[], []])[0])
