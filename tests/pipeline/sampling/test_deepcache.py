"""DeepCache inside step-level batches: schedules that stay each request's own, whoever rides along, and no leaks."""

from __future__ import annotations

import ctypes
import functools
import random
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
from core.batching.request import Request, State
from core.batching.runner import OutOfMemory
from core.ops.reference import TorchLowering
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.quantization import quantized
from tests.pipeline import worlds
from tests.pipeline.worlds import Crank, Watching, levels, model, shared_lane, solo, stock, stock_picture
from unet_opt.deepcache import SplitUNet, select_features
from unet_opt.inputs import DenoiserInputs

# Stock diffusers hands torch tensors to numpy in a way that numpy 2 complains about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

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
    folder = tiny.save(tmp_path_factory.mktemp("models") / "tiny", worlds.MORE[SHAPE])
    quantized.make(
        load(str(folder)), [f"a {colour} hat" for colour in ("red", "green", "blue", "old")], folder, kernels=kernels
    )
    return folder


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


@pytest.mark.quick("kernels")
@pytest.mark.parametrize("on_kernels", [False, True], ids=["torch", "kernels"])
def test_each_picture_of_a_mixed_batch_is_its_own(on_kernels: bool, kernels: ctypes.CDLL) -> None:
    """Within a level of the stock pipeline on the same schedule, and of its solo run; deterministic ones to the bit."""
    runner, apart = (runner_of(kernels if on_kernels else None) for _ in range(2))
    parameters = mixture()
    mixed = together(runner, parameters, random.Random(1))
    phases = {phase for phase, ride in runner.rides if len(ride) > 1}
    assert {"deep", "shallow"} <= phases, "nobody rode with anybody"
    for one, picture in zip(parameters, mixed, strict=True):
        expected = reference(one)
        assert expected.std() > 10, "a flat picture would prove nothing"
        assert np.abs(levels(picture) - expected).max() <= 1, one
        alone = solo(apart, one)
        assert np.abs(levels(picture) - levels(alone)).max() <= 1
        if one.deterministic:
            assert picture.png() == alone.png()


@pytest.mark.parametrize("on_kernels", [False, True], ids=["torch", "kernels"])
def test_an_interval_of_one_is_off_bit_for_bit(on_kernels: bool, kernels: ctypes.CDLL) -> None:
    runner = runner_of(kernels if on_kernels else None)
    off, one = (solo(runner, wanted(deepcache=schedule)) for schedule in (None, DeepCache(interval=1)))
    assert np.array_equal(levels(off), levels(one))
    assert {phase for phase, _ in runner.rides} == {"encode", "deep", "vae"}


def test_int8_pixels_do_not_depend_on_the_batch(int8: Path, kernels: ctypes.CDLL) -> None:
    """PSNR ≥ 50 dB is asked for; bits are equal where the prompt was encoded alone, too."""
    parameters = mixture()
    runner, apart = (Watching(load(str(int8), precision="int8"), kernels=kernels) for _ in range(2))
    mixed = together(runner, parameters, random.Random(2))
    for one, picture in zip(parameters, mixed, strict=True):
        alone = solo(apart, one)
        error = np.square((levels(picture) - levels(alone)).astype(float)).mean()
        assert error <= 255**2 / 10**5
        if one.deterministic:
            assert picture.png() == alone.png()


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
                crank.turn(alter=_broken)
        crank.turn()
    for name, request in crank.run().items():
        if name.startswith("target") and request.state is State.DONE:
            assert request.result.png() == expected
    assert runner.holdings.memory.taken == 0


def _broken(_: Any, ticket: Any) -> Any:
    """The forward ran, and then the batch failed: what it computed must not count."""
    worlds.await_end(ticket)

    class Broken:
        def outcome(self) -> Any:
            raise RuntimeError("planted")

    return Broken()


