"""The image runner: parity with diffusers, alone and in mixed batches; equal bytes for deterministic requests."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import Invalid
from contract.image import ImageParameters
from core.batching.engine import Engine
from core.batching.request import Request, State
from core.batching.runner import NotYet
from pipeline.sampling import samplers
from tests.pipeline.worlds import (
    SHAPES,
    Crank,
    Watching,
    broken,
    check_parity,
    model,
    shared_lane,
    solo,
    together,
)  # fmt: skip


def wanted(shape: str = "plain", **options: Any) -> ImageParameters:
    side = SHAPES[shape].native
    given_options = {"prompt": "a red cat", "seed": 1, "width": side, "height": side, "steps": 4, **options}
    return ImageParameters(**given_options)


FEW_STEPS: tuple[dict[str, Any], ...] = (
    {"timesteps": (999, 749, 499, 249), "scheduler": "lcm", "guidance_scale": 1.0},
    {"timesteps": (800,), "steps": 1, "scheduler": "tcd", "guidance_scale": 0.0},
    {"eta": 0.8, "scheduler": "tcd"},
    {"schedule_type": "trailing", "scheduler": "euler-ancestral", "guidance_scale": 0.0},
    {"schedule_type": "karras", "scheduler": "dpm++2m-sde"},
    {"sigmas": (14.615, 3.771, 0.862, 0.234, 0.0), "scheduler": "euler"},
)


def mixture(shape: str) -> list[ImageParameters]:
    """Every scheduler, with and without guidance, with an absent, an empty and a given negative prompt: in the most
    combinations for the plain shape.
    """
    negatives = itertools.cycle((None, "", "blurry, grey"))
    each = ((1.0, "red", 3), (0.5, "teal", 5), (2.5, "pink", 4), (7.0, "big", 7))
    pairs = list(itertools.product(samplers.SCHEDULERS, each))
    if shape == "plain":  # each with guidance and without, in turn by the one number or the other
        pairs = [pair for index, pair in enumerate(pairs) if (index // 4 + index // 2 + index) % 2]
    elif shape not in ("plain", "distilled"):  # samplers do not depend on the shape: each once, with other guidance
        pairs = [(name, each[index % len(each)]) for index, name in enumerate(samplers.SCHEDULERS)]
    usual = [
        wanted(shape, prompt=f"{name} in a {colour} hat", seed=seed, scheduler=name, guidance_scale=guidance,
               negative_prompt=next(negatives), steps=steps)
        for seed, (name, (guidance, colour, steps)) in enumerate(pairs)
    ]  # fmt: skip
    few = [{"prompt": f"number {seed}", "seed": seed, "steps": 4, **given} for seed, given in enumerate(FEW_STEPS)]
    return usual + [wanted(shape, **given) for given in few if shape in ("plain", "distilled")]


@pytest.mark.quick("plain", "many-heads", "distilled", "v-prediction")
@pytest.mark.parametrize("shape", SHAPES)
def test_each_picture_equals_diffusers_alone_and_in_a_batch_that_others_join_and_leave(shape: str) -> None:
    runner = Watching(model(shape), lane=shared_lane(), max_rows=64)
    parameters = [p for p in mixture(shape) if not (shape == "distilled" and p.scheduler != "lcm")]
    crank = Crank(runner)
    for index, one in enumerate(parameters):
        crank.submit(str(index), one)
        crank.turn()  # it is encoded,
        crank.turn()  # and all who are here take a step before the next one comes
    pictures = crank.pictures()
    least = 3 if len(parameters) > 12 else 2
    assert max(len(steps) for steps in runner.shared_steps) >= least, "nobody shared a forward"
    for index, one in enumerate(parameters):
        check_parity(shape, one, pictures[str(index)])
    for one in parameters[:: max(1, len(parameters) // 4)]:
        check_parity(shape, one, solo(runner, one))


# -- same seed, same picture ---------------------------------------------------------------------------------------


def deterministic(seed: int, **options: Any) -> ImageParameters:
    return wanted(seed=seed, deterministic=True, **options)


@pytest.mark.quick(0, 1)
@pytest.mark.parametrize(("threads", "scheduler"), [(2, "euler"), (1, "euler-ancestral"), (2, "dpm++2m")])
def test_deterministic_bytes_are_equal_at_every_position_of_the_bucket(threads: int, scheduler: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runner = Watching(model("three-levels"), lane=shared_lane(), deterministic_rows=8)
        target = deterministic(5, scheduler=scheduler, width=64, height=64)
        expected = solo(runner, target).png()
        for position in range(4):
            crank = Crank(runner)
            for other in range(4):
                one = target if other == position else replace(target, seed=50 + other, prompt=f"{other} dogs")
                crank.submit(f"{other}", one, priority=other)
            runner.rides.clear()
            assert crank.pictures()[str(position)].png() == expected
            full = [ride for phase, ride in runner.rides if phase == "deep" and len(ride) == 4]
            assert full and all(ride[position][0] == str(position) for ride in full)
    finally:
        torch.set_num_threads(before)


TARGETS = [deterministic(seed, steps=3 + seed, guidance_scale=guidance) for seed, guidance in ((1, 5.0), (2, 1.0))]


def deterministic_runner() -> Watching:
    return Watching(model("plain"), lane=shared_lane(), max_requests=6, deterministic_rows=8)


@functools.cache
def target_bytes() -> list[bytes]:
    """The files of the targets drawn alone."""
    runner = deterministic_runner()
    return [solo(runner, target).png() for target in TARGETS]


@settings(max_examples=10)
@given(st.data())
def test_deterministic_bytes_do_not_depend_on_companions_aborts_and_retries(data: st.DataObject) -> None:
    expected, crank = target_bytes(), Crank(deterministic_runner())
    for turn in range(data.draw(st.integers(3, 25))):
        match data.draw(st.sampled_from(["target", "companion", "abort", "fail", "nothing"])):
            case "target":
                which = data.draw(st.integers(0, 1))
                crank.submit(f"target-{which}-{turn}", TARGETS[which], priority=data.draw(st.integers(0, 9)))
            case "companion":
                one = wanted(
                    seed=turn,
                    steps=data.draw(st.integers(1, 6)),
                    guidance_scale=data.draw(st.sampled_from([1.0, 6.0])),
                    deterministic=data.draw(st.booleans()),
                )
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
            assert request.result.png() == expected[int(name.split("-")[1])]


# -- what a request is told, and what it holds ---------------------------------------------------------------------


def test_progress_counts_steps_and_previews_come_when_asked_for() -> None:
    runner = Watching(model("plain"), lane=shared_lane())
    told: list[Any] = []
    with Engine([runner]) as engine:
        one = wanted(steps=5, preview_every=2)
        request = Request("r", "image", one, listener=lambda _, outcome: told.append(outcome))
        picture = engine.submit(request).result(timeout=30)
    assert [outcome.progress for outcome in told] == [(step, 5) for step in (0, 1, 2, 3, 4, 5, 5)]
    previews = {outcome.progress[0]: outcome.preview for outcome in told if outcome.preview is not None}
    assert set(previews) == {2, 4}
    assert previews[4].shape == (4, 4, 3) and previews[4].dtype == np.uint8
    check_parity("plain", one, picture)


@pytest.mark.parametrize("phase", ["encode", "deep", "vae"])
def test_an_abort_in_any_phase_gives_everything_back(phase: str) -> None:
    runner = Watching(model("plain"), lane=shared_lane(), max_requests=2)
    crank = Crank(runner)
    request, other = crank.submit("gone", wanted(steps=2)), crank.submit("stays", wanted(steps=4, seed=9))
    held = []

    def abort_under_way(batch: Any, ticket: Any) -> Any:
        if batch.group.phase == phase and request in batch.requests:
            crank.scheduler.abort("gone", crank.now)
            held.append(runner.held())  # its slot is in use until the iteration ends
        return ticket

    while not request.state.final:
        crank.turn(alter=abort_under_way)
    assert held == [2] and runner.held() == 1
    assert request.state is State.ABORTED and request.work is None
    check_parity("plain", other.parameters, crank.pictures()["stays"])


def test_a_model_that_returns_nan_fails_its_request_and_says_so() -> None:
    runner = Watching(model("plain"), lane=shared_lane())
    crank = Crank(runner)
    request = crank.submit("nan", wanted(steps=2))
    crank.turn()
    request.work.trajectory.x.fill_(float("nan"))
    crank.run()
    assert request.state is State.FAILED and "NaN" in str(request.error)


def test_memory_that_runs_out_halves_the_batch_and_every_picture_is_drawn() -> None:
    class Small(Watching):
        def launch(self, requests: Any) -> Any:
            if requests[0].phase == "deep" and len(requests) > 2:
                return self._lane.start(lambda: torch.empty(2**60), lambda _: {})  # the allocator's own error
            return super().launch(requests)

    runner = Small(model("plain"), lane=shared_lane(), max_rows=16)
    parameters = [wanted(seed=seed) for seed in range(6)]
    for one, picture in zip(parameters, together(runner, parameters, lambda: 0), strict=True):
        check_parity("plain", one, picture)


@pytest.mark.parametrize(
    ("field", "options"),
    [("prompt", {"prompt": "x" * 100_000}), ("steps", {"steps": 0}), ("scheduler", {"scheduler": "lcm", "steps": 51})],
)
def test_the_engine_refuses_what_it_cannot_serve_and_names_the_field(field: str, options: dict[str, Any]) -> None:
    with Engine([Watching(model("plain"), lane=shared_lane())]) as engine:
        with pytest.raises(Invalid, match=f"^{field}:"):
            engine.submit(Request("bad", "image", wanted(**options)))
        assert engine.submit(Request("bad", "image", wanted())).result(timeout=30).image.size == (32, 32)


def test_prompts_are_read_once_however_often_admission_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the submitting thread: the engine's has others to serve."""
    runner = Watching(model("plain"), max_requests=1)
    first, request = (Request(name, "image", wanted(prompt=name, steps=1)) for name in "ab")
    for one in (first, request):
        runner.check(one)

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(runner._conditioner, "read", refuse)
    assert runner.admit(first) is None
    assert all(runner.admit(request) == NotYet() for _ in range(3))
    runner.release(first)
    assert runner.admit(request) is None
    runner.release(request)
    runner.close()


@pytest.mark.parametrize("fields", [(), ("lora",), ("control",), ("image_prompts",), ("lora", "control")])
def test_each_kind_of_files_is_a_resource_of_its_own(fields: tuple[str, ...]) -> None:
    runner = Watching(model("plain"))
    unused = {"lora": "", "control": (), "image_prompts": (), "upscale": None, "prompt": "", "negative_prompt": ""}
    own = SimpleNamespace(**unused | {field: ["a file"] for field in fields})
    assert runner.resources(Request("a", "image", own)) == set(fields)
    runner.close()
