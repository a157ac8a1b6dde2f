"""DeepCache inside step-level batches: schedules that stay each request's own, whoever rides along, and no leaks."""

from __future__ import annotations

import ctypes
import functools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import plan
from contract.errors import Invalid
from contract.image import ImageParameters
from contract.plan import BLOCK, DEPTHS, RESNET, DeepCache
from core.batching.batcher import Batch
from core.batching.request import Request, State
from core.batching.runner import OutOfMemory, Ticket
from core.ops.reference import TorchLowering
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from tests.pipeline import worlds
from tests.pipeline.worlds import Crank, Watching, apart, broken, model, shared_lane, solo, stock, stock_picture
from unet_opt.deepcache import SplitUNet, select_features
from unet_opt.inputs import DenoiserInputs

SHAPE = "cached"
worlds.MORE[SHAPE] = tiny.SDXLShape(
    native=64, channels=(16, 32, 64), transformers=(1, 1, 2), heads=(1, 2, 4), resnets=2
)

SCHEDULES = (
    None,
    DeepCache(),
    DeepCache(interval=3, depth=RESNET),
    DeepCache(interval=2, depth=RESNET, first=2, last=1),
    DeepCache(interval=1),
    DeepCache(deep_steps=(0, 1, 4)),
    DeepCache(interval=50),
)


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory, kernels: ctypes.CDLL) -> Path:
    """A folder with a model and its INT8 variant."""
    return worlds.in_int8(tmp_path_factory.mktemp("models"), worlds.MORE[SHAPE], kernels)


def wanted(seed: int = 1, **options: Any) -> ImageParameters:
    given_options = {"prompt": "a red cat", "width": 64, "height": 64, "steps": 5, **options}
    return ImageParameters(seed=seed, **given_options)


def mixture() -> list[ImageParameters]:
    """Every schedule, with guidance and without, at different numbers of steps, deterministic and not."""
    return [
        wanted(
            seed, prompt=f"hat number {seed}", deepcache=schedule, steps=5 + seed % 3, deterministic=bool(seed % 2),
            guidance_scale=(5.0, 1.0, 3.0)[seed % 3], scheduler=(None, "euler-ancestral", "dpm++2m")[seed % 3],
        )
        for seed, schedule in enumerate(SCHEDULES)
    ]  # fmt: skip


def runner_of(kernels: ctypes.CDLL | None = None, **options: Any) -> Watching:
    return Watching(model(SHAPE), lane=shared_lane(), kernels=kernels, **options)


def together(runner: Watching, parameters: list[ImageParameters], order: random.Random) -> list[Any]:
    """All in one engine, each joining a few iterations after the one before."""
    pictures = worlds.together(runner, parameters, lambda: order.randrange(4))
    assert runner.held() == 0 and runner.holdings.memory.taken == 0
    return pictures


@contextmanager
def stepping(schedule: DeepCache, steps: int) -> Iterator[None]:
    """The stock pipeline with its UNet called as the schedule says, one picture at a time: what ours must equal."""
    unet = stock(SHAPE).unet
    split, plan = SplitUNet(TorchLowering(torch.float32), unet), iter(schedule.plan(steps))
    features: list[Any] = []
    own = unet.forward

    def forward(sample: Any, timestep: Any, **options: Any) -> Any:
        added = options["added_cond_kwargs"]
        given = {"kv": split.prepare_text(options["encoder_hidden_states"]), "time_cond": options.get("timestep_cond"),
                 "pooled": added["text_embeds"], "time_ids": added["time_ids"]}  # fmt: skip
        inputs = DenoiserInputs(sample, timestep, {name: part for name, part in given.items() if part is not None})
        if next(plan):
            eps, *features[:] = split.deep(inputs)
        else:
            (eps,) = split.shallow(schedule.depth, inputs, select_features(features, schedule.depth))
        return (eps,)

    unet.forward = forward
    try:
        yield
    finally:
        unet.forward = own


@functools.cache
def reference(one: ImageParameters) -> np.ndarray:
    if one.deepcache is None:
        return stock_picture(SHAPE, one)
    with stepping(one.deepcache, one.steps):
        return stock_picture.__wrapped__(SHAPE, replace(one, deepcache=None))


