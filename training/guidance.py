"""Stage `guidance`: a low-rank adapter that gives emoji-xl its guided prediction in one row.

Guidance is distilled into a few parameters beside frozen weights (adapter guidance distillation, Jensen & Sadat,
2025), here of LoRA's form (Hu et al., 2021), so that it merges into the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.tiny import TIMESTEPS
from training import loop, teacher, unet
from training.run import TrainingRun, from_options, parser

RANK = 8
NAME = "guidance"
FILE = "guidance-distilled"


class LowRank(nn.Module):
    """A frozen linear layer plus up(down(x)); the sum is the layer's own at first."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False, device=base.weight.device)
        self.up = nn.Linear(RANK, base.out_features, bias=False, device=base.weight.device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.up(self.down(x))
        return found


def adapted(network: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The layers that get a low-rank addition, by name: all linear ones of the transformer blocks."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and ".transformer_blocks." in name:
            yield name, module


def build(run: TrainingRun) -> tuple[Any, nn.ModuleDict]:
    """The teacher's UNet with additions in it, and these alone, by the layers' names with "/" for "."."""
    network = unet.load(run).unet
    torch.manual_seed(run.seed)
    made = nn.ModuleDict()
    for name, module in list(adapted(network)):
        parent, _, own = name.rpartition(".")
        layer = LowRank(module)
        setattr(network.get_submodule(parent), own, layer)
        made[name.replace(".", "/")] = nn.ModuleDict({"down": layer.down, "up": layer.up})
    return network, made


def train(run: TrainingRun) -> loop.Outcome:
    """Trains the additions towards the guided prediction, on the teacher's own latents at every noise level."""
    pairs, source = teacher.load(run), teacher.Teacher(run)
    network, additions = build(run)
    guided: Any = torch.compile(source) if run.compile else source
    predict: Any = torch.compile(network) if run.compile else network
    batch = run.batch or (256 if run.on_gpu else 16)
    signal = unet.alphas_bar(run.device)
    weight = unet.weights(signal)

    def loss(_: int, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        given: Any = {"generator": generator, "device": run.device}
        index = torch.randint(len(pairs.ids), (batch,), **given)
        clean = pairs.latents[index].float()
        step = ((torch.randperm(batch, **given) + torch.rand(batch, **given)) * (TIMESTEPS / batch)).long()
        step = step.clamp(max=TIMESTEPS - 1)
        share = signal[step][:, None, None, None]
        noisy = share.sqrt() * clean + (1 - share).sqrt() * torch.randn(clean.shape, **given)
        with run.autocast():
            states, pooled = source.read(pairs.ids[index].long())
            wanted = guided(noisy, step, states, pooled)
            told = source.told(pooled)
            guess = predict(noisy, step, states, added_cond_kwargs=told, return_dict=False)[0].float()
        square = (guess - wanted).square().mean(dim=(1, 2, 3))
        return (weight[step] * square).mean(), {"eps": square.detach().mean()}

    stage = loop.Stage("guidance", {NAME: additions}, loss, rate=2e-3, decay=0.0, warmup=100, average=0.995)
    return loop.train(stage, run)


def export(run: TrainingRun, path: Path) -> int:
    """Writes the trained additions as a LoRA file in diffusers' layout, float16; returns their parameters."""
    from safetensors.torch import save_file

    _, additions = build(run)
    loop.load_average("guidance", {NAME: additions}, run)
    state = {}
    for name, layer in additions.items():
        for side, half in (("down", "A"), ("up", "B")):
            weights: torch.Tensor = layer.get_parameter(f"{side}.weight")
            state[f"unet.{name.replace('/', '.')}.lora_{half}.weight"] = weights.detach().half().cpu().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in state.values())


def main() -> None:
    """`python -m training.guidance`."""
    print(train(from_options(parser(__doc__ or "").parse_args())))


if __name__ == "__main__":
    main()
