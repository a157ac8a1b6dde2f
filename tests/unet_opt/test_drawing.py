"""Drawing outside the engine, as calibration does: what a request would get, its forwards seen from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from contract.image import ImageParameters
from pipeline.backends.phases import on_torch
from pipeline.drawing import Denoiser
from pipeline.pixels import vae
from pipeline.sampling import samplers
from tests.pipeline.worlds import SHAPES, Watching, levels, model, shared_lane, solo
from unet_opt.inputs import DenoiserInputs


@pytest.mark.quick
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("guidance", [5.0, 1.0])
def test_a_prompt_is_drawn_as_a_request_is(shape: str, guidance: float) -> None:
    """Alone and among others: with any sampler, distilled models too."""
    one = model(shape)
    runner = Watching(one, lane=shared_lane())
    drawing = Denoiser(one, on_torch(one).denoiser, guidance=guidance, steps=4)
    prompts, seeds = ["a red cat", "two dogs", "a boat"], [1, 2, 3]
    latents = drawing.latents(prompts, seeds)
    pixels = vae.decode(one, latents).int()
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        wanted = ImageParameters(
            prompt=prompt,
            seed=seed,
            width=one.native,
            height=one.native,
            steps=4,
            guidance_scale=guidance,
            scheduler=one.defaults.scheduler,
        )
        drawn = torch.from_numpy(levels(solo(runner, wanted)))
        assert (pixels[index] - drawn).abs().max() <= 1
        assert drawn.float().std() > 10, "a flat picture would prove nothing"
    runner.close()


@pytest.mark.parametrize("name", samplers.SCHEDULERS)
def test_every_sampler_draws_the_requests_noise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = model("plain")
    monkeypatch.setattr(samplers, "default_name", lambda config, offered: name)
    runner = Watching(one, lane=shared_lane())
    latents = Denoiser(one, on_torch(one).denoiser, guidance=3.0, steps=5).latents(["a red cat"], [7])
    wanted = ImageParameters(
        prompt="a red cat", seed=7, width=one.native, height=one.native, steps=5, guidance_scale=3.0, scheduler=name
    )
    drawn = torch.from_numpy(levels(solo(runner, wanted)))
    assert (vae.decode(one, latents)[0].int() - drawn).abs().max() <= 1
    runner.close()


def test_forwards_are_seen_step_by_step_and_may_be_anothers() -> None:
    one = model("plain")
    split = on_torch(one).denoiser
    drawing = Denoiser(one, split, steps=6)
    seen: list[tuple[int, int]] = []

    @contextmanager
    def around(step: int) -> Iterator[None]:
        at = len(calls)
        yield
        seen.append((step, len(calls) - at))

    calls: list[int] = []

    def forward(inputs: DenoiserInputs) -> tuple[torch.Tensor, ...]:
        calls.append(len(inputs.sample))
        return split.deep(inputs)

    latents = drawing.latents(["a", "b"], [1, 2], forward=forward, until=3, around=around)
    assert seen == [(0, 1), (1, 1), (2, 1)] and calls == [4, 4, 4]
    assert latents.shape == (2, 4, 4, 4) and torch.equal(latents, drawing.latents(["a", "b"], [1, 2], until=3))
