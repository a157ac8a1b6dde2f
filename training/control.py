"""Stage `control`: trains a ControlNet by which emoji-xl follows edges, on the pictures that the denoiser learned.

The denoiser, the text towers and the codec are frozen (Zhang et al., 2023). The network begins as a copy of the
denoiser's down path and middle, as far as it has them: without attention in its lowest block, and with one layer of it
in the middle, it fits into 12 MB. Edges are those of the preprocessor `canny`.

    python -m training.adopt --data DATA --work WORK --models models
    python -m training.control --data DATA --work WORK --models models --minutes 20
    python -m training.control --data DATA --work WORK --models models --export

The folder `models/emoji-xl-controls`, with `edges` in it, is then one for DIPTYCH_CONTROL_DIR.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training import loop, unet
from training.edges import edges
from training.run import TrainingRun, command
from training.stream import PerSize, SceneStream

DROP_TEXT = 0.3  # of rows: the network learns to read the edges, and not only what the text says already
ROUNDS = 64  # pixels that weak edges are followed: in 256 scenes of 128 pixels none went farther
FOLDER, NAME = "emoji-xl-controls", "edges"
MOST_BYTES = 12_000_000
_EMBEDDING = (8, 16, 32, 64)  # channels of the picture's embedding
_SHARED = (
    "block_out_channels", "layers_per_block", "attention_head_dim", "cross_attention_dim", "use_linear_projection",
    "addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim", "norm_num_groups",
)  # fmt: skip


def build(run: TrainingRun, denoiser: Any) -> Any:
    """The network before training, with the weights of the denoiser where both have the same layer."""
    from diffusers import ControlNetModel

    unet = run.picture.unet()
    types = unet["down_block_types"]
    torch.manual_seed(run.seed)
    net: Any = ControlNetModel(
        **{name: unet[name] for name in _SHARED},
        down_block_types=(*types[:-1], "DownBlock2D"),
        transformer_layers_per_block=(1,) * len(types),
        conditioning_embedding_out_channels=_EMBEDDING,
    )
    trained_state, target_state = denoiser.state_dict(), net.state_dict()
    net.load_state_dict({name: trained_state[name] for name in target_state if name in trained_state}, strict=False)
    return net.to(run.device)


class ControlledDenoiser(nn.Module):
    """The denoiser, which reads what the network adds."""

    def __init__(self, denoiser: Any, net: Any) -> None:
        super().__init__()
        self.denoiser, self.net = denoiser, net

    def forward(
        self, noisy: Tensor, step: Tensor, states: Tensor, pooled: Tensor, time_ids: Tensor, hint: Tensor
    ) -> Tensor:
        """The noise in `noisy` [B, 4, h, w] at timesteps [B], of a picture with the edges `hint` [B, 3, H, W]."""
        residuals: Any = {"added_cond_kwargs": {"text_embeds": pooled, "time_ids": time_ids}, "return_dict": False}
        down, middle = self.net(noisy, step, states, controlnet_cond=hint, **residuals)
        prediction: Tensor = self.denoiser(
            noisy, step, states, down_block_additional_residuals=down, mid_block_additional_residual=middle, **residuals
        )[0]
        return prediction


class ControlLoss:
    """Epsilon's error on noisy pictures whose edges the network sees."""

    def __init__(self, run: TrainingRun, net: Any, parts: unet.TrainedModules) -> None:
        self._run, self._frozen = run, unet.Frozen.load(run, parts)
        self._model = PerSize(run, ControlledDenoiser(parts.unet, net))
        self._stream = SceneStream(run, run.batch or (256 if run.on_gpu else 32))

    def __call__(self, iteration: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        run = self._run
        batch = self._stream.at(iteration)
        pixels = self._stream.draw(batch)
        hint = edges(pixels, ROUNDS)
        noised = self._frozen.noised(pixels, generator)
        keep = (torch.rand(len(pixels), generator=generator, device=run.device) >= DROP_TEXT).float()
        time_ids = batch.scenes.time_ids.to(run.device, non_blocking=True)
        with run.autocast():
            states, pooled = self._frozen.read_text(batch.ids, keep)
            model = self._model.at(batch.scenes.size)
            guess = model(noised.latents, noised.step, states, pooled, time_ids, hint)
        return self._frozen.objective.loss(guess, noised)


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train the network on the trained denoiser (or the one that the stage `adopt` took)."""
    parts = unet.load(run)
    net = build(run, parts.unet)
    average = 0.9995 if run.on_gpu else 0.99
    loss = ControlLoss(run, net, parts)
    return loop.train(loop.Stage("control", {"control": net}, loss, rate=1e-3, warmup=100, average=average), run)


def load(run: TrainingRun) -> Any:
    """The trained network with averaged weights; raises `FileNotFoundError` when it is not trained."""
    return loop.load_average("control", {"control": build(run, unet.load(run).unet)}, run)


def export(run: TrainingRun) -> Path:
    """Write the network in diffusers' format, in float16. Raises ValueError for one of more than `MOST_BYTES`."""
    folder = run.models / FOLDER / NAME
    net = load(run).half()
    size = sum(parameter.nbytes for parameter in net.parameters())
    if size > MOST_BYTES:
        raise ValueError(f"{folder}: has {size} bytes, more than {MOST_BYTES}")
    net.save_pretrained(folder, safe_serialization=True)
    return folder


if __name__ == "__main__":
    command(__doc__, train, export)
