"""Generates a batch of prompts from noise to latents without the engine: for calibration and for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from contract.errors import Invalid
from contract.image import ImageParameters
from contract.schedule import NoiseSchedule
from pipeline.families.family import ImageModel, Network
from pipeline.pixels import edit, vae
from pipeline.sampling import denoise, samplers
from pipeline.text.conditioning import ConditionedRequest, Conditioner
from pipeline.text.encode import Encoder
from unet_opt.inputs import DenoiserInputs

Forward = Callable[[DenoiserInputs], tuple[Tensor, ...]]
"""A denoiser's deep step: its output [B, C, h, w], and any further results."""


class Denoiser:
    """A model whose denoiser may be any `Forward`.

    The result equals that of a request for the native size with the model's default sampler. A model that inpaints
    repaints the whole of a grey image.
    """

    def __init__(self, model: ImageModel, network: Network, *, guidance: float = 5.0, steps: int = 20) -> None:
        """`network` is the model's denoiser on any lowering."""
        self.model = model
        self._network = network
        encoder = Encoder(model.family.text_encoder(model), capacity=512)
        self._conditioner = Conditioner(model, encoder, network.prepare_text)
        self._guidance, self._steps = guidance, steps
        defaults = model.defaults
        name = defaults.scheduler or samplers.default_name(model.scheduler_config, model.samplers)
        timesteps = defaults.timesteps if len(defaults.timesteps or ()) == steps else None
        schedule = NoiseSchedule(defaults.schedule_type, timesteps, eta=defaults.eta)
        self._table = model.sampler_table(name, steps, (model.native, model.native), schedule=schedule)

    def check(self, prompts: Sequence[str]) -> None:
        """Raise `Invalid` for the first prompt that the model does not read, by its number."""
        for number, prompt in enumerate(prompts, 1):
            try:
                self._conditioner.read(self._parameters(prompt))
            except Invalid as error:
                raise Invalid("prompts", f"number {number} {error.message}", error.code) from error

    @torch.inference_mode()
    def latents(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        forward: Forward | None = None,
        until: int | None = None,
        around: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
    ) -> Tensor:
        """Return latents [B, C, h, w] after `until` steps (default: all), at the native size, with guidance.

        `around(step)` is entered around each forward of the denoiser, which `forward` replaces.
        """
        model = self.model
        side = model.native // model.vae_scale
        gatherer = denoise.BatchGatherer(model.dtype, model.family.padded)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        shape = (1, model.latent_channels, side, side)

        def draw(generator: torch.Generator) -> Tensor:
            return torch.randn(shape, generator=generator)

        masked = None
        if model.inpaints:  # all is repainted
            grey = torch.zeros(1, model.native, model.native, 3, dtype=torch.uint8)
            everywhere = torch.ones(model.native, model.native, dtype=torch.bool)
            latents = vae.encode(model, grey, torch.zeros(shape), blank=everywhere)
            masked = edit.with_mask(everywhere, latents)
        states = []
        for prompt, generator in zip(prompts, generators, strict=True):
            x = (draw(generator) * self._table.init_noise_sigma).to(model.device)
            result = self._conditioned(prompt)
            states.append(
                denoise.DenoisingState(self._table, 0, x, torch.zeros_like(x), result.conditioning, masked=masked)
            )
        rows = sum(state.conditioning.rows for state in states)
        for step in range(self._steps if until is None else until):
            inputs = gatherer.inputs(states, rows)
            with around(step):
                output = (forward or self._network.deep)(inputs)[0]
            noisy = self._table.noisy[step]
            noise = [draw(generator).to(model.device) if noisy else None for generator in generators]
            states = denoise.advance(states, output, noise)
        return torch.cat([state.x for state in states])

    @torch.inference_mode()
    def embeddings(self, prompts: Sequence[str]) -> Tensor:
        """Return the text's embeddings of all rows of these prompts, [rows, T, D], in the order of `latents`."""
        return torch.cat([self._conditioned(prompt).hidden for prompt in prompts])

    def _conditioned(self, prompt: str) -> ConditionedRequest:
        (result,) = self._conditioner.conditions([self._parameters(prompt)])
        return result

    def _parameters(self, prompt: str) -> ImageParameters:
        side = self.model.native
        return ImageParameters(prompt, 0, side, side, guidance_scale=self._guidance)
