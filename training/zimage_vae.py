"""Stage `zimage_vae`: trains the Z-Image's codec from emoji-xl's, then encodes every picture on every background.

It has sixteen latent channels and, as FLUX's, no 1×1 convolutions around them. Only the two convolutions at the latents
start anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evaluation.scenes import emoji
from pipeline.checkpoints.tiny_zimage import CHANNELS
from training import captions, checkpoint, loop, vae
from training.run import TrainingRun, command

NOISE = 0.25  # most noise, in deviations of the latents, that the decoder learns to forgive
POSTERIOR = 0.05  # the posterior's deviation, fixed
NORMAL_WEIGHT = 0.05  # keeps each channel's mean at 0 and its deviation at 1


def build(run: TrainingRun) -> Any:
    """A fresh autoencoder in channels-last layout, on the run's device."""
    from diffusers import AutoencoderKL

    torch.manual_seed(run.seed)
    model: Any = AutoencoderKL(**run.zimage.vae())
    with torch.no_grad():
        model.encoder.conv_out.weight[CHANNELS:] = 0.0
        model.encoder.conv_out.bias[CHANNELS:] = 2 * torch.tensor(POSTERIOR).log()
    return model.to(run.device, memory_format=torch.channels_last)


def adopt_(codec: Any, run: TrainingRun) -> None:
    """Start every layer but the two at the latents from the stage `vae`, or from the emoji-xl that was exported.

    Raises `FileNotFoundError` when there is neither.
    """
    from diffusers import AutoencoderKL

    try:
        trained: Any = vae.load(run)
    except FileNotFoundError:
        folder = run.models / "emoji-xl" / "vae"
        if not folder.exists():
            raise
        trained = AutoencoderKL.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
    source_state, target_state = trained.state_dict(), codec.state_dict()
    codec.load_state_dict(
        {
            key: source_state[key] if _shared(key, source_state, target_state) else target_state[key]
            for key in target_state
        }
    )


def _shared(key: str, source: dict[str, Tensor], target: dict[str, Tensor]) -> bool:
    is_border = key.startswith(("encoder.conv_out", "decoder.conv_in"))
    return not is_border and key in source and source[key].shape == target[key].shape


