"""Guidance for a part of the steps: diffusers' pictures, rows that are free for others, and memory that comes back."""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from contract.errors import Invalid
from contract.image import ImageParameters
from contract.plan import RESNET, DeepCache
from core.batching.request import Request
from pipeline.sampling import denoise
from tests.pipeline.sampling.test_deepcache import SHAPE, stepping, together
from tests.pipeline.worlds import Crank, Watching, levels, model, shared_lane, solo, stock, stock_picture
from unet_opt.deepcache import SplitUNet
from unet_opt.inputs import DenoiserInputs

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

BACKENDS = ("torch", "kernels", "graphs")


def wanted(seed: int = 1, **options: Any) -> ImageParameters:
    return ImageParameters(
        seed=seed, **{"prompt": "a red cat", "width": 64, "height": 64, "steps": 6, "guidance_scale": 6.0, **options}
    )


def runner_of(backend: str, kernels: ctypes.CDLL, **options: Any) -> Watching:
    options |= {"kernels": kernels} if backend == "kernels" else {"fused": backend == "graphs"}
    return Watching(model(SHAPE), lane=shared_lane(), **options)


@functools.cache
def by_diffusers(one: ImageParameters) -> np.ndarray:
    """The picture of diffusers' pipeline with its own callback that cuts guidance off, and DeepCache's schedule."""
    from diffusers.callbacks import SDXLCFGCutoffCallback

    pipeline, last = stock(SHAPE), sum(one.guidance.guided(one.steps)) - 1
    plain = replace(one, guidance_interval=None, deepcache=None)
    call = type(pipeline).__call__

    def cut(self: Any, *arguments: Any, **options: Any) -> Any:
        return call(self, *arguments, **options, callback_on_step_end=SDXLCFGCutoffCallback(None, last))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(pipeline), "__call__", cut)
        if one.deepcache is None:
            return stock_picture.__wrapped__(SHAPE, plain)
        with halved(), stepping(one.deepcache, one.steps):
            return stock_picture.__wrapped__(SHAPE, plain)


@contextmanager
def halved() -> Iterator[None]:
    """The UNet's cached features lose the negative prompt's row when guidance ends, as diffusers' tensors do."""
    shallow = SplitUNet.shallow

    def narrow(self: Any, depth: str, inputs: DenoiserInputs, features: Any) -> Any:
        return shallow(self, depth, inputs, tuple(kept[-len(inputs.sample) :] for kept in features))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitUNet, "shallow", narrow)
        yield


def mixture() -> list[ImageParameters]:
    """Intervals from the first step and from later ones, with caches and without, beside all kinds of neighbours."""
    intervals = (None, (0, 0.5), (0, 0.2), (0.3, 0.9), (0.5, 1), (0, 1), (0.2, 0.4))
    caches = (None, DeepCache(), DeepCache(interval=3, depth=RESNET), DeepCache(interval=50))
    return [
        wanted(
            seed, prompt=f"hat number {seed}", guidance_interval=interval, deepcache=caches[seed % 4],
            steps=5 + seed % 3, deterministic=bool(seed % 2), guidance_scale=1.0 if seed > 11 else 6.0 - seed % 3,
            scheduler=(None, "euler-ancestral", "dpm++2m")[seed % 3],
        )
        for seed, interval in enumerate(intervals * 2)
    ] + [
        wanted(
            seed, prompt=f"hat number {seed}", guided_steps=listed, deepcache=caches[seed % 4], deterministic=True,
            scheduler=(None, "euler-ancestral", "dpm++2m")[seed % 3],
        )
        for seed, listed in enumerate(((0, 2, 4), (1, 3, 5), (5,), (0, 1, 4), (3, 1, 2, 0), (0, 5)), 20)
    ]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cached", [None, DeepCache(), DeepCache(interval=3, depth=RESNET)])