@pytest.mark.parametrize("length", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_thousands_of_iterations_of_aborts_and_failures_leave_every_slot_free(
    length: int, kernels: ctypes.CDLL
) -> None:
    """In any phase, before and during an iteration, alone and for whole batches, with memory for a few only."""
    chance = random.Random(0)
    small = Watching(model("tiny-heads"), lane=shared_lane(), kernels=kernels, max_requests=8)
    cached = ImageParameters("x", 0, 32, 32, deepcache=DeepCache())
    runner = Watching(
        model("tiny-heads"),
        lane=shared_lane(),
        kernels=kernels,
        max_requests=8,
        memory_bytes=5 * small.holdings.size_bytes(cached),
    )
    crank, ends, refused, phases = Crank(runner), dict.fromkeys(State, 0), 0, set()
    iterations, count, widths = 0, 0, set()
    while iterations < length:
        while len(crank.scheduler.live) < 12:
            count += 1
            schedule = chance.choice([None, DeepCache(), DeepCache(3, RESNET), DeepCache(deep_steps=(0,))])
            guidance, steps = chance.choice([1.0, 5.0]), chance.randint(1, 6)
            wanted = plan.GuidanceSchedule(chance.choice([None, (0.0, 0.5), (0.3, 0.7)]))
            interval = wanted.interval if wanted.fits(steps) else None
            listed = tuple(chance.sample(range(steps), chance.randint(1, steps)))
            one = ImageParameters(
                "x", count, 32, 32, steps=steps, guidance_scale=guidance, deepcache=schedule,
                guidance_interval=interval, guided_steps=None if interval else chance.choice([None, listed]),
            )  # fmt: skip
            deadline = crank.now + chance.choice([3.0, 20.0, float("inf")])
            request = Request(f"r{count}", "image", one, priority=chance.randrange(3), deadline=deadline)
            crank.scheduler.add(request, crank.now)

        def alter(batch: Any, ticket: Any) -> Any:
            nonlocal iterations
            iterations += 1
            phases.add(batch.group.phase)
            if batch.group.phase != "vae":
                widths.update({request.work.rows for request in batch.requests if request.work.most_rows == 2})
            if chance.random() < 0.3:
                crank.scheduler.abort(chance.choice(batch.requests).id, crank.now)
            return _broken(batch, ticket) if chance.random() < 0.1 else ticket

        crank.now %= 9_000
        for batch in crank.scheduler.schedule(crank.now):
            try:
                outcomes = alter(batch, runner.launch(batch.requests)).outcome()
            except RuntimeError as error:
                crank.scheduler.fail(batch, error, crank.now)
            else:
                crank.scheduler.finish(batch, outcomes, crank.now)
        crank.now += 1
        if chance.random() < 0.1 and crank.scheduler.live:
            crank.scheduler.abort(chance.choice(list(crank.scheduler.live)), crank.now)
        refused += runner.holdings.memory.taken + runner.holdings.size_bytes(cached) > runner.holdings.memory.capacity
        for request in crank.scheduler.take_ended():
            ends[request.state] += 1
    for request_id in list(crank.scheduler.live):
        crank.scheduler.abort(request_id, crank.now)
    crank.scheduler.check_idle()
    assert runner.held() == 0 and runner.holdings.memory.taken == 0
    runner.holdings.slots.check()
    assert phases == {"encode", "deep", "shallow", "shallow-resnet", "vae"}
    assert widths == {1, 2}, "none narrowed on its way"
    assert all(ends[state] > length // 200 for state in (State.DONE, State.FAILED, State.ABORTED, State.EXPIRED)), ends
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
                return self._lane.start(_out_of_memory, lambda _: {})
            return super().launch(requests)

    runner = Small(model(SHAPE), lane=shared_lane())
    crank = Crank(runner)
    for seed in range(5):
        crank.submit(str(seed), wanted(seed, deepcache=DeepCache()))
    pictures = crank.pictures()
    for seed in range(5):
        assert np.abs(levels(pictures[str(seed)]) - reference(wanted(seed, deepcache=DeepCache()))).max() <= 1


def _out_of_memory() -> Any:
    raise OutOfMemory("planted")


@pytest.mark.parametrize(
    ("field", "schedule"),
    [
        ("deepcache.interval", DeepCache(interval=0)),
        ("deepcache.depth", DeepCache(depth="abyss")),
        ("deepcache.deep_steps", DeepCache(deep_steps=(0, 5))),
        ("deepcache", "auto"),
        ("deepcache", {"interval": 2}),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_name(field: str, schedule: Any) -> None:
    with pytest.raises(Invalid, match=f"^{field}: "):
        runner_of().check(Request("bad", "image", wanted(deepcache=schedule)))


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
