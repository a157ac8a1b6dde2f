"""Stage `teacher`: what emoji-xl draws of the captions of scenes, from which its students are distilled."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.sampling import sigmas
from training import checkpoint, tokens, unet
from training.run import TrainingRun, command
from training.stream import SceneStream

GUIDANCE = 5.0  # the family's default
STEPS = 12  # of Euler's method
CHUNK = 1024  # pictures drawn together on a GPU


@dataclass(frozen=True)
class Pairs:
    """The teacher's images and their noise: int16 ids [N, L], float16 `noise` and `latents` [N, 4, h, w]."""

    ids: Tensor
    noise: Tensor
    latents: Tensor


class Teacher(nn.Module):
    """The frozen model: reads captions, and denoises with guidance."""

    time_ids: Tensor

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        parts = unet.load(run)
        self.unet, self.text, self.text_2 = parts.unet, parts.text, parts.text_2
        self.end, self.pad_2 = int(tokens.clip_tokenizer(run).eos_token_id), tokens.pad_ids(run)[1]
        side = float(run.size)
        self.register_buffer("time_ids", torch.tensor([side, side, 0, 0, side, side], device=run.device))

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """END-padded ids [B, L] to states [B, L, C] and pooled [B, P]."""
        parts: Any = self
        return unet.read_text(parts, ids, tokens.repad(ids, self.end, self.pad_2))

    def told(self, pooled: Tensor) -> dict[str, Tensor]:
        """The UNet's `added_cond_kwargs`."""
        return {"text_embeds": pooled, "time_ids": self.time_ids.expand(len(pooled), 6)}

    @torch.no_grad()
    def forward(self, x: Tensor, step: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
        """The noise in x [B, 4, h, w] at timesteps [B], with guidance; the unconditional embedding is zero."""
        states, pooled = (torch.cat([torch.zeros_like(predictions), predictions]) for predictions in (states, pooled))
        predictions = self.unet(
            torch.cat([x, x]), torch.cat([step, step]), states, added_cond_kwargs=self.told(pooled), return_dict=False
        )
        without, with_ = predictions[0].float().chunk(2)
        prediction: Tensor = without + GUIDANCE * (with_ - without)
        return prediction


@torch.no_grad()
def train(run: TrainingRun) -> None:
    """Draw for the budget, of which an iteration is one batch, and writes `teacher/pairs.pt`."""
    stream = SceneStream(run, CHUNK if run.on_gpu else (run.batch or 32), native=True)
    teacher = Teacher(run)
    denoise = run.compiled(teacher)
    plan = sigmas.table(run.picture.sampling() | {"_class_name": "EulerDiscreteScheduler"}, "euler", STEPS)
    generator = torch.Generator(device=run.device).manual_seed(run.seed)
    steps = list(zip(plan.timesteps.to(run.device), plan.coefficients.tolist(), strict=True))
    side, begun = run.size // 8, time.monotonic()
    batches: list[Pairs] = []
    ends: list[torch.cuda.Event] = []
    while True:
        ids = stream.at(len(batches)).ids
        noise = torch.randn(len(ids), 4, side, side, generator=generator, device=run.device)
        with run.autocast():
            states, pooled = teacher.read(ids)
            x = noise * plan.init_noise_sigma
            for step, (c_in, a_x, a_m, b_x, b_0, *_) in steps:
                guess = denoise(x * c_in, step.expand(len(x)), states, pooled)
                x = b_x * x + b_0 * (a_x * x + a_m * guess)
        batches.append(Pairs(ids.short(), noise.half(), x.half()))
        if run.on_gpu:  # the next batch is queued while this one is drawn, and no more, for the clock's sake
            ends.append(torch.cuda.Event())
            ends[-1].record()
            if len(ends) > 1:
                ends[-2].synchronize()
        spent = (time.monotonic() - begun) / 60
        if (len(batches) >= run.iterations) if run.iterations is not None else (spent >= (run.minutes or 1.0)):
            break
    state = {f.name: torch.cat([getattr(pair, f.name) for pair in batches]).cpu() for f in dataclasses.fields(Pairs)}
    checkpoint.save(run.folder("teacher") / "pairs.pt", state)
    print(f"teacher pairs={len(state['ids'])} minutes={spent:.2f}", flush=True)


def load(run: TrainingRun) -> Pairs:
    """Load the stage's output on the run's device; raises `FileNotFoundError` before it has run."""
    state = checkpoint.need(run.work / "teacher" / "pairs.pt", "teacher")
    return Pairs(**{name: tensor.to(run.device) for name, tensor in state.items()})


if __name__ == "__main__":
    command(__doc__, train)