def test_it_ends_as_diffusers_callback_ends_it(backend: str, cached: DeepCache | None, kernels: ctypes.CDLL) -> None:
    runner = runner_of(backend, kernels)
    for stop in (0.5,) if backend == "graphs" else (0.2, 0.5, 0.9):
        one = wanted(guidance_interval=(0, stop), deepcache=cached)
        expected = by_diffusers(one)
        assert expected.std() > 10, "a flat picture would prove nothing"
        assert np.abs(levels(solo(runner, one)) - expected).max() <= 1
        whole = stock_picture(SHAPE, replace(one, guidance_interval=None, deepcache=None))
        assert stop == 0.9 or np.abs(expected - whole).max() > 1, "guidance matters to all but the last step"


@pytest.mark.quick("kernels")
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_picture_of_a_mixed_batch_is_its_own(backend: str, kernels: ctypes.CDLL) -> None:
    """Where others join at any step; deterministic ones to the bit."""
    runner, apart = runner_of(backend, kernels), runner_of(backend, kernels)
    parameters = mixture()
    if backend != "kernels":  # each interval, cache and sampler, deterministic and not, with guidance and without
        parameters = [*parameters[:7], *parameters[12:17]]
    mixed = together(runner, parameters, random.Random(1))
    assert any(len(ride) > 3 for phase, ride in runner.rides if phase == "deep"), "nobody rode with anybody"
    for one, picture in zip(parameters, mixed, strict=True):
        alone = solo(apart, one)
        assert np.abs(levels(picture) - levels(alone)).max() <= 1, one
        if one.deterministic:
            assert picture.png() == alone.png()


ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"guidance_interval": (0, 1)}),
    ({}, {"guided_steps": (0, 1, 2, 3, 4, 5)}),
    ({"guidance_interval": (0, 0.5)}, {"guided_steps": (2, 0, 1)}),
    ({"guidance_interval": (0.2, 0.9)}, {"guided_steps": (1, 2, 3, 4)}),
]


@pytest.mark.quick(1, 3)
@pytest.mark.parametrize(
    ("backend", "cached"),
    [("torch", None), ("kernels", None), ("kernels", DeepCache(interval=3)), ("graphs", DeepCache(interval=3))],
)
def test_schedules_of_the_same_steps_are_alike_bit_for_bit(
    backend: str, cached: DeepCache | None, kernels: ctypes.CDLL
) -> None:
    runner = runner_of(backend, kernels)
    for options in ALIKE:
        one, other = (levels(solo(runner, wanted(deepcache=cached, **given))) for given in options)
        assert np.array_equal(one, other), options


def test_listed_steps_are_guided_and_the_others_are_not(kernels: ctypes.CDLL) -> None:
    """Euler has no memory: from the latents of a run without guidance, one guided step alone leads elsewhere."""
    runner = runner_of("kernels", kernels)
    found = [levels(solo(runner, wanted(guided_steps=(step,)))) for step in range(6)]
    found.append(levels(solo(runner, wanted(guidance_scale=1.0))))
    assert all(not np.array_equal(a, b) for k, a in enumerate(found) for b in found[:k])


def test_without_guidance_it_changes_nothing(kernels: ctypes.CDLL) -> None:
    runner = runner_of("kernels", kernels)
    plain, one = (solo(runner, wanted(guidance_scale=1.0, guidance_interval=i)) for i in (None, (0.2, 0.5)))
    assert np.array_equal(levels(plain), levels(one))


def test_steps_without_it_are_those_of_the_positive_prompt(kernels: ctypes.CDLL) -> None:
    """A start after the first step: until there the latents are those without guidance, after it they are not."""

    def latents(**options: Any) -> list[torch.Tensor]:
        crank = Crank(runner_of("kernels", kernels))
        request = crank.submit("one", wanted(**options))
        found = []
        while request.phase != "vae":
            crank.turn()
            if request.work is not None and request.work.trajectory is not None:
                found.append(request.work.trajectory.x)
        crank.run()
        return found

    late, never = latents(guidance_interval=(0.5, 1)), latents(guidance_scale=1.0)
    assert [torch.equal(a, b) for a, b in zip(late, never, strict=True)] == [True] * 4 + [False] * 3


