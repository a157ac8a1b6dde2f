"""Generates a batch of prompts from noise to latents without the engine: for calibration and for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pipeline import denoise, sigmas
from pipeline.encode import Encoder
from pipeline.load import ImageModel
from unet_opt.deepcache import SplitUNet


class Denoiser:
    """A model whose UNet `forward` may be any callable with the arguments of `SplitUNet.deep`.

    The result equals that of a request for the native size with the model's own sampler.
    """

    def __init__(self, model: ImageModel, network: SplitUNet, *, guidance: float = 5.0, steps: int = 20) -> None:
        """`network` is the model's UNet on any lowering."""
        self.model = model
        self._network = network
        self._encoder = Encoder(model, capacity=512)
        self._guidance, self._steps = guidance, steps
        name = sigmas.default_name(model.scheduler_config)
        self._table = sigmas.table(model.scheduler_config, name, steps)

    @torch.inference_mode()
    def latents(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        forward: Callable[..., Any] | None = None,
        until: int | None = None,
        around: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
    ) -> Tensor:
        """Latents [B, C, h, w] after `until` steps (default: all), at the native size, with guidance.

        `around(step)` is entered around each UNet forward.
        """
        model = self.model
        side = model.native // model.vae_scale
        gatherer = denoise.BatchGatherer(model.dtype)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        shape = (1, model.unet.config.in_channels, side, side)

        def draw(generator: torch.Generator) -> Tensor:
            return torch.randn(shape, generator=generator)

        riders = []
        for prompt, generator in zip(prompts, generators, strict=True):
            x = (draw(generator) * self._table.init_noise_sigma).to(model.device)
            conditioning = self._condition(prompt)
            riders.append(denoise.DenoisingState(self._table, 0, x, torch.zeros_like(x), self._guidance, conditioning))
        rows = sum(rider.conditioning.rows for rider in riders)
        for step in range(self._steps if until is None else until):
            inputs = gatherer.inputs(riders, rows)
            with around(step):
                output = inputs.run(forward or self._network.deep)[0]
            noisy = self._table.noisy[step]
            noise = [draw(generator).to(model.device) if noisy else None for generator in generators]
            riders = denoise.advance(riders, output, noise)
        return torch.cat([rider.x for rider in riders])

    def _condition(self, prompt: str) -> denoise.Conditioning:
        width = self.model.unet.config.time_cond_proj_dim
        if width is not None or self._guidance <= 1:  # distilled models take the guidance scale as an input, in one row
            found = self._encoder.encode([prompt])
        elif self.model.force_zeros:
            found = [self._encoder.zero, *self._encoder.encode([prompt])]
        else:
            found = self._encoder.encode(["", prompt])
        hidden = torch.stack([embedding.hidden for embedding in found])
        pooled = torch.stack([embedding.pooled for embedding in found])
        return denoise.Conditioning(
            kv=self._network.keys(hidden),
            pooled=pooled,
            time_ids=denoise.time_ids(self.model.native, self.model.native, len(found), pooled),
            time_cond=None if width is None else denoise.guidance_embedding(self._guidance, width, pooled),
        )