@pytest.mark.quick("kernels", "int8")
@pytest.mark.parametrize("way", ["torch", "kernels", "int8"])
def test_each_picture_of_a_mixed_batch_is_its_own(way: str, int8: Path, kernels: ctypes.CDLL) -> None:
    """Within a level of its solo run, deterministic ones to the bit; but in INT8 of the stock pipeline on the same
    schedule.
    """
    loaded = load(str(int8), precision="int8") if way == "int8" else model(SHAPE)
    options = {} if way == "torch" else {"kernels": kernels}
    runner, other = (Watching(loaded, lane=shared_lane(), **options) for _ in range(2))
    parameters = mixture()
    mixed = together(runner, parameters, random.Random(1))
    phases = {phase for phase, ride in runner.rides if len(ride) > 1}
    assert {"deep", "shallow"} <= phases, "nobody rode with anybody"
    for one, picture in zip(parameters, mixed, strict=True):
        expected, alone = reference(one), solo(other, one)
        assert expected.std() > 10, "a flat picture would prove nothing"
        assert way == "int8" or apart(picture, expected) <= 1, one
        assert apart(picture, alone) <= 1
        assert not one.deterministic or picture.png() == alone.png()


@pytest.mark.parametrize("on_kernels", [False, True], ids=["torch", "kernels"])
def test_an_interval_of_one_is_off_bit_for_bit(on_kernels: bool, kernels: ctypes.CDLL) -> None:
    runner = runner_of(kernels if on_kernels else None)
    off, one = (solo(runner, wanted(deepcache=schedule)) for schedule in (None, DeepCache(interval=1)))
    assert apart(off, one) == 0 and {phase for phase, _ in runner.rides} == {"encode", "deep", "vae"}


SMALL = wanted(3, deepcache=DeepCache(interval=2), deterministic=True, width=32, height=32)


@functools.cache
def small_bytes() -> bytes:
    """The file of it drawn alone."""
    file: bytes = solo(Watching(model("tiny-heads"), lane=shared_lane()), SMALL).png()
    return file


@settings(max_examples=10)
@given(st.data())
def test_a_deterministic_cached_picture_survives_companions_aborts_and_retries(data: st.DataObject) -> None:
    runner = Watching(model("tiny-heads"), lane=shared_lane(), max_requests=6)
    target, expected, size = SMALL, small_bytes(), {"width": 32, "height": 32}
    crank = Crank(runner)
    for turn in range(data.draw(st.integers(3, 15))):
        match data.draw(st.sampled_from(["target", "companion", "abort", "fail", "nothing"])):
            case "target":
                crank.submit(f"target-{turn}", target, priority=data.draw(st.integers(0, 9)))
            case "companion":
                schedule = data.draw(st.sampled_from([s for s in SCHEDULES if s is None or s.deep_steps is None]))
                one = wanted(turn, steps=data.draw(st.integers(1, 6)), deepcache=schedule, **size)
                crank.submit(f"companion-{turn}", one, priority=data.draw(st.integers(0, 9)))
            case "abort":
                companions = [name for name in crank.scheduler.live if name.startswith("companion")]
                if companions:
                    crank.scheduler.abort(data.draw(st.sampled_from(companions)), crank.now)
            case "fail":
                crank.turn(alter=broken)
        crank.turn()
    for name, request in crank.run().items():
        if name.startswith("target") and request.state is State.DONE:
            assert request.result.png() == expected
    assert runner.holdings.memory.taken == 0


