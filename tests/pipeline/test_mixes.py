"""Random mixes of plans, samplers, schedules and decoders in one engine: each picture has the bits of its solo run.

`DIPTYCH_MIXES` says how many are drawn.
"""

from __future__ import annotations

import ctypes
import os
import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from contract.image import ImageParameters
from contract.plan import AUTO, RESNET, DeepCache
from contract.schedule import SPACINGS
from pipeline.checkpoints import tiny
from pipeline.sampling.samplers import SAMPLERS, SCHEDULERS
from tests.pipeline import worlds
from tests.pipeline.worlds import Crank, Watching, apart, levels, options_of, shared_lane, solo, tiny_model

MIXES = int(os.environ.get("DIPTYCH_MIXES", "40"))
_TIMESTEPS = ((999, 749, 499, 249), (800,), (999, 500, 20))
_SIGMAS = ((14.6, 3.8, 0.9, 0.2), (7.5, 0.25, 0.0))


def wish(chance: random.Random, seed: int) -> ImageParameters:
    """A request of any kind that the samplers take."""
    name = chance.choice(SCHEDULERS)
    sampler, steps = SAMPLERS[name], chance.randint(1, 6)
    given: dict[str, Any] = {}
    for field, lists in (("timesteps", _TIMESTEPS), ("sigmas", _SIGMAS)):
        if field in sampler.takes and not given and chance.random() < 0.25:
            given[field] = chance.choice(lists)
            steps = sum(value > 0 for value in given[field])
    if not given and sampler.schedule_types and chance.random() < 0.4:
        given["schedule_type"] = chance.choice([*SPACINGS, *sampler.schedule_types][: 3 + len(sampler.schedule_types)])
    if "eta" in sampler.takes:
        given["eta"] = chance.choice([None, 0.0, 0.3, 1.0])
    start, stop = sorted(chance.sample(range(steps + 1), 2))
    guided: dict[str, Any] = chance.choice([
        {}, {"guidance_interval": (start / steps + 1e-9, stop / steps + 1e-9 if stop < steps else 1.0)},
        {"guided_steps": tuple(chance.sample(range(steps), chance.randint(1, steps)))},
    ])  # fmt: skip
    return ImageParameters(
        chance.choice(["a red cat", "blue dogs in a park", ""]) or "x", seed, 32, 32, steps=steps, scheduler=name,
        guidance_scale=chance.choice([0.0, 1.0, 3.0, 7.5]), negative_prompt=chance.choice([None, "", "grey"]),
        deepcache=chance.choice([None, AUTO, DeepCache(3), DeepCache(2, RESNET)]),
        deterministic=chance.random() < 0.3, vae=chance.choice(["full", "tiny"]), **given, **guided,
    )  # fmt: skip


@pytest.mark.quick("kernels")
@pytest.mark.parametrize("backend", ["kernels", "torch"])
def test_each_picture_of_a_mix_is_its_solo_run(backend: str, kernels: ctypes.CDLL) -> None:
    """Bit by bit on the kernels; on torch deterministic ones bit by bit, others within a level."""
    chance = random.Random(0)
    worlds.MORE["mixes"] = tiny.SDXLShape(channels=(16, 32), heads=(1, 2))  # heads of 16, as our kernels want them
    shape = "mixes" if backend == "kernels" else "plain"
    runner = Watching(tiny_model(shape), lane=shared_lane(), max_rows=16, **options_of(backend, kernels))

    @cache
    def alone(one: ImageParameters) -> np.ndarray:
        return levels(solo(runner, one))

    pool = [wish(chance, seed) for seed in range(64)]
    shared, mixes = 0, MIXES if backend == "kernels" else max(4, MIXES // 10)
    for _ in range(mixes):
        crank, mix = Crank(runner), chance.sample(pool, chance.randint(2, 7))
        runner.rides.clear()
        for index, one in enumerate(mix):
            crank.submit(str(index), replace(one))
            for _ in range(chance.randint(0, 2)):
                crank.turn()
        pictures = crank.pictures()
        shared += any(len(ride) > 1 for ride in runner.companions)
        for index, one in enumerate(mix):
            exact = backend == "kernels" or one.deterministic
            assert apart(pictures[str(index)], alone(one)) <= (not exact), one
    assert shared > mixes / 2, "nobody shared a forward"
    assert {phase for phase, _ in runner.rides} >= {"vae", "vae-tiny"} or mixes < 4
    assert runner.held() == 0 and runner.holdings.memory.taken == 0