class CodecLoss(nn.Module):
    """Loss of one batch as a single module, so that one compiled graph holds encoder, decoder and loss."""

    def __init__(self, codec: Any) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, true: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels [B, 3, H, W] and scaled noise [B, 16, h, w] to loss, departure from a normal, mean square error."""
        latent = self.codec.encoder(true).float()[:, :CHANNELS]
        mean, deviation = latent.mean(dim=(0, 2, 3)), latent.std(dim=(0, 2, 3))
        departure = mean.square().mean() + (deviation - 1).square().mean()
        output = self.codec.decoder(latent + noise).float()
        square = (output - true).square().mean()
        return vae.reconstruction_loss(output, true) + NORMAL_WEIGHT * departure, departure, square


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train the codec on every picture, held-out variants included, and writes `zimage_vae/latents.pt`."""
    rows = emoji.read_rows(run.data)
    images = emoji.read_pictures(run.data, rows, run.size)
    on_device = images.to(run.device)
    palette = torch.tensor(list(captions.COLOURS.values()), device=run.device) / 255
    codec = build(run)
    if not (run.folder("zimage_vae") / "state.pt").exists():
        adopt_(codec, run)
        _scale_output_(run, codec, images)
    measure = run.compiled(CodecLoss(codec))
    batch = run.batch or (96 if run.on_gpu else 8)
    side = run.size // 8

    def loss(_: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        factory = loop.factory(generator)
        index = torch.randint(len(rows), (batch,), **factory)
        true = emoji.composite(on_device[index], vae.backgrounds(palette, batch, factory))
        noise = torch.randn(batch, CHANNELS, side, side, **factory)
        noise = noise * (NOISE * torch.rand(batch, 1, 1, 1, **factory))
        with run.autocast():
            total, departure, square = measure(true.contiguous(memory_format=torch.channels_last), noise)
        return total, {"departure": departure.detach(), "psnr_db": 10 * torch.log10(4 / square.detach())}

    stage = loop.Stage("zimage_vae", {"vae": codec}, loss, rate=1e-3, decay=0.0, average=0.998, warmup=50)
    outcome = loop.train(stage, run)
    if outcome.done and not (run.folder("zimage_vae") / "latents.pt").exists():
        encode(run, codec.eval(), images)
    return outcome


@torch.no_grad()
def _scale_output_(run: TrainingRun, codec: Any, images: Tensor) -> None:
    """Give the fresh latents mean 0 and deviation 1 per channel."""
    last = codec.encoder.conv_out
    probe = encode_pictures(run, codec, *_probe(images))
    mean, deviation = (x.to(run.device) for x in (probe.mean(dim=(0, 2, 3)), probe.std(dim=(0, 2, 3))))
    last.weight[:CHANNELS] /= deviation[:, None, None, None]
    last.bias[:CHANNELS] = (last.bias[:CHANNELS] - mean) / deviation


@torch.no_grad()
def encode_pictures(run: TrainingRun, codec: Any, images: Tensor, colours: Tensor) -> Tensor:
    """Posterior means, float32 on the CPU, of premultiplied uint8 [N, 4, H, W] on RGB colours [N, 3] in 0..1."""
    latents = []
    for part in torch.arange(len(images)).split(256):
        pixels = emoji.composite(images[part].to(run.device), colours[part].to(run.device))
        posterior = codec.encode(pixels.contiguous(memory_format=torch.channels_last)).latent_dist
        latents.append(posterior.mean.float().cpu())
    return torch.cat(latents)


@torch.no_grad()
def encode(run: TrainingRun, codec: Any, images: Tensor) -> None:
    """Fixes shift and scale, one of each for all channels as in FLUX's configuration, and encodes all pictures."""
    palette = torch.tensor(list(captions.COLOURS.values())) / 255
    probe = encode_pictures(run, codec, *_probe(images))
    shift, factor = float(probe.mean()), 1 / float(probe.std())
    values = torch.stack(
        [
            ((encode_pictures(run, codec, images, colour.expand(len(images), 3)) - shift) * factor).half()
            for colour in palette
        ]
    )
    state = {"values": values, "shift_factor": shift, "scaling_factor": factor, "vae": codec.state_dict()}
    checkpoint.save(run.folder("zimage_vae") / "latents.pt", state)
    print(f"zimage_vae shift_factor={shift:.5f} scaling_factor={factor:.5f}", flush=True)


def _probe(images: Tensor) -> tuple[Tensor, Tensor]:
    """Some 512 pictures, and the palette's colours in turn below them."""
    palette = torch.tensor(list(captions.COLOURS.values())) / 255
    sample = torch.arange(0, len(images), max(1, len(images) // 512))
    return images[sample], palette[torch.arange(len(sample)) % len(palette)]


def load_latents(run: TrainingRun) -> Tensor:
    """Latents of mean 0 and deviation 1, float16 [colours, N, 16, h, w]; raises `FileNotFoundError` before the stage
    has run.
    """
    values: Tensor = checkpoint.need(run.work / "zimage_vae" / "latents.pt", "zimage_vae")["values"]
    return values


def load(run: TrainingRun) -> Any:
    """The codec with its shift and scale set, in evaluation mode."""
    state = checkpoint.need(run.work / "zimage_vae" / "latents.pt", "zimage_vae")
    codec: Any = build(run)
    codec.load_state_dict(state["vae"])
    codec.register_to_config(shift_factor=float(state["shift_factor"]), scaling_factor=float(state["scaling_factor"]))
    return codec.eval().requires_grad_(False)


if __name__ == "__main__":
    command(__doc__, train)
