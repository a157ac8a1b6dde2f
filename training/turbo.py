"""Stage `turbo`: distils emoji-xl into a smaller UNet that draws in one to four steps without guidance.

The student regresses the end of the teacher's trajectory (Luhman & Luhman, 2021): from the noise that the teacher
began with at the first timestep, and from the latents noised anew at the others, as the sampler of latent consistency
models (Luo et al., 2023) noises what it feeds to later steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoints.tiny import TIMESTEPS
from training import loop, teacher, unet
from training.run import TrainingRun, command

FIRST = 0.4  # the share of rows at the first timestep, on which everything depends
CLOCK = 50  # timesteps that the sampler chooses from (`original_inference_steps`)


def build(run: TrainingRun) -> Any:
    """A fresh student, on the run's device."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(run.seed)
    model: Any = UNet2DConditionModel(**run.turbo.unet())
    return model.to(run.device)


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train the student on the teacher's pairs. Its prediction is v (Salimans & Ho, 2022)."""
    pairs, source = teacher.load(run), teacher.Teacher(run)
    student = build(run)
    predict = run.compiled(student)
    batch = run.batch or (512 if run.on_gpu else 32)
    signal = unet.alphas_bar(run.device)

    def loss(_: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        factory = loop.factory(generator)
        index = torch.randint(len(pairs.ids), (batch,), **factory)
        clean = pairs.latents[index].float()
        later = (1 + torch.randint(CLOCK - 1, (batch,), **factory)) * (TIMESTEPS // CLOCK) - 1
        first = torch.rand(batch, **factory) < FIRST
        step = torch.where(first, TIMESTEPS - 1, later)
        noise = torch.randn(clean.shape, **factory)
        noise = torch.where(first[:, None, None, None], pairs.noise[index].float(), noise)
        alpha, sigma = (share.sqrt()[:, None, None, None] for share in (signal[step], 1 - signal[step]))
        with run.autocast():
            states, pooled = source.read(pairs.ids[index].long())
            noisy = alpha * clean + sigma * noise
            guess = predict(noisy, step, states, added_cond_kwargs=source.told(pooled), return_dict=False)[0]
        square = (guess.float() - (alpha * noise - sigma * clean)).square().mean(dim=(1, 2, 3))
        return square.mean(), {"first": (square.detach() * first).sum() / first.sum().clamp(min=1)}

    stage = loop.Stage(
        "turbo", {"unet": student}, loss, rate=2e-3, warmup=150, average=0.9995 if run.on_gpu else 0.99, cooldown=0.4
    )
    return loop.train(stage, run)


def load(run: TrainingRun) -> Any:
    """The student with averaged weights; raises `FileNotFoundError` when it is not trained."""
    return loop.load_average("turbo", {"unet": build(run)}, run)


if __name__ == "__main__":
    command(__doc__, train)
