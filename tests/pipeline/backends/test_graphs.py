"""The image runner on fused layers in graphs: parity with diffusers, padded buckets, graphs recorded beside traffic.

On a GPU in bf16 and CUDA graphs; elsewhere in fp32, recorded by a recorder that means the same (tests/core/tape.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from contract.image import ImageParameters
from contract.plan import DEPTHS, DeepCache
from core.graphs import ExecutableKey
from pipeline.backends.backend import BatchGroup, ExecutionPlan
from pipeline.backends.graphs import GraphBackend
from pipeline.checkpoints.load import ImageModel, load
from tests.core.tape import Tape
from tests.pipeline.backends.test_programs import SHAPES, mixture
from tests.pipeline.long_prompts import words
from tests.pipeline.worlds import Watching, apart, levels, model, solo, stock_picture, together
from tests.unet_opt.shapes import unet

CUDA = torch.cuda.is_available()
SIZE = (32, 32)  # the native one of the shape with wide heads
HAT = ImageParameters("a red hat", 1, *SIZE, steps=3, guidance_scale=2.0)


Prepared = Callable[..., Watching]


def served(shape: str) -> ImageModel:
    model(shape)  # which names it
    return load(f"random:test-{shape}", precision="bf16", device="cuda") if CUDA else model(shape)


RUNNERS: list[Watching] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Nothing goes on being recorded when a test has ended."""
    yield
    while RUNNERS:
        RUNNERS.pop().close()


def runner_of(shape: str, *, recorded: bool = True, **options: Any) -> Watching:
    """With all graphs recorded beforehand, or none: then they are while it draws."""
    given = {"max_rows": 16, "buckets": (2, 6, 8, 16), "deterministic_rows": 8, **options}
    runner = Watching(served(shape), fused=True, recorder=None if CUDA else Tape(), **given)
    RUNNERS.append(runner)
    if recorded:
        runner.prepare(measure_s=600)
        recorded_, wanted = runner.backend.graphs.counts
        assert recorded_ == wanted > 0 and not runner.backend.graphs.pending
    return runner


@pytest.fixture(scope="module")
def prepared() -> Iterator[Prepared]:
    """The one of each shape that has all graphs recorded, for tests that only draw with it."""
    made = dict[str, Watching]()

    def runner(shape: str = "wide-heads") -> Watching:
        if shape not in made:
            made[shape] = runner_of(shape)
            RUNNERS.remove(made[shape])
        return made[shape]

    yield runner
    for each in made.values():
        each.close()


# Mean levels from fp32 that bf16 may cost. Torch's own bf16 on a CPU costs these pictures 0.6 to 3.0; another order of
# sums, in fp32 within a layer, may move that by a third, and no layer may add to it.
BF16 = 4.0


def near(one: Any, other: Any, bf16: float = BF16) -> bool:
    """Within what another order of sums costs."""
    return bool(np.abs(levels(one).astype(float) - levels(other)).mean() < bf16) if CUDA else apart(one, other) <= 1


WIDE, DEEP = SHAPES  # each has one of two values elsewhere than on a GPU, where the layers are torch's


@pytest.mark.parametrize(
    ("shape", "recorded"), [*itertools.product(SHAPES, (True, False))] if CUDA else [(DEEP, True), (WIDE, False)]
)
def test_pictures_equal_diffusers(shape: str, recorded: bool, prepared: Prepared) -> None:
    parameters = mixture(shape)
    runner = prepared(shape) if recorded else runner_of(shape, recorded=False)
    for one, picture in zip(parameters, together(runner, parameters), strict=True):
        expected = stock_picture(shape, one)
        assert expected.std() > 10, "a flat picture would prove nothing"
        assert near(picture, expected), one


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("shape", "depth"), [*itertools.product(SHAPES, DEPTHS)] if CUDA else [(DEEP, "block"), (WIDE, "resnet")]
)
def test_deepcache_is_the_requests_own_in_any_company(shape: str, depth: str, prepared: Prepared) -> None:
    cached = DeepCache(2, depth)
    parameters = [replace(one, deepcache=cached if index % 2 else None) for index, one in enumerate(mixture(shape))]
    runner, on_torch = prepared(shape), Watching(model(shape), max_rows=16)
    for one, picture, expected in zip(
        parameters, together(runner, parameters), together(on_torch, parameters), strict=True
    ):
        assert near(picture, expected) and near(picture, solo(runner, one), 3)


