"""Stage `latents`: fixes the codec's scale and encodes every image on every background, once.

The palette is small enough that all latents fit in memory, so the UNet never waits for an encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from training import captions, checkpoint, pictures, vae
from training.run import TrainingRun, from_options, parser

CHUNK = 256


@dataclass(frozen=True)
class Latents:
    """`values` float16 [colours, N, 4, h, w], times `scaling_factor`; colours in the order of `COLOUR_NAMES`."""

    values: torch.Tensor
    scaling_factor: float


@torch.no_grad()
def train(run: TrainingRun) -> None:
    """Centres and scales the codec's latents, then encodes all; writes `latents/latents.pt`."""
    rows = pictures.read_rows(run.data)
    images = pictures.read_pictures(run.data, rows, run.size)
    codec = vae.load(run)
    palette = torch.tensor(list(captions.COLOURS.values())) / 255
    sample = torch.arange(0, len(rows), max(1, len(rows) // 512))
    drawn = palette[torch.arange(len(sample)) % len(palette)]
    probe = encode(run, codec, images[sample], drawn)
    factor = centre_(codec, probe)
    values = torch.stack([encode(run, codec, images, colour.expand(len(rows), 3)) for colour in palette])
    state = {"values": (values * factor).half(), "scaling_factor": factor, "vae": codec.state_dict()}
    checkpoint.save(run.folder("latents") / "latents.pt", state)
    print(f"latents scaling_factor={factor:.5f} std={float((values * factor).std()):.4f}", flush=True)


@torch.no_grad()
def encode(run: TrainingRun, codec: Any, images: torch.Tensor, colours: torch.Tensor) -> torch.Tensor:
    """Posterior means, float32 on the CPU, of premultiplied uint8 [N, 4, H, W] on RGB colours [N, 3] in 0..1."""
    found = []
    for start in range(0, len(images), CHUNK):
        part = slice(start, start + CHUNK)
        pixels = pictures.composite(images[part].to(run.device), colours[part].to(run.device))
        posterior = codec.encode(pixels.contiguous(memory_format=torch.channels_last)).latent_dist
        found.append(posterior.mean.float().cpu())
    return torch.cat(found)


@torch.no_grad()
def centre_(codec: Any, latents: torch.Tensor) -> float:
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


def load(run: TrainingRun) -> Latents:
    """What the stage wrote; raises `FileNotFoundError` before it has run."""
    state = _state(run)
    return Latents(state["values"], float(state["scaling_factor"]))


def load_codec(run: TrainingRun) -> Any:
    """The codec with its latents centred and `scaling_factor` set, in evaluation mode."""
    state = _state(run)
    codec: Any = vae.build(run)
    codec.load_state_dict(state["vae"])
    codec.register_to_config(scaling_factor=float(state["scaling_factor"]))
    return codec.eval().requires_grad_(False)


def _state(run: TrainingRun) -> dict[str, Any]:
    state = checkpoint.load(run.folder("latents") / "latents.pt")
    if state is None:
        raise FileNotFoundError("latents/latents.pt: run the stage latents first")
    return state


def main() -> None:
    """`python -m training.latents`."""
    train(from_options(parser(__doc__ or "").parse_args()))


if __name__ == "__main__":
    main()
