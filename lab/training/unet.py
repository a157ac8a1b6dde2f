"""Stage `unet`: trains the denoiser and, with it, both text towers, on scenes and single emoji.

The objective is epsilon prediction with SDXL's `scaled_linear` noise schedule. Sizes, crops and enlarged originals are
told as SDXL tells them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lab.training import clip, latents, loop, tokens
from lab.training.run import TrainingRun, command
from lab.training.stream import PerSize, SceneStream
from pipeline.checkpoints.tiny import BETAS, TIMESTEPS

DROP_ALL, DROP_TEXT = 0.08, 0.02  # zeroed embeddings (the pipeline's unconditional), and an empty prompt


@dataclass
class TrainedModules:
    """The picture model's trained parts."""

    unet: Any
    text: Any
    text_2: Any

    def modules(self) -> dict[str, nn.Module]:
        """The parts by the names under which checkpoints keep them."""
        return {"unet": self.unet, "text": self.text, "text_2": self.text_2}


def build(run: TrainingRun) -> TrainedModules:
    """Fresh parts on the run's device; the text towers' last layers stay untrained here, as SDXL reads the
    one before.
    """
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    shape, vocabulary = run.picture, run.shapes.vocab
    pad, pad_2 = tokens.pad_ids(run)
    torch.manual_seed(run.seed)
    unet: Any = UNet2DConditionModel(**shape.unet())
    text: Any = CLIPTextModel(CLIPTextConfig(**shape.text(0, vocabulary, pad)))
    config = CLIPTextConfig(**shape.text(1, vocabulary, pad_2))
    text_2: Any = CLIPTextModelWithProjection(config)
    return TrainedModules(unet.to(run.device), text.to(run.device), text_2.to(run.device))


def adopt_(parts: TrainedModules, towers: clip.CLIPLoss) -> None:
    """Start the text towers from the ones that `clip` trained."""
    parts.text.load_state_dict(towers.text.state_dict())
    state = parts.text_2.state_dict()
    trained = {key.removeprefix("clip."): value for key, value in towers.state_dict().items()}
    parts.text_2.load_state_dict({key: trained[key] for key in state})


def alphas_bar(device: torch.device) -> Tensor:
    """Cumulative signal share per timestep, [1000], of SDXL's `scaled_linear` schedule."""
    betas = torch.linspace(BETAS[0] ** 0.5, BETAS[1] ** 0.5, TIMESTEPS, dtype=torch.float64) ** 2
    return (1 - betas).cumprod(0).float().to(device)


def weights(alpha_bar: Tensor) -> Tensor:
    """Loss weight of epsilon per noise level.

    Min-SNR-5 (Hang et al. 2023) where the signal is strong; and, where noise is strong, the fourth root of
    the noise variance: there a small error in epsilon is a large one in the picture, and a caption that is
    known by heart leaves nothing else to learn.
    """
    variance = (1 - alpha_bar) / alpha_bar  # sigma squared
    return (5 * variance).clamp(max=1) * (1 + variance) ** 0.25


class Noised(NamedTuple):
    """Latents [B, C, h, w] with noise in them, the noise, and their timesteps [B]."""

    latents: Tensor
    noise: Tensor
    step: Tensor


class EpsilonObjective:
    """The objective of a network on noised latents: its target, and how its errors count, by `weights`."""

    def __init__(self, device: torch.device) -> None:
        self._signal = alphas_bar(device)
        self._weight = weights(self._signal)

    def noised(self, clean: Tensor, generator: torch.Generator) -> Noised:
        """One timestep out of each of B equal intervals: less variance than independent draws."""
        factory = loop.factory(generator)
        batch = len(clean)
        order = torch.randperm(batch, **factory)
        step = ((order + torch.rand(batch, **factory)) * (TIMESTEPS / batch)).long().clamp(max=TIMESTEPS - 1)
        noise = torch.randn(clean.shape, **factory)
        share = self._signal[step][:, None, None, None]
        return Noised(share.sqrt() * clean + (1 - share).sqrt() * noise, noise, step)

    def loss(self, guess: Tensor, noised: Noised) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted error of a guess at the noise, and the plain one over all rows and over the noisiest."""
        square = (guess.float() - noised.noise).square().mean(dim=(1, 2, 3))
        late = noised.step >= 600
        return (self._weight[noised.step] * square).mean(), {
            "eps": square.detach().mean(),
            "eps_noisy": (square.detach() * late).sum() / late.sum().clamp(min=1),
        }


def read_text(parts: TrainedModules, ids: Tensor, ids_2: Tensor) -> tuple[Tensor, Tensor]:
    """Both tokenizers' ids [B, L] to states [B, L, C1 + C2], of the layers before the last, and pooled [B, P]."""
    first = parts.text(input_ids=ids, output_hidden_states=True)
    second = parts.text_2(input_ids=ids_2, output_hidden_states=True)
    states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
    return states, second.text_embeds