@pytest.mark.parametrize("shape", SHAPES if CUDA else [WIDE])
def test_deterministic_pictures_have_their_bytes_in_any_company_recorded_or_not(shape: str, prepared: Prepared) -> None:
    parameters = [replace(one, deepcache=DeepCache(2, "resnet")) for one in mixture(shape)]
    runner, recording = prepared(shape), runner_of(shape, recorded=False)
    never = runner_of(shape, recorded=False)
    never.recording.close()
    mixed, meanwhile, without = (together(one, parameters) for one in (runner, recording, never))
    assert never.backend.graphs.pending
    assert recording.recording.wait(600) and recording.backend.graphs.counts[0] > 0
    for one, *pictures in zip(parameters, mixed, meanwhile, without, strict=True):
        if not one.deterministic:
            continue
        alone = {"graphs": solo(runner, one), "layers": solo(never, one)}
        for executable, picture in alone.items():
            assert picture.fingerprint["executable"] == executable and picture.fingerprint["bucket"] == 8
        assert [pictures[0].fingerprint["executable"], pictures[2].fingerprint["executable"]] == ["graphs", "layers"]
        for picture in pictures:  # equal seeds and equal fingerprints, and so equal bytes
            assert picture.png() == alone[picture.fingerprint["executable"]].png()
        assert near(alone["graphs"], alone["layers"])


