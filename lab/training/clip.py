"""Stage `clip`: trains `emoji-clip` and the two text towers that the image model starts from.

Contrastive training on pairs of image and caption (Radford et al. 2021); every scene brings a caption with one thing
wrong besides, as in NegCLIP (Yuksekgonul et al. 2023), without which captions are read as bags of words. The second
text tower is `emoji-clip`'s own; the first is a smaller one trained against the same vision tower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.training import loop, tokens
from lab.training.run import TrainingRun, command
from lab.training.stream import SceneStream


class CLIPLoss(nn.Module):
    """`CLIPModel`, the first text tower and its projection; the loss of one batch is its forward."""

    def __init__(self, run: TrainingRun) -> None:
        from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTextModel

        super().__init__()
        shape, vocabulary = run.picture, run.shapes.vocab
        pad, pad_2 = tokens.pad_ids(run)
        clip_config: Any = CLIPConfig
        config = clip_config(
            text_config=shape.text(1, vocabulary, pad_2),
            vision_config=run.shapes.clip_vision(run.size),
            projection_dim=shape.pooled_width,
        )
        torch.manual_seed(run.seed)
        self.clip: Any = CLIPModel(config)
        self.text: Any = CLIPTextModel(CLIPTextConfig(**shape.text(0, vocabulary, pad)))
        self.head = nn.Linear(shape.text_width, shape.pooled_width, bias=False)
        self.pad_2 = pad_2

    def forward(self, pixels: Tensor, ids: Tensor, foils: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels [B, 3, H, W] in -1..1 and END-padded ids and foils [B, L]: the loss, the share that ranks first
        among all captions, and the share of those with a foil that ranks before it.

        Rows of one `label` [B] show the same emoji and are no wrong answers to one another.
        """
        seen = F.normalize(self.see(pixels).float(), dim=-1)
        texts = torch.cat([ids, foils])
        read = F.normalize(self.read(texts).float(), dim=-1)
        first = F.normalize(self.head(self.text(input_ids=texts).pooler_output).float(), dim=-1)
        scale = self.clip.logit_scale.clamp(max=4.6).exp()
        target = torch.arange(len(pixels), device=pixels.device)
        same = (label[:, None] == label[None]) & (target[:, None] != target[None])
        none = (foils[:, 1] == foils[:, -1]).expand(len(pixels), -1)
        barred = torch.cat([same, none], dim=1)
        scores = (scale * seen @ read.T).masked_fill(barred, -1e4)
        scores_1 = (scale * seen @ first.T).masked_fill(barred, -1e4)
        count = len(pixels)
        pairs = (scores, scores[:, :count].T, scores_1, scores_1[:, :count].T)
        loss = sum(F.cross_entropy(s, target) for s in pairs)
        before = (scores.diagonal() > scores[:, count:].diagonal()) & ~none[0]
        share = before.sum() / (~none[0]).sum().clamp(min=1)
        return torch.as_tensor(loss) / 4, (scores.argmax(1) == target).float().mean(), share

    def see(self, pixels: Tensor) -> Tensor:
        """Image features [B, pooled_width], not normalised."""
        features: Tensor = self.clip.visual_projection(self.clip.vision_model(pixel_values=pixels).pooler_output)
        return features

    def read(self, ids: Tensor) -> Tensor:
        """Text features [B, pooled_width] of END-padded ids, not normalised."""
        features: Tensor = self.clip.text_projection(self.clip.text_model(input_ids=ids).pooler_output)
        return features


def roughen(pixels: Tensor, noise: Tensor, kind: Tensor) -> Tensor:
    """Blurs a third of the pictures and adds a little noise to all, so that drawn pictures are not strangers.

    pixels [B, 3, H, W] in -1..1; noise like pixels, normal; kind [B] uniform in 0..1, which also sets the
    noise.
    """
    coarse = F.interpolate(F.avg_pool2d(pixels, 2), scale_factor=2.0, mode="bilinear")
    rough = torch.where((kind < 0.33)[:, None, None, None], coarse, pixels)
    return (rough + 0.1 * kind[:, None, None, None] * noise).clamp(-1, 1)


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train the towers, from `start/` where that has some."""
    batch = run.batch or (1024 if run.on_gpu else 128)
    stream = SceneStream(run, batch, native=True)
    towers = CLIPLoss(run).to(run.device)
    loop.begin("clip", {"towers": towers}, run)
    model = run.compiled(towers, dynamic=False)

    def loss(iteration: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        factory = loop.factory(generator)
        scene_batch = stream.at(iteration)
        ids, foils = scene_batch.ids, scene_batch.foils
        if not run.compile:  # the towers are causal: nothing behind the longest caption matters to END
            longest = int((torch.cat([ids, foils]) != ids[0, -1]).sum(1).max()) + 1
            ids, foils = ids[:, :longest], foils[:, :longest]
        pixels = stream.draw(scene_batch)
        kind = torch.rand(batch, **factory)
        noise = torch.randn(pixels.shape, **factory)
        pixels = roughen(pixels, noise, kind)
        with run.autocast():
            total, first, before = model(pixels, ids, foils, scene_batch.label)
        return total, {"first": first, "before_foil": before}

    stage = loop.Stage(
        "clip", {"towers": towers}, loss, rate=run.rate(1.5e-3, "clip"), decay=0.05, average=0.998, warmup=50
    )
    return loop.train(stage, run)


def load(run: TrainingRun) -> CLIPLoss:
    """The trained towers with averaged weights; raises `FileNotFoundError` when they are not trained."""
    towers: CLIPLoss = loop.load_average("clip", {"towers": CLIPLoss(run).to(run.device)}, run)
    return towers


if __name__ == "__main__":
    command(__doc__, train)
