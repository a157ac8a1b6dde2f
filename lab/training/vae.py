"""Stage `vae`: trains the image codec, `AutoencoderKL` with factor 8, on scenes and single emoji.

It uses no trained perceptual network: a loss on gradients at three scales keeps edges sharp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.training import loop
from lab.training.run import TrainingRun, command
from lab.training.stream import PerSize, SceneStream

KL_WEIGHT = 1e-4  # per element; keeps the posterior a little noisy, so that the decoder forgives small errors


def build(run: TrainingRun) -> Any:
    """A fresh autoencoder in channels-last layout, on the run's device."""
    from diffusers import AutoencoderKL

    torch.manual_seed(run.seed)
    model: Any = AutoencoderKL(**run.picture.vae())
    with torch.no_grad():
        # A posterior as wide as the prior would drown every colour in noise at the start.
        model.quant_conv.bias[model.config.latent_channels :] = -4.0
    return model.to(run.device, memory_format=torch.channels_last)


def reconstruction_loss(output: Tensor, true: Tensor) -> Tensor:
    """L1 on pixels and on their first differences, at full, half and quarter scale. [B, 3, H, W] in -1..1."""
    total = torch.zeros((), device=output.device)
    for scale in range(3):
        if scale:
            output, true = F.avg_pool2d(output, 2), F.avg_pool2d(true, 2)
        error = output - true
        down = error[:, :, 1:] - error[:, :, :-1]
        right = error[:, :, :, 1:] - error[:, :, :, :-1]
        total = total + error.abs().mean() + 0.5 * (down.abs().mean() + right.abs().mean())
    return total


class VAELoss(nn.Module):
    """Loss of one batch as a single module, so that one compiled graph holds encoder, decoder and loss."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, true: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels [B, 3, H, W] and normal noise [B, 4, H/8, W/8] to loss, KL per element, mean square error."""
        moments = self.vae.quant_conv(self.vae.encoder(true))
        mean, log_variance = moments.float().chunk(2, dim=1)
        log_variance = log_variance.clamp(-30, 20)
        latent = mean + (0.5 * log_variance).exp() * noise
        output = self.vae.decoder(self.vae.post_quant_conv(latent)).float()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return reconstruction_loss(output, true) + KL_WEIGHT * kl, kl, F.mse_loss(output, true)


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train the codec, from `start/` where that has one."""
    batch = run.batch or (96 if run.on_gpu else 8)
    stream = SceneStream(run, batch)
    vae = build(run)
    loop.begin("vae", {"vae": vae}, run)
    codec = PerSize(run, VAELoss(vae))

    def loss(iteration: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        batch = stream.at(iteration)
        true = stream.draw(batch)
        shape = (len(true), 4, true.shape[-2] // 8, true.shape[-1] // 8)
        noise = torch.randn(shape, generator=generator, device=run.device)
        with run.autocast():
            total, kl, square = codec.at(batch.scenes.size)(true.contiguous(memory_format=torch.channels_last), noise)
        return total, {"kl": kl.detach(), "psnr_db": 10 * torch.log10(4 / square.detach())}

    stage = loop.Stage("vae", {"vae": vae}, loss, rate=run.rate(2e-3, "vae"), decay=0.0, average=0.998, warmup=50)
    return loop.train(stage, run)


def load(run: TrainingRun) -> Any:
    """The trained codec with averaged weights, in evaluation mode; raises `FileNotFoundError` when it is not
    trained.
    """
    return loop.load_average("vae", {"vae": build(run)}, run)


if __name__ == "__main__":
    command(__doc__, train)
