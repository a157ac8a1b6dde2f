"""Stage `tiny_vae`: distils the codec of emoji-xl into one of TAESD's shape (Bohan, 2023), without attention or norms.

Its decoder learns to see in latents what the codec's own decoder sees, its encoder to find them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.training import latents, loop, vae
from lab.training.run import TrainingRun, command
from lab.training.stream import SceneStream

WIDTH, BLOCKS = 16, (4, 4, 2, 0)  # blocks at the full resolution cost most
NOISE = 0.1  # at most, on the latents: a sampler's come near the teacher's, not exactly


def build(run: TrainingRun) -> Any:
    """A fresh `AutoencoderTiny` in channels-last layout, on the run's device."""
    from diffusers import AutoencoderTiny

    torch.manual_seed(run.seed)
    widths = (WIDTH,) * 4
    model: Any = AutoencoderTiny(
        encoder_block_out_channels=widths, decoder_block_out_channels=widths, num_decoder_blocks=BLOCKS
    )
    return model.to(run.device, memory_format=torch.channels_last)


class TinyLoss(nn.Module):
    """Both halves' losses as a single module."""

    def __init__(self, tiny: Any) -> None:
        super().__init__()
        self.tiny = tiny

    def forward(self, latent: Tensor, true: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [B, 4, h, w] and their pixels [B, 3, H, W] to loss, error of the encoder, mean square of pixels."""
        reconstruction = self.tiny.decoder(latent).float()
        loss = F.mse_loss(self.tiny.encoder(true).float(), latent)
        return vae.reconstruction_loss(reconstruction, true) + 0.1 * loss, loss, F.mse_loss(reconstruction, true)


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train on the latents of scenes and on what the codec decodes of them."""
    codec = latents.load_codec(run).to(run.device, memory_format=torch.channels_last)
    batch, scale = run.batch or (96 if run.on_gpu else 8), float(codec.config.scaling_factor)
    stream = SceneStream(run, batch, native=True)
    tiny = build(run)
    measure = run.compiled(TinyLoss(tiny))

    def loss(iteration: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        factory = loop.factory(generator)
        latent = latents.encode(run, codec, stream.draw(stream.at(iteration))) * scale
        spread = NOISE * torch.rand(batch, 1, 1, 1, **factory)
        latent = latent + spread * torch.randn(latent.shape, **factory)
        with run.autocast():
            with torch.no_grad():
                true = codec.decode(latent / scale, return_dict=False)[0].float().clamp(-1, 1)
            total, value, square = measure(latent, true)
        return total, {"encoder": value.detach(), "psnr_db": 10 * torch.log10(4 / square.detach())}

    stage = loop.Stage("tiny_vae", {"vae": tiny}, loss, rate=2e-3, decay=0.0, average=0.998, warmup=50)
    return loop.train(stage, run)


def load(run: TrainingRun) -> Any:
    """The trained codec with averaged weights; raises `FileNotFoundError` when it is not trained."""
    return loop.load_average("tiny_vae", {"vae": build(run)}, run)


if __name__ == "__main__":
    command(__doc__, train)
