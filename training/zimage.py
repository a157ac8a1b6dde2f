"""Stage `zimage`: trains the Z-Image's transformer and, with it, its text encoder, on latents and caption tables.

The objective is flow matching: at noise level sigma a row is (1 - sigma) · clean + sigma · noise, and the transformer
predicts clean - noise, which `ZImagePipeline` negates for the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evaluation.scenes import emoji
from pipeline.checkpoints.tiny_zimage import STEPS
from training import captions, loop, zimage_tokens, zimage_vae
from training.run import TrainingRun, command
from training.zimage_forward import ZImageBatch

DROP_TEXT = 0.02  # share of empty captions
LONG_EVERY = 16  # steps: one in so many reads captions of the second bucket, which are rare
SAMPLED = 0.5  # share of rows at the sampler's own noise levels; the others are spread over all


@dataclass
class ZImageModules:
    """The picture model's trained parts."""

    transformer: Any
    text: Any

    def modules(self) -> dict[str, nn.Module]:
        """The parts by the names under which checkpoints keep them."""
        return {"transformer": self.transformer, "text": self.text}


def build(run: TrainingRun) -> ZImageModules:
    """Fresh parts on the run's device.

    The text encoder's last layer and norm stay untrained: Z-Image reads what enters them.
    """
    from diffusers import ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3Model

    shape = run.zimage
    torch.manual_seed(run.seed)
    transformer: Any = ZImageTransformer2DModel(**shape.transformer())
    text: Any = Qwen3Model(
        Qwen3Config(**shape.text(run.shapes.zimage_vocab, zimage_tokens.tokenizer(run).pad_token_id))
    )
    with torch.no_grad():
        nn.init.zeros_(transformer.all_final_layer["2-1"].linear.weight)
    text.layers[-1].requires_grad_(False)
    text.norm.requires_grad_(False)
    return ZImageModules(transformer.to(run.device), text.to(run.device))


def sigmas(run: TrainingRun) -> Tensor:
    """The noise levels [8] at which `ZImagePipeline` calls the transformer, from 1 downwards."""
    return shift_sigmas(torch.linspace(1, 1 / STEPS, STEPS), run.zimage.shift)


def shift_sigmas(sigma: Tensor, shift: float) -> Tensor:
    """`FlowMatchEulerDiscreteScheduler`'s static shift of noise levels."""
    return shift * sigma / (1 + (shift - 1) * sigma)


class Batches:
    """Draws captions and clean latents of every picture but the held-out variants, on white and on every named
    background; all captions of a batch fall into one bucket.
    """

    def __init__(self, run: TrainingRun) -> None:
        rows = emoji.read_rows(run.data)
        self.size = run.batch or (512 if run.on_gpu else 64)
        self._device = run.device
        self._latents = zimage_vae.load_latents(run).to(run.device)
        table = zimage_tokens.caption_table(run, rows).to(run.device)
        reader = zimage_tokens.tokenizer(run)
        self._empty = zimage_tokens.encode(reader, [""]).to(run.device)
        self._pad = int(reader.pad_token_id)
        self._colours = table.shape[2]
        odds = torch.tensor(captions.odds(rows, run.held_out), device=run.device)
        colour = torch.full((self._colours,), 0.5 / (self._colours - 1), device=run.device)
        colour[0] = 0.5
        lengths = (table != self._pad).sum(-1)
        mass = odds[:, None, None] * colour * torch.ones_like(lengths)
        self._per_picture = lengths[0].numel()
        self._table = table.flatten(0, 2)
        self._bounds: list[Tensor] = []
        lower = 0
        for upper in zimage_tokens.BUCKETS:
            inside = mass * ((lengths > lower) & (lengths <= upper))
            self._bounds.append(inside.flatten().double().cumsum(0))
            lower = upper
        self._any_long = float(self._bounds[1][-1]) > 0

    def bucket(self, iteration: int) -> int:
        """The bucket that a step reads: the second one now and then, where there is anything in it."""
        return int(iteration % LONG_EVERY == LONG_EVERY - 1 and self._any_long)

    def draw(self, bucket: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [B, L], their lengths [B], and latents fp32 [B, C, h, w]."""
        factory = loop.factory(generator)
        bounds, count = self._bounds[bucket], self.size
        positions = torch.rand(count, dtype=torch.float64, **factory) * bounds[-1]
        number = torch.searchsorted(bounds, positions, right=True).clamp(max=len(bounds) - 1)
        picture, colour = number // self._per_picture, number % self._colours
        ids = self._table[number].long()
        if bucket == 0:
            ids = torch.where(torch.rand(count, 1, **factory) < DROP_TEXT, self._empty, ids)
        clean = self._latents[(colour - 1).clamp(min=0), picture].float()
        return ids[:, : zimage_tokens.BUCKETS[bucket]], (ids != self._pad).sum(1), clean


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train the transformer and the text encoder."""
    batches = Batches(run)
    parts = build(run)
    module = ZImageBatch(parts.transformer, parts.text)
    predict = run.compiled(module, dynamic=False)
    batch, side = batches.size, run.size // 16
    levels, shift = sigmas(run).to(run.device), run.zimage.shift

    def loss(iteration: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        factory = loop.factory(generator)
        bucket = batches.bucket(iteration)
        ids, lengths, clean = batches.draw(bucket, generator)
        # One level out of each of `batch` equal intervals: less variance than independent draws.
        even = (torch.randperm(batch, **factory) + torch.rand(batch, **factory)) / batch
        exact = levels[(even * STEPS).long().clamp(max=STEPS - 1)]
        sigma = torch.where(torch.rand(batch, **factory) < SAMPLED, exact, shift_sigmas(even, shift))
        noise = torch.randn(clean.shape, **factory)
        share = sigma[:, None, None, None]
        noisy = (1 - share) * clean + share * noise
        with run.autocast():
            guess = predict(noisy, 1 - sigma, ids, lengths, *module.turns(ids.shape[1], side, side))
        square = (guess.float() - (clean - noise)).square().mean(dim=(1, 2, 3))
        late = sigma >= 0.9
        return square.mean(), {"flow_noisy": (square.detach() * late).sum() / late.sum().clamp(min=1)}

    average = 0.9995 if run.on_gpu else 0.999
    return loop.train(loop.Stage("zimage", parts.modules(), loss, rate=2e-3, average=average, rates={"text": 0.7}), run)


def load(run: TrainingRun) -> ZImageModules:
    """The trained parts with averaged weights; raises `FileNotFoundError` when they are not trained."""
    parts = build(run)
    loop.load_average("zimage", parts.modules(), run)
    return parts


if __name__ == "__main__":
    command(__doc__, train)
