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
from tests.pipeline.sampling.test_denoise import TABLE
from tests.pipeline.worlds import Crank, Watching, apart, model, options_of, shared_lane, solo, stock, stock_picture
from unet_opt.deepcache import SplitUNet
from unet_opt.inputs import DenoiserInputs

BACKENDS = ("torch", "kernels", "layers")


def wanted(seed: int = 1, **options: Any) -> ImageParameters:
    return ImageParameters(
        seed=seed, **{"prompt": "a red cat", "width": 64, "height": 64, "steps": 6, "guidance_scale": 6.0, **options}
    )


def runner_of(backend: str, kernels: ctypes.CDLL, **options: Any) -> Watching:
    return Watching(model(SHAPE), lane=shared_lane(), **options_of(backend, kernels), **options)


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
    for stop in (0.5,) if backend == "layers" else (0.2, 0.5, 0.9):
        one = wanted(guidance_interval=(0, stop), deepcache=cached)
        expected = by_diffusers(one)
        assert expected.std() > 10, "a flat picture would prove nothing"
        assert apart(solo(runner, one), expected) <= 1
        whole = stock_picture(SHAPE, replace(one, guidance_interval=None, deepcache=None))
        assert stop == 0.9 or apart(expected, whole) > 1, "guidance matters to all but the last step"


@pytest.mark.quick("kernels")
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_picture_of_a_mixed_batch_is_its_own(backend: str, kernels: ctypes.CDLL) -> None:
    """Where others join at any step; deterministic ones to the bit."""
    runner, other = runner_of(backend, kernels), runner_of(backend, kernels)
    parameters = mixture()
    if backend != "kernels":  # each interval, cache and sampler, deterministic and not, with guidance and without
        parameters = [*parameters[:7], *parameters[12:17]]
    mixed = together(runner, parameters, random.Random(1))
    assert any(len(riders) > 3 for riders in runner.companions), "nobody rode with anybody"
    for one, picture in zip(parameters, mixed, strict=True):
        alone = solo(other, one)
        assert apart(picture, alone) <= 1, one
        assert not one.deterministic or picture.png() == alone.png()


ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"guidance_interval": (0, 1)}),
    ({}, {"guided_steps": (0, 1, 2, 3, 4, 5)}),
    ({"guidance_interval": (0, 0.5)}, {"guided_steps": (2, 0, 1)}),
    ({"guidance_interval": (0.2, 0.9)}, {"guided_steps": (1, 2, 3, 4)}),
    ({"guidance_scale": 1.0}, {"guidance_scale": 1.0, "guidance_interval": (0.2, 0.5)}),
]


@pytest.mark.quick(1, 3)
@pytest.mark.parametrize(
    ("backend", "cached"),
    [("torch", None), ("kernels", None), ("kernels", DeepCache(interval=3)), ("layers", DeepCache(interval=3))],
)
def test_schedules_of_the_same_steps_are_alike_bit_for_bit(
    backend: str, cached: DeepCache | None, kernels: ctypes.CDLL
) -> None:
    runner = runner_of(backend, kernels)
    for options in ALIKE:
        one, other = (solo(runner, wanted(deepcache=cached, **given)) for given in options)
        assert apart(one, other) == 0, options


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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (  # the second step is deep though the schedule says shallow: no features of its new row exist
            {"steps": 4, "guidance_interval": (0.25, 0.75), "deepcache": DeepCache(interval=3)},
            [("deep", 1, 2), ("deep", 2, 2), ("shallow", 2, 2), ("deep", 1, 1), ("vae", 1, 1)],
        ),
        (  # a step at which guidance begins again is deep
            {"steps": 7, "guided_steps": (0, 2, 3, 5), "deepcache": DeepCache(interval=50)},
            [
                ("deep", 2, 2), ("shallow", 1, 2), ("deep", 2, 2), ("shallow", 2, 2), ("shallow", 1, 2), ("deep", 2, 2),
                ("shallow", 1, 1), ("vae", 1, 1),
            ],
        ),
    ],
    ids=["interval", "list"],
)  # fmt: skip
def test_rows_and_memory_follow_the_steps(
    options: dict[str, Any], expected: list[tuple[str, int, int]], kernels: ctypes.CDLL
) -> None:
    """The second row's memory is held until its last step, and given back to the byte."""
    runner = runner_of("kernels", kernels)
    crank, one, memory = Crank(runner), wanted(**options), runner.holdings.memory
    request = crank.submit("one", one)
    crank.turn()
    size_bytes = runner.holdings.size_bytes
    sizes = {size_bytes(replace(one, guidance_scale=scale)): rows for rows, scale in ((1, 1.0), (2, 6.0))}
    seen = []
    while not request.state.final:
        seen.append((request.phase, runner.rows(request), sizes[memory.taken]))
        crank.turn()
    assert seen == expected and memory.taken == 0


def test_others_take_the_rows_that_it_leaves(kernels: ctypes.CDLL) -> None:
    """Of forwards with room for eight rows, which 24 pictures of six guided steps would fill 36 times."""
    runner = runner_of("kernels", kernels, max_rows=8)
    crank = Crank(runner)
    for seed in range(24):
        crank.submit(str(seed), wanted(seed, guidance_interval=(0, 0.5)))
    crank.pictures()
    assert max(len(ride) for phase, ride in runner.rides if phase == "deep") > 4
    assert sum(phase == "deep" for phase, _ in runner.rides) <= 31, "27 if every row were filled"


def test_an_interval_without_a_step_is_refused_by_name(kernels: ctypes.CDLL) -> None:
    with pytest.raises(Invalid, match=r"^guidance_interval: .*contains none of 6 steps"):
        runner_of("torch", kernels).check(Request("bad", "image", wanted(guidance_interval=(0, 0.1))))


def test_outputs_without_guidance_are_as_they_come() -> None:
    output, x = torch.randn(5, 4, 2, 2), torch.zeros(1, 4, 2, 2)
    rider = denoise.DenoisingState(TABLE, 0, x, x, denoise.Conditioning({"text": torch.zeros(1, 3, 2)}, 5.0))
    assert torch.equal(denoise.guide(output, [rider] * 4), output[:4])
