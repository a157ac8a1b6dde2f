"""Programs that walks become: memory that is used again but never too early, bound inputs, threads, rows' own bits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.ops.cpu import CpuLowering
from core.ops.ops import Walk
from core.ops.packed import PackedLayer
from tests.core.ops.stage import conv, eight, inverse, linear, lowerings, run, through
from tests.core.quant.stage import Few, Several, check_close, kernels, normal


def lowering_of(*layers: nn.Module) -> CpuLowering:
    return CpuLowering(kernels(), nn.ModuleList(layers))


def on_torch(layers: Sequence[nn.Module], walk: Walk, *x: Tensor) -> tuple[Tensor, ...]:
    return run(lowerings(*layers)["torch"], walk, *x)


def buffers(lowering: CpuLowering) -> int:
    """Bytes of the one program's buffers."""
    (size,) = lowering.size_bytes[1].values()
    return size


def twice(layer: nn.Module) -> Walk:
    return lambda ops, x: ops.conv(ops.conv(x, layer), layer)


@pytest.mark.parametrize("int8", [False, True])
def test_a_chain_needs_its_input_and_two_buffers_however_long_it_is(int8: bool) -> None:
    """And one for what is quantized for a layer, which is given back behind it."""
    layers: list[Any] = [linear(seed, 16, 16) for seed in range(12)]
    layers = [eight(layer, inverse(seed, 16)) for seed, layer in enumerate(layers)] if int8 else layers

    def walk(ops: Any, x: Any) -> Any:
        for layer in layers:
            x = ops.linear(x, layer, act=None if int8 else "silu")
        return x

    lowering, x = lowering_of(*layers), normal(0, 5, 16)
    (y,) = run(lowering, walk, x)
    if not int8:
        check_close(y, on_torch(layers, walk, x)[0], relative=1e-5)
    assert buffers(lowering) == 3 * x.nbytes + (x.numel() if int8 else 0)


Step = tuple[Literal["square", "residual", "view", "pair", "drop"], Several, Several, Literal[0, 1, 2]]
Plan = Annotated[list[Step], st.lists(st.from_type(Step), min_size=1, max_size=25)]