def test_padding_repeats_a_row_and_changes_no_picture(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pictures of one row each that begin and end together: steps of six rows, a VAE of four."""
    runner = prepared()
    plan, seen = runner.backend.plan, list[tuple[str, int, list[torch.Tensor]]]()

    def watched(group: BatchGroup, rows: int, *, live: bool = False) -> ExecutionPlan:
        way = plan(group, rows, live=live)

        def function(*arguments: Any, **options: Any) -> Any:
            tensors = [leaf.clone() for leaf in tree_leaves((arguments, options)) if isinstance(leaf, torch.Tensor)]
            seen.append((group.phase, rows, tensors))
            return way.function(*arguments, **options)

        return way._replace(function=function)

    monkeypatch.setattr(runner.backend, "plan", watched)
    one = replace(HAT, steps=4, guidance_scale=1.0, deepcache=DeepCache(2))
    wanted = [replace(one, seed=seed, prompt=f"{seed} red hats") for seed in range(3)]
    pictures = together(runner, wanted, lambda: 0)
    padded = {"deep": 6, "shallow": 6, "vae": 4}
    assert {phase for phase, rows, _ in seen if rows == 3} == padded.keys(), "they rode together all the way"
    for phase, rows, tensors in seen:
        for tensor in tensors:
            assert len(tensor) == padded[phase]
            for row in tensor[rows:]:
                assert torch.equal(row, tensor[0])
    for index, parameters in enumerate(wanted):
        assert apart(pictures[index], solo(runner, parameters)) <= (20 if CUDA else 1)


def test_a_missed_graph_is_recorded_and_replayed_from_then_on_of_each_length_of_texts(
    prepared: Prepared,
) -> None:
    runner = runner_of("wide-heads", recorded=False)
    long, longer = replace(HAT, prompt=words(100)), replace(HAT, prompt=words(160))
    before = solo(runner, long)
    assert runner.recording.wait(600)
    plan, group = runner.backend.plan, BatchGroup("deep", SIZE)
    assert [plan(group._replace(chunks=chunks), 2).compiled for chunks in (1, 2, 3)] == [False, True, False]
    assert not plan(group._replace(chunks=2), 16).compiled
    assert runner.backend.graphs.counts == (3, 3), "the encoders for two prompts, steps of two rows, one picture's VAE"
    assert apart(solo(runner, long), before) <= 1, "replayed as launched one by one"
    for wanted in (HAT, longer):
        assert apart(solo(runner, wanted), solo(prepared(), wanted)) <= 1
    assert runner.backend.costs.measured()["deep", SIZE, True].keys() == {2}, "lengths share a curve"


def test_nobody_s_sizes_or_long_texts_push_others_graphs_out() -> None:
    runner = runner_of("wide-heads", recorded=False)
    backend, other = runner.backend, (40, 32)
    assert other not in runner.sizes
    for size, chunks, rows, wanted in ((other, 1, 2, 0), (SIZE, 2, 16, 0), (SIZE, 2, 2, 1), (SIZE, 1, 16, 2)):
        backend.plan(BatchGroup("deep", size, chunks=chunks), rows, live=True)
        assert backend.graphs.counts[1] == wanted, (size, chunks, rows)


def unrecorded() -> tuple[Watching, GraphBackend, BatchGroup]:
    """A runner without graphs, which the test records, its backend, and its steps at the native size."""
    runner = runner_of("wide-heads", recorded=False)
    runner.recording.close()
    assert isinstance(runner.backend, GraphBackend)
    return runner, runner.backend, BatchGroup("deep", SIZE)


def observe(backend: GraphBackend, group: BatchGroup, rows: int, recorded: bool, *seconds: float) -> None:
    for each in seconds:
        backend.costs.observe(ExecutableKey(group.phase, rows, group.size), recorded, each)


def forwards(backend: GraphBackend, group: BatchGroup, rows: int, count: int = 1) -> None:
    """Live ones, with the recordings that they ask for."""
    for _ in range(count):
        backend.plan(group, rows, live=True)
        while backend.graphs.record_next():
            pass


def test_while_a_graph_is_missing_a_wider_one_serves_where_it_costs_less() -> None:
    _, backend, group = unrecorded()
    forwards(backend, group, 8)
    observe(backend, group, 8, True, *[0.010] * 40)  # of the graph, until it is known
    assert backend.plan(group, 5)[1:3] == (False, 6), "what was never timed is, once"
    observe(backend, group, 6, False, 9.0)
    assert not backend.plan(group, 5).compiled, "the first run compiles its kernels, and does not count"
    observe(backend, group, 6, False, 0.020)
    assert backend.plan(group, 5)[1:3] == (True, 8)
    observe(backend, group, 6, False, *[0.005] * 40)
    assert backend.plan(group, 5)[1:3] == (False, 6)
    assert backend.plan(group._replace(mode="graphs"), 2)[1:3] == (True, 8), "deterministic requests have one width"


def test_deterministic_requests_never_take_a_wider_graph() -> None:
    """However slow their own kernels are: other widths have other bits."""
    _, backend, group = unrecorded()
    forwards(backend, group, 16)
    observe(backend, group, 8, False, 9.0, 0.5)  # the first does not count
    observe(backend, group, 16, True, *[0.010] * 20)
    assert backend.plan(group, 8)[1:3] == (True, 16)
    assert backend.plan(group._replace(mode="graphs"), 2)[1:3] == (False, 8)


def cost(backend: GraphBackend, group: BatchGroup, rows: int, *, graph_s: float, direct_s: float) -> None:
    """What steps are known to take, whatever they took."""
    observe(backend, group, rows, True, *[graph_s] * 60)
    observe(backend, group, rows, False, *[direct_s] * 60)


def test_a_width_that_traffic_pays_for_is_recorded_and_draws_the_same() -> None:
    runner, backend, group = unrecorded()
    forwards(backend, group, 3)
    forwards(backend, group, 2)
    assert backend.plan(group, 3).rows == 6, "the next usual width"
    for rows in (2, 6):
        cost(backend, group, rows, graph_s=10.0 * rows, direct_s=11.0 * rows)
    forwards(backend, group, 3, 61)
    assert backend.plan(group, 3).rows == 6, "it is chosen at every 64th"
    forwards(backend, group, 3)
    assert [backend.plan(group, rows)[1:3] for rows in (2, 3, 4, 6, 8)] == [
        (True, 2), (True, 3), (True, 6), (True, 6), (False, 8),
    ]  # fmt: skip
    assert backend.plan(group._replace(mode="graphs"), 2).rows == 8, "deterministic requests have the one width"
    parameters = [replace(HAT, seed=seed, steps=2, guidance_scale=1.0) for seed in range(9)]
    pictures = together(runner, parameters)
    assert ("deep", 3) in {(phase, len(ride)) for phase, ride in runner.rides}, "it was drawn at that width"
    reference = Watching(model("wide-heads"), max_rows=16)
    for picture, one in list(zip(pictures, parameters, strict=True))[::4]:
        assert near(picture, solo(reference, one))


@pytest.mark.parametrize(("saved_s", "room", "recorded"), [(9.0, 64, True), (-0.1, 64, False), (9.0, 3, False)])
def test_another_size_is_recorded_where_that_pays_and_pushes_nothing_out(
    saved_s: float, room: int, recorded: bool
) -> None:
    runner, backend, group = unrecorded()
    other = group._replace(size=(24, 32))
    assert other.size not in runner.sizes
    for rows in (2, 6, 8):
        forwards(backend, group, rows)
    backend.graphs._graphs.capacity = room
    cost(backend, group, 2, graph_s=1.0, direct_s=1.0 + saved_s)
    cost(backend, other, 2, graph_s=math.nan, direct_s=1.0 + saved_s)
    forwards(backend, other, 2, 63)
    assert not backend.plan(other, 2).compiled
    forwards(backend, other, 2)
    assert backend.plan(other, 2).compiled == recorded
    assert [backend.plan(group, rows).compiled for rows in (2, 6, 8)] == [True] * 3


def test_a_graph_that_cannot_be_recorded_costs_no_picture(prepared: Prepared, caplog: pytest.LogCaptureFixture) -> None:
    """As where memory runs out for the widest."""
    runner = runner_of("wide-heads", recorded=False)
    recordings = runner.backend.graphs
    record = recordings._graphs.record

    def failing(phase: str, *rest: Any, **options: Any) -> None:
        if phase == "deep":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        record(phase, *rest, **options)

    recordings._graphs.record = failing  # type: ignore[method-assign]
    one = replace(HAT, deterministic=True)
    first = solo(runner, one)
    assert runner.recording.wait(600)
    assert "deep at 8 rows" in caplog.text and "runs without a graph (OutOfMemoryError" in caplog.text
    assert runner.backend.graphs.counts == (2, 3)
    assert first.fingerprint["executable"] == "layers" and solo(runner, one).png() == first.png()
    assert near(first, solo(prepared(), one))


def test_what_preparing_leaves_is_recorded_and_measured_beside_traffic() -> None:
    runner = runner_of("wide-heads", recorded=False, buckets=(2, 6, 8))
    runner.prepare(measure_s=0.0)
    solo(runner, HAT)
    assert runner.recording.wait(600) and not runner.backend.graphs.pending
    measured = {(key[0], rows) for key, curve in runner.backend.costs.measured().items() if key[2] for rows in curve}
    steps = set(itertools.product(("deep", "shallow", "shallow-resnet"), (2, 6, 8, 16)))
    assert measured == steps | {("vae", 1), ("vae", 2), ("vae", 4)}
    assert runner.backend.graphs.counts == (len(measured) + 6, len(measured) + 6), "and the text encoders at six widths"


def test_what_is_wider_than_any_forward_costs_more(prepared: Prepared) -> None:
    """As the scheduler asks of all that waits."""
    runner = prepared()
    for phase, widest in (("deep", 16), ("vae", 4)):
        group = BatchGroup(phase, SIZE)
        assert runner.cost(group, 10 * widest) >= runner.cost(group, widest)


def test_shallow_steps_that_read_the_text_are_drawn_as_on_torch() -> None:
    base = served("wide-heads")
    other = base.with_parts(unet=unet("attention-last").to(base.device, base.dtype))
    wanted = ImageParameters(
        prompt="a red hat", seed=3, width=other.native, height=other.native, steps=4, deepcache=DeepCache()
    )
    assert near(*(solo(Watching(other, fused=fused), wanted) for fused in (True, False)))
