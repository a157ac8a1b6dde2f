"""Drawing outside the engine, as calibration does: what a request would get, its forwards seen from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from contract.image import ImageParameters
from pipeline.backends.phases import on_torch
from pipeline.drawing import Denoiser
from pipeline.pixels import vae
from pipeline.sampling import samplers
from tests.pipeline.worlds import SHAPES, Watching, levels, model, shared_lane, solo
from unet_opt.inputs import DenoiserInputs

CASES = [(shape, guidance, None) for shape in SHAPES for guidance in (5.0, 1.0)]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shape", "guidance", "sampler"), [*CASES, *(("plain", 5.0, name) for name in samplers.SCHEDULERS)]
)
def test_a_prompt_is_drawn_as_a_request_is(
    shape: str, guidance: float, sampler: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and among others: with any sampler and its noise, distilled models too."""
    one = model(shape)
    if sampler is not None:
        monkeypatch.setattr(samplers, "default_name", lambda config, offered: sampler)
    runner = Watching(one, lane=shared_lane())
    drawing = Denoiser(one, on_torch(one).denoiser, guidance=guidance, steps=4)
    prompts, seeds = ["a red cat", "two dogs", "a boat"], [1, 2, 3]
    pixels = vae.decode(one, drawing.latents(prompts, seeds))[0].int()
    wanted = ImageParameters(
        "", 0, one.native, one.native, steps=4, guidance_scale=guidance, scheduler=sampler or one.defaults.scheduler
    )
    for prompt, seed, found in zip(prompts, seeds, pixels, strict=True):
        drawn = torch.from_numpy(levels(solo(runner, replace(wanted, prompt=prompt, seed=seed))))
        assert (found - drawn).abs().max() <= 1
        assert drawn.float().std() > 10, "a flat picture would prove nothing"
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