@settings(max_examples=60)
@given(...)
def test_nothing_is_written_over_while_it_is_still_read(plan: Plan) -> None:
    """Any walk of layers, views, sums and concatenations; arrays, and the wholes of views, are dropped at any time."""
    square, double = [linear(seed, 8, 8) for seed in range(3)], [linear(seed, 8, 16) for seed in range(3, 5)]
    halves = linear(9, 16, 8)

    def walk(ops: Any, x: Any) -> Any:
        live = [x]
        del x
        for what, first, second, layer in plan:
            a, b = live[first % len(live)], live[second % len(live)]
            if what == "square":
                live.append(ops.linear(a, square[layer], act="silu"))
            elif what == "residual":
                live.append(ops.linear(a, square[layer], residual=ops.linear(b, square[0]), act="silu"))
            elif what == "view":
                live.append(ops.columns(ops.linear(a, double[layer % 2]), 8 * (layer // 2), 8))
            elif what == "pair":
                live.append(ops.linear(ops.cat(a, b), halves))
            elif len(live) > 1:
                live.pop(first % len(live))
            del a, b
        return tuple(live)

    layers, x = (*square, *double, halves), normal(1, 3, 8)
    lowering = lowering_of(*layers)
    for _ in range(2):
        for found, wanted in zip(run(lowering, walk, x), on_torch(layers, walk, x), strict=True):
            check_close(found, wanted, relative=1e-4)


def test_a_view_keeps_its_whole() -> None:
    """And gives it back with the last view."""
    wide, narrow, square = linear(0, 8, 24), linear(1, 24, 8), linear(2, 8, 8)

    def walk(ops: Any, x: Any) -> Any:
        part = ops.columns(ops.columns(ops.linear(x, wide), 4, 20), 6, 8)  # nothing else knows the whole
        h = ops.linear(ops.linear(x, wide), narrow)
        own = ops.linear(part, square, residual=h)
        del part, h
        return own, ops.linear(own, wide)

    layers, x = (wide, narrow, square), normal(0, 5, 8)
    lowering = lowering_of(*layers)
    for found, wanted in zip(run(lowering, walk, x), on_torch(layers, walk, x), strict=True):
        check_close(found, wanted, relative=1e-5)
    assert buffers(lowering) == (1 + 2 + 2 * 3) * x.nbytes, "the last wide result lies where the first lay"


def test_programs_share_their_memory_and_one_that_is_dropped_frees_it() -> None:
    layer = conv(0, 8, 8)
    walk = twice(layer)
    lowering, x = lowering_of(layer), normal(0, 2, 4, 4, 8)
    for _ in range(3):
        lowering.prepare(walk, tuple(x.shape))
    assert lowering.layers.blocks.size_bytes == 0 and not lowering.size_bytes[1]
    once, again = (lowering.lower(walk, name) for name in ("once", "again"))
    (wanted,) = once(x)
    assert torch.equal(again(x)[0], wanted) and torch.equal(once(x)[0], wanted)
    assert lowering.layers.blocks.size_bytes == 3 * x.nbytes
    assert lowering.size_bytes[1] == {("once", tuple(x.shape)): 3 * x.nbytes, ("again", tuple(x.shape)): 3 * x.nbytes}


def test_the_programs_that_were_used_last_are_kept_however_many_sizes_there_are() -> None:
    layer = conv(0, 8, 8)
    walk = twice(layer)
    lowering = CpuLowering(kernels(), nn.ModuleList([layer]), capacity=3)
    call = lowering.lower(walk, "map")
    maps = [normal(side, 1, side, side + 1, 8) for side in (10, 9, 8, 7, 6, 5, 4, 3, 2)]
    for number, x in enumerate(maps):
        (wanted,) = on_torch([layer], walk, x)
        check_close(call(x)[0], wanted, relative=1e-5)
        check_close(call(maps[0])[0], on_torch([layer], walk, maps[0])[0], relative=1e-5)
        held = {shape for _, shape in lowering.size_bytes[1]}
        assert held == {tuple(x.shape) for x in (maps[0], *maps[1 : number + 1][-2:])}, "the first is always in use"
    # Blocks of dropped programs are freed: three programs of three buffers each cannot hold more than their own.
    assert lowering.layers.blocks.size_bytes <= sum(lowering.size_bytes[1].values())


def test_rising_sizes_hold_no_more_than_twice_what_the_largest_needs() -> None:
    lowering = lowering_of(layer := conv(0, 8, 8))
    call = lowering.lower(twice(layer), "map")
    for side in range(3, 40):
        call(normal(side, 1, side, side, 8))
        assert lowering.layers.blocks.size_bytes <= 2 * max(lowering.size_bytes[1].values())
    assert len(lowering.size_bytes[1]) > 1


def test_the_first_result_is_the_callers_and_the_next_call_may_write_over_others() -> None:
    first, second = linear(0, 8, 8), linear(1, 8, 8)

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(x, first), ops.linear(x, second)

    run_ = lowering_of(first, second).lower(walk, "two")
    x = normal(0, 3, 8)
    own, lent = run_(x)
    kept = own.clone(), lent.clone()
    run_(2 * x)
    assert torch.equal(own, kept[0]) and not torch.equal(lent, kept[1])


def test_calls_in_and_out_of_inference_mode_take_turns() -> None:
    layer, x = linear(0, 8, 8), normal(0, 3, 8)
    call = lowering_of(layer).lower(through(layer), "one")
    wanted = call(x)[0].clone()
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            assert torch.equal(call(x)[0], wanted)


def attends(int8: bool = False) -> tuple[tuple[nn.Module, ...], Any]:
    """Attention of the first input, through two layers, to the second: keys and then values; and the layers."""
    q, out = linear(0, 8, 32), linear(1, 32, 6)
    out = eight(out, inverse(0, 32)) if int8 else out

    def walk(ops: Any, x: Any, kv: Any) -> Any:
        query = ops.linear(x, q)
        k, v = ops.columns(kv, 32, 32), ops.columns(ops.columns(kv, 16, 80), 48, 32)
        return ops.linear(ops.attend(query, k, v, heads=2, to=(out,)), out)

    return (q, out), walk


def bound() -> Any:
    layers, walk = attends()
    return lowering_of(*layers).lower(walk, "bound", bound=1)


@settings(max_examples=30)
@given(...)
def test_a_bound_input_may_have_any_number_of_tokens(
    images: Few, counts: Annotated[list[int], st.lists(st.integers(1, 90), min_size=1, max_size=4)], int8: bool
) -> None:
    layers, walk = attends(int8)
    lowering, out = lowering_of(*layers), layers[1]
    call = lowering.lower(walk, "bound", bound=1)
    for count in counts:
        x, kv = normal(count, images, 3, 8), normal(count + 1, images, count, 96)
        (wanted,) = on_torch(layers, walk, x, kv)
        step = float((out.weight.float().abs().amax(1) * out.scale).max()) if int8 else 0.0
        check_close(call(x, kv)[0], wanted, relative=1e-5, least=1e-5 + 3 * step)
        assert torch.equal(run(lowering_of(*layers), walk, x, kv)[0], call(x, kv)[0]), "as where it is copied"
    assert len(lowering.size_bytes[1]) == 1, "one program for all lengths"


@settings(max_examples=30)
@given(...)
def test_rows_of_several_lengths_are_those_of_each_length_alone(
    counts: Annotated[list[int], st.lists(st.integers(1, 90), min_size=1, max_size=5)], int8: bool
) -> None:
    layers, walk = attends(int8)
    call = lowering_of(*layers).lower(walk, "bound", bound=1)
    x, kv = normal(1, len(counts), 3, 8), normal(2, len(counts), max(counts), 96)
    alone = torch.cat([call(x[i : i + 1], kv[i : i + 1, :n].contiguous())[0] for i, n in enumerate(counts)])
    for row, count in enumerate(counts):
        kv[row, count:] = torch.nan  # read by nothing
    assert torch.equal(call(x, kv, lengths=torch.tensor(counts))[0], alone)
    kv.nan_to_num_(0.5)
    whole = torch.cat([call(x[i : i + 1], kv[i : i + 1])[0] for i in range(len(counts))])
    assert torch.equal(call(x, kv)[0], whole), "lengths are those of one call only"


def test_lengths_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths must be \[2\] on the CPU"):
        bound()(normal(0, 2, 3, 8), normal(1, 2, 5, 96), lengths=torch.tensor([5]))


def test_a_bound_input_is_read_where_it_lies_when_the_program_runs() -> None:
    call, x, kv = bound(), normal(0, 2, 3, 8), normal(1, 2, 5, 96)
    (before,) = call(x, kv)
    kv.mul_(3)
    (after,) = call(x, kv)
    assert not torch.equal(before, after)
    assert torch.equal(call(x, kv.clone())[0], after)


def test_a_bound_input_that_the_kernels_would_read_past_is_refused() -> None:
    call, x, kv = bound(), normal(0, 2, 3, 8), normal(1, 2, 6, 96)
    short, few = kv[..., :-1].contiguous(), kv[..., :48].contiguous()
    for wrong in (kv[:1], kv.repeat(2, 1, 1), short, few, kv.double(), kv[:, :0], kv[:, ::2], kv.to("meta")):
        for fresh in (bound(), call):  # at first, and once it ran
            with pytest.raises(ValueError, match=r"keys and values|there are no \d\d channels from \d\d on"):
                fresh(x, wrong)
        call(x, kv)


def test_keys_that_do_not_fit_queries_are_refused() -> None:
    layer = linear(0, 8, 32)
    with pytest.raises(ValueError, match="keys and values do not fit queries"):
        lowering_of(layer).prepare(
            lambda ops, x, kv: ops.attend(ops.linear(x, layer), kv, ops.linear(x, layer), heads=1),
            (2, 3, 8), (2, 5, 32), bound=1,
        )  # fmt: skip


def test_programs_of_one_lowering_from_several_threads() -> None:
    """They share memory, and results are each call's own."""
    layer = eight(conv(0, 32, 32), inverse(0, 32))
    lowering, walk = lowering_of(layer), twice(layer)
    calls = [lowering.lower(walk, name) for name in ("one", "other")]
    given_maps = [normal(seed, 1 + seed % 3, 16, 12 + seed, 32) for seed in range(6)]
    wanted = [run(lowering_of(layer), walk, x)[0] for x in given_maps]
    wrong: list[int] = []
    start = threading.Barrier(6)

    def work(index: int) -> None:
        start.wait()
        for turn in range(40):
            (found,) = calls[turn % 2](given_maps[index])
            if not torch.equal(found, wanted[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    assert len(lowering.size_bytes[1]) == 12


def test_each_layer_is_seen_with_what_it_reads() -> None:
    """Layers side by side as one, a concatenation's halves each with its own; results are those of a run unseen."""
    a, b, both = linear(0, 8, 6), linear(1, 8, 6), linear(2, 12, 5)

    def walk(ops: Any, x: Any) -> Any:
        sides = ops.linear(x, a, b)
        return ops.linear(ops.cat(ops.linear(x, a), ops.linear(x, b)), both), sides

    lowering, x = lowering_of(a, b, both), normal(0, 3, 8)
    call = lowering.lower(walk, "seen")
    (wanted, _), seen = call(x), list[tuple[tuple[str, ...], Tensor]]()

    def watch(layer: PackedLayer, read: Tensor) -> None:
        seen.append((layer.names, read.clone()))

    lowering.watch = watch
    assert torch.equal(call(x)[0], wanted)
    lowering.watch = None
    assert [names for names, _ in seen] == [("0", "1"), ("0",), ("1",), ("2",), ("2",)]
    for (_, read), expected in zip(seen, (x, x, x, a(x), b(x)), strict=True):
        check_close(read, expected)
    assert torch.equal(call(x)[0], wanted) and len(seen) == 5
