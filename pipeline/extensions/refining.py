"""The last steps of a picture on a second model, SDXL's refiner: where they begin, their sampler's table and prompts.

As an ensemble of expert denoisers (Balaji et al., 2022; Podell et al., 2023, section 2.5), which is diffusers'
`denoising_end` of the base model and `denoising_start` of the refiner.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from contract.errors import Invalid
from contract.refining import FIELD
from core.transfers import to_device
from pipeline.checkpoints.folder import ModelError
from pipeline.finite import all_finite
from pipeline.sampling.sigmas import SamplerTable

if TYPE_CHECKING:
    from contract.image import ImageParameters
    from pipeline.families.family import ImageModel
    from pipeline.sampling.denoise import Conditioning, DenoisingState
    from pipeline.text.encode import RequestPrompts

REFINER = "refiner"  # the backend of such steps
_LATENTS = ("scaling_factor", "shift_factor", "latents_mean", "latents_std", "latent_channels")


@dataclass(slots=True, eq=False)
class Refinement:
    """The part of a request that its refiner takes: its steps from `at` on run there."""

    at: int
    mode: str  # as the refiner's backend named it; "" unless the request is deterministic
    prompts: RequestPrompts  # as the refiner reads them
    conditionings: dict[int, Conditioning] = field(default_factory=dict)  # by their rows
    noise: torch.Tensor | None = None  # of what an inpainting keeps in these steps: a retry must not draw again
    finite: torch.Tensor | None = None  # bool []: whether all that the base model handed over is

    def begin(self, moved: DenoisingState, generator: torch.Generator) -> DenoisingState:
        """A request's state before each step: before the refiner's first one with that noise, if it inpaints.

        As in diffusers, whose second pipeline draws the noise of the kept region anew, from the same generator.
        """
        if moved.step != self.at:
            return moved
        self.finite = all_finite([moved.x])
        if moved.kept is None:
            return moved
        if self.noise is None:
            self.noise = to_device(torch.randn(moved.x.shape, generator=generator), moved.x.device)
        return replace(moved, kept=replace(moved.kept, noise=self.noise))


def check_pair(refiner: ImageModel, base: ImageModel) -> None:
    """Raise `ModelError` for a model that is no refiner, and one whose latents are not the base model's."""
    if not refiner.family.refines:
        raise ModelError(f"{refiner.name}: is no SDXL refiner, and cannot take the last steps of another model")
    if base.family.label != refiner.family.refines or base.inpaints:
        raise ModelError(f"{refiner.name}: refines SDXL's pictures, and {base.name} is no SDXL that draws any")
    for name in _LATENTS:
        own, expected = (getattr(model.vae.config, name, None) for model in (refiner, base))
        if own != expected:
            raise ModelError(f"{refiner.name}: its VAE's {name} is {own}, and that of {base.name} is {expected}")
    if refiner.vae_scale != base.vae_scale:
        raise ModelError(f"{refiner.name}: it has {refiner.vae_scale} pixels per latent, {base.name} {base.vae_scale}")


def table(base: ImageModel, refiner: ImageModel, parameters: ImageParameters, sampler: str) -> tuple[SamplerTable, int]:
    """Return the table of both models' steps, and the refiner's first step, which begins without the base's history.

    Of an edit both are counted from its first step. Raises `Invalid` for a share that leaves one of them no step, and
    ValueError as `ImageModel.sampler_table`.
    """
    assert parameters.refiner is not None
    start, skipped = parameters.refiner.start, parameters.skipped

    def steps(model: ImageModel, begin: int = 0) -> SamplerTable:
        return model.sampler_table(
            sampler, parameters.steps, (parameters.width, parameters.height), begin, parameters.schedule
        )

    whole = steps(base)
    at = _begin(whole, start, base)
    if not skipped < at < whole.steps:
        who = "the model itself" if at <= skipped else "the refiner"
        words = f", of which this strength makes the last {parameters.made}," if skipped else ""
        raise Invalid(f"{FIELD}.from", f"{start:g} of {whole.steps} steps{words} leaves {who} no step")
    if not torch.equal(steps(refiner).timesteps, whole.timesteps):
        raise Invalid(FIELD, f"{refiner.name} has other timesteps than {base.name} with this sampler and schedule")
    return joined(steps(base, skipped), steps(refiner, at), at - skipped), at - skipped


def joined(first: SamplerTable, second: SamplerTable, at: int) -> SamplerTable:
    """The first `at` steps of one table, and all steps of the other.

    Between the two the level is that of no noise: diffusers' first pipeline ends with the kept region as it is.
    """
    return SamplerTable(
        name=first.name,
        steps=at + second.steps,
        init_noise_sigma=first.init_noise_sigma,
        timesteps=torch.cat([first.timesteps[:at], second.timesteps]),
        coefficients=torch.cat([first.coefficients[:at], second.coefficients]),
        noisy=first.noisy[:at] + second.noisy,
        levels=torch.cat([first.levels[:at], first.levels[-1:], second.levels[1:]]),
    )


def _begin(own: SamplerTable, share: float, model: ImageModel) -> int:
    """The first step below the noise level at which the model's own share of the schedule ends."""
    clock = int(model.scheduler_config.get("num_train_timesteps", 1000))
    return int((own.timesteps >= round(clock - share * clock)).sum())