@dataclass(frozen=True)
class Frozen:
    """The codec and the text towers, for what is trained on or beside the denoiser: captions and pictures in."""

    run: TrainingRun
    parts: TrainedModules
    codec: Any
    objective: EpsilonObjective
    end: int
    pads: tuple[int, int]

    @classmethod
    def load(cls, run: TrainingRun, parts: TrainedModules) -> Frozen:
        """Load the frozen parts with the run's codec and tokenizers."""
        end = int(tokens.clip_tokenizer(run).eos_token_id)
        return cls(run, parts, latents.load_codec(run), EpsilonObjective(run.device), end, tokens.pad_ids(run))

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of pixels [B, 3, H, W] in -1..1."""
        return latents.encode(self.run, self.codec, pixels) * float(self.codec.config.scaling_factor)

    def noised(self, pixels: Tensor, generator: torch.Generator) -> Noised:
        """Latents of pixels [B, 3, H, W] in -1..1, with noise in them."""
        return self.objective.noised(self.encode(pixels), generator)

    @torch.no_grad()
    def read_text(self, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """States [B, L, C] and pooled [B, P] of END-padded ids [B, L]; zeros where `keep` [B] is 0. Under autocast."""
        states, pooled = read_text(self.parts, ids, tokens.repad(ids, self.end, self.pads[1]))
        return states * keep[:, None, None], pooled * keep[:, None]


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train the denoiser and both text towers, from `start/` where that has them."""
    # On a CPU reading a caption costs as much as a denoising, so it is read once and used often.
    repeats = 1 if run.on_gpu else 4
    stream = SceneStream(run, max(1, (run.batch or (512 if run.on_gpu else 128)) // repeats))
    empty = tokens.encode(tokens.clip_tokenizer(run), [""]).to(run.device)
    parts = build(run)
    if not loop.begin("unet", parts.modules(), run) and not (run.folder("unet") / "state.pt").exists():
        adopt_(parts, clip.load(run))
    unet, frozen = PerSize(run, parts.unet), Frozen.load(run, parts)

    def loss(iteration: int, generator: torch.Generator) -> tuple[Tensor, loop.Logged]:
        batch = stream.at(iteration)
        clean = frozen.encode(stream.draw(batch))
        silent = torch.rand(len(clean), 1, generator=generator, device=run.device) < DROP_TEXT
        ids = torch.where(silent, empty, batch.ids)
        noised = frozen.objective.noised(clean.repeat_interleave(repeats, 0), generator)
        keep = (torch.rand(len(noised.step), generator=generator, device=run.device) >= DROP_ALL).float()
        time_ids = batch.scenes.time_ids.to(run.device, non_blocking=True).repeat_interleave(repeats, 0)
        with run.autocast():
            states, pooled = read_text(parts, ids, tokens.repad(ids, frozen.end, frozen.pads[1]))
            states = states.repeat_interleave(repeats, 0) * keep[:, None, None]
            conditions = {"text_embeds": pooled.repeat_interleave(repeats, 0) * keep[:, None], "time_ids": time_ids}
            model = unet.at(batch.scenes.size)
            guess = model(noised.latents, noised.step, states, added_cond_kwargs=conditions, return_dict=False)[0]
        return frozen.objective.loss(guess, noised)

    average, rates = 0.9995 if run.on_gpu else 0.999, {"text": 0.3, "text_2": 0.3}
    rate = run.rate(1.5e-3, "unet")
    stage = loop.Stage("unet", parts.modules(), loss, rate=rate, warmup=150, average=average, rates=rates)
    return loop.train(stage, run)


def load(run: TrainingRun) -> TrainedModules:
    """The trained parts with averaged weights; raises `FileNotFoundError` when they are not trained."""
    parts = build(run)
    loop.load_average("unet", parts.modules(), run)
    return parts


if __name__ == "__main__":
    command(__doc__, train)
