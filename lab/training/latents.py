"""Stage `latents`: fixes the codec's scale, from what it makes of scenes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lab.training import checkpoint, vae
from lab.training.run import TrainingRun, command
from lab.training.stream import SceneStream

CHUNK, CHUNKS = 64, 16


@torch.no_grad()
def train(run: TrainingRun) -> None:
    """Centres and scales the codec's latents; writes `latents/latents.pt`."""
    codec = vae.load(run)
    stream = SceneStream(run, CHUNK, native=True)
    # Later scenes than any that is trained on.
    probe = torch.cat([encode(run, codec, stream.draw(stream.at(2**30 + n))) for n in range(CHUNKS)])
    factor = centre_(codec, probe)
    checkpoint.save(run.folder("latents") / "latents.pt", {"scaling_factor": factor, "vae": codec.state_dict()})
    print(f"latents scaling_factor={factor:.5f}", flush=True)


@torch.no_grad()
def encode(run: TrainingRun, codec: Any, pixels: Tensor) -> Tensor:
    """Posterior means, float32, of pixels [B, 3, H, W] in -1..1."""
    with run.autocast():
        moments = codec.quant_conv(codec.encoder(pixels.contiguous(memory_format=torch.channels_last)))
    mean: Tensor = moments.float().chunk(2, dim=1)[0]
    return mean


@torch.no_grad()
def centre_(codec: Any, latents: Tensor) -> float:
    """Folds a shift and a relative scale per channel into the codec's two 1x1 convolutions; returns `scaling_factor`.

    Diffusion wants latents of mean 0 and deviation 1. SDXL's scaling factor fixes the deviation of all
    channels together; the shift and the differences between channels are taken up here, so the exported files
    need nothing beyond SDXL's own configuration.
    """
    mean = latents.mean(dim=(0, 2, 3))
    std = latents.std(dim=(0, 2, 3))
    overall = float(std.log().mean().exp())
    ratio = (std / overall).to(codec.quant_conv.weight.device)
    mean = mean.to(ratio.device)
    n = len(mean)
    codec.quant_conv.weight[:n] /= ratio[:, None, None, None]
    codec.quant_conv.bias[:n] = (codec.quant_conv.bias[:n] - mean) / ratio
    codec.quant_conv.bias[n:] -= 2 * ratio.log()
    codec.post_quant_conv.bias += codec.post_quant_conv.weight[:, :, 0, 0] @ mean
    codec.post_quant_conv.weight *= ratio[None, :, None, None]
    return 1 / overall


def load_codec(run: TrainingRun) -> Any:
    """The codec with its latents centred and `scaling_factor` set, in evaluation mode."""
    state = checkpoint.need(run.work / "latents" / "latents.pt", "latents")
    codec = vae.build(run)
    codec.load_state_dict(state["vae"])
    codec.register_to_config(scaling_factor=float(state["scaling_factor"]))
    return codec.eval().requires_grad_(False)


if __name__ == "__main__":
    command(__doc__, train)