@pytest.mark.parametrize("length", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_thousands_of_iterations_of_aborts_and_failures_leave_every_slot_free(
    length: int, kernels: ctypes.CDLL
) -> None:
    """In any phase, before and during an iteration, alone and for whole batches, with memory for a few only."""
    chance, cached = random.Random(0), ImageParameters("x", 0, 32, 32, deepcache=DeepCache())

    def runner_with(memory_bytes: int | None) -> Watching:
        lane, options = shared_lane(), {"kernels": kernels, "max_requests": 8}
        return Watching(model("tiny-heads"), lane=lane, memory_bytes=memory_bytes, **options)

    size_bytes = runner_with(None).holdings.size_bytes(cached)
    runner = runner_with(5 * size_bytes)
    crank, memory, refused, count = Crank(runner), runner.holdings.memory, 0, 0
    phases, widths = list[str](), set[int]()

    def alter(batch: Batch, ticket: Ticket) -> Any:
        phases.append(batch.group.phase)
        if batch.group.phase != "vae":
            widths.update({request.work.rows for request in batch.requests if request.work.most_rows == 2})
        if chance.random() < 0.3:
            crank.scheduler.abort(chance.choice(batch.requests).id, crank.now)
        return broken(batch, ticket) if chance.random() < 0.1 else ticket

    while len(phases) < length:
        while len(crank.scheduler.live) < 12:
            count += 1
            schedule = chance.choice([None, DeepCache(), DeepCache(3, RESNET), DeepCache(deep_steps=(0,))])
            guidance, steps = chance.choice([1.0, 5.0]), chance.randint(1, 6)
            drawn = plan.GuidanceSchedule(chance.choice([None, (0.0, 0.5), (0.3, 0.7)]))
            interval = drawn.interval if drawn.fits(steps) else None
            listed = tuple(chance.sample(range(steps), chance.randint(1, steps)))
            one = ImageParameters(
                "x", count, 32, 32, steps=steps, guidance_scale=guidance, deepcache=schedule,
                guidance_interval=interval, guided_steps=None if interval else chance.choice([None, listed]),
            )  # fmt: skip
            deadline = crank.now + chance.choice([3.0, 20.0, float("inf")])
            crank.submit(f"r{count}", one, priority=chance.randrange(3), deadline=deadline)
        crank.now %= 9_000
        crank.turn(alter)
        if chance.random() < 0.1 and crank.scheduler.live:
            crank.scheduler.abort(chance.choice(list(crank.scheduler.live)), crank.now)
        refused += memory.taken + size_bytes > memory.capacity
    for request_id in list(crank.scheduler.live):
        crank.scheduler.abort(request_id, crank.now)
    crank.scheduler.check_idle()
    assert runner.held() == 0 and memory.taken == 0
    runner.holdings.slots.check()
    assert {*phases} == {"encode", "deep", "shallow", "shallow-resnet", "vae"}
    assert widths == {1, 2}, "none narrowed on its way"
    ends = Counter(request.state for request in crank.ended.values())
    assert all(ends[state] > length // 200 for state in (State.DONE, State.FAILED, State.ABORTED, State.EXPIRED)), ends
    assert {str(request.error) for request in crank.ended.values() if request.state is State.FAILED} == {"planted"}
    assert refused > length // 100, "memory never ran short"


worlds.MORE["tiny-heads"] = tiny.SDXLShape(channels=(16, 32), heads=(1, 2))


@pytest.mark.parametrize("depth", DEPTHS)
def test_admission_waits_for_memory_and_says_what_never_fits(depth: str) -> None:
    one = wanted(deepcache=DeepCache(depth=depth))
    size_bytes = runner_of().holdings.size_bytes(one)
    assert size_bytes > runner_of().holdings.size_bytes(wanted()), "features count"
    runner = runner_of(memory_bytes=2 * size_bytes + 1)
    crank = Crank(runner)
    for seed in range(5):
        crank.submit(str(seed), replace(one, seed=seed))
    crank.turn()
    assert runner.held() == 2 and crank.scheduler.counts()["image"] == (3, 2)
    assert len(crank.pictures()) == 5 and runner.holdings.memory.taken == 0
    with pytest.raises(Invalid, match="size: it needs"):
        runner_of(memory_bytes=size_bytes - 1).check(Request("big", "image", one))


def test_what_is_counted_is_what_is_held() -> None:
    """Latents, conditioning, and features, to the byte."""
    runner = runner_of()
    one = wanted(deepcache=DeepCache())
    crank = Crank(runner)
    request = crank.submit("one", one)
    crank.turn()
    crank.turn()
    work = request.work
    trajectory = work.trajectory
    held = [trajectory.x, trajectory.x0, work.x, *trajectory.conditioning.tensors.values(), *work.features]
    assert runner.holdings.size_bytes(one) == runner.holdings.memory.taken == sum(tensor.nbytes for tensor in held)
    crank.run()


def test_memory_that_runs_out_in_a_shallow_step_halves_the_batch() -> None:
    class Small(Watching):
        def launch(self, requests: Any) -> Any:
            if requests[0].phase == "shallow" and len(requests) > 2:
                return self._lane.start(out_of_memory, lambda _: {})
            return super().launch(requests)

    def out_of_memory() -> Any:
        raise OutOfMemory("planted")

    runner = Small(model(SHAPE), lane=shared_lane())
    crank = Crank(runner)
    for seed in range(5):
        crank.submit(str(seed), wanted(seed, deepcache=DeepCache()))
    pictures = crank.pictures()
    for seed in range(5):
        assert apart(pictures[str(seed)], reference(wanted(seed, deepcache=DeepCache()))) <= 1


def test_a_schedule_that_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(Invalid, match=r"^deepcache\.deep_steps: "):
        runner_of().check(Request("bad", "image", wanted(deepcache=DeepCache(deep_steps=(0, 5)))))


def test_left_and_then_follow_the_schedule() -> None:
    runner = runner_of()
    crank = Crank(runner)
    request = crank.submit("one", wanted(steps=4, deepcache=DeepCache(depth=BLOCK, interval=3)))
    crank.turn()
    seen = []
    while not request.state.final:
        following = runner.next_group(request)
        seen.append((request.phase, following and following.phase, runner.left_s(request, 2)))
        crank.turn()
    assert seen == [
        ("deep", "shallow", 4.0), ("shallow", "shallow", 3.0), ("shallow", "deep", 2.0), ("deep", "vae", 1.0),
        ("vae", None, 1.0),
    ]  # fmt: skip