def test_rows_memory_and_estimates_follow_the_steps(kernels: ctypes.CDLL) -> None:
    """Two rows until it ends, then one; what the second one held is given back, to the byte."""
    runner = runner_of("kernels", kernels)
    crank, one = Crank(runner), wanted(steps=4, guidance_interval=(0.25, 0.75), deepcache=DeepCache(interval=3))
    request = crank.submit("one", one)
    crank.turn()
    seen = []
    while not request.state.final:
        work = request.work
        seen.append((request.phase, runner.rows(request), runner.holdings.memory.taken))
        held = [work.x, *(tensor for kept in work.conditionings.values() for tensor in kept.tensors.values())]
        if work.rows == 1 and work.step == 3:
            held += [work.trajectory.x, work.trajectory.x0, *work.features]
            assert runner.holdings.memory.taken == sum(tensor.nbytes for tensor in held)
        crank.turn()
    whole, one_row = (runner.holdings.size_bytes(replace(one, guidance_scale=scale)) for scale in (6.0, 1.0))
    # The second step is deep though the schedule says shallow: no features of its new row exist.
    assert seen == [
        ("deep", 1, whole), ("deep", 2, whole), ("shallow", 2, whole), ("deep", 1, one_row), ("vae", 1, one_row),
    ]  # fmt: skip
    assert runner.holdings.memory.taken == 0


def test_rows_widen_and_narrow_as_often_as_the_list_says(kernels: ctypes.CDLL) -> None:
    """The second row's memory is held until its last step; a step at which guidance begins again is deep."""
    runner = runner_of("kernels", kernels)
    crank, one = Crank(runner), wanted(steps=7, guided_steps=(0, 2, 3, 5), deepcache=DeepCache(interval=50))
    request = crank.submit("one", one)
    crank.turn()
    seen = []
    while not request.state.final:
        seen.append((request.phase, runner.rows(request), runner.holdings.memory.taken))
        crank.turn()
    whole, one_row = (runner.holdings.size_bytes(replace(one, guidance_scale=scale)) for scale in (6.0, 1.0))
    assert seen == [
        ("deep", 2, whole), ("shallow", 1, whole), ("deep", 2, whole), ("shallow", 2, whole), ("shallow", 1, whole),
        ("deep", 2, whole), ("shallow", 1, one_row), ("vae", 1, one_row),
    ]  # fmt: skip
    assert runner.holdings.memory.taken == 0


def test_others_take_the_rows_that_it_leaves(kernels: ctypes.CDLL) -> None:
    """Of forwards with room for eight rows, which 24 pictures of six guided steps would fill 36 times."""
    runner = runner_of("kernels", kernels, max_rows=8)
    crank = Crank(runner)
    for seed in range(24):
        crank.submit(str(seed), wanted(seed, guidance_interval=(0, 0.5)))
    crank.pictures()
    assert max(len(ride) for phase, ride in runner.rides if phase == "deep") > 4
    assert sum(phase == "deep" for phase, _ in runner.rides) <= 31, "27 if every row were filled"


@pytest.mark.parametrize(
    ("interval", "message"),
    [((0, 0.1), "contains none of 6 steps"), ((0.5, 0.5), "must end after it begins"), ((0, 1.5), ""), ("half", "two")],
)
def test_what_is_no_interval_is_refused_by_name(interval: Any, message: str, kernels: ctypes.CDLL) -> None:
    with pytest.raises(Invalid, match=f"^guidance_interval: .*{message}"):
        runner_of("torch", kernels).check(Request("bad", "image", wanted(guidance_interval=interval)))


def test_outputs_without_guidance_are_as_they_come() -> None:
    output = torch.randn(5, 4, 2, 2)
    table: Any = None
    x = torch.zeros(1, 4, 2, 2)
    riders = [
        denoise.DenoisingState(table, 0, x, x, denoise.Conditioning({"text": torch.zeros(1, 3, 2)}, 5.0))
        for _ in range(4)
    ]
    assert torch.equal(denoise.guide(output, riders), output[:4])
