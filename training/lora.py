"""Stage `lora`: trains a LoRA (Hu et al., 2021) by which emoji-xl draws in one of `training.styles`.

The denoiser, the text towers and the codec are frozen. Low-rank pairs stand beside the linear layers of the denoiser's
transformers and the convolutions of its residual blocks. Captions stay as they are, so that the LoRA alone is what
switches a style on; as in the denoiser's training a share of rows is not told them, and guidance keeps the style.

    python -m training.adopt --data DATA --work WORK --models models
    python -m training.lora --data DATA --work WORK --models models --style mosaic --minutes 3
    python -m training.lora --data DATA --work WORK --models models --style mosaic --export

The folder `models/emoji-xl-loras`, with `mosaic.safetensors` in it, is then one for DIPTYCH_LORA_DIR.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training import cards, loop, tokens, unet
from training.run import TrainingRun, from_options, parser
from training.stream import PerSize, SceneStream
from training.styles import STYLES

RANK = 4
FOLDER = "emoji-xl-loras"
MOST_BYTES = 1_200_000
ADAPTED = re.compile(r".*\.(attn[12]\.to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2)|resnets\.\d+\.conv[12])")
_SIDES = {"down": "lora_A", "up": "lora_B"}  # here and in files


class LowRank(nn.Module):
    """A frozen linear layer or convolution, and a pair of low rank beside it. Begins as the layer alone."""

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer
        down: tuple[int, ...]
        up: tuple[int, ...]
        if isinstance(layer, nn.Linear):
            down, up = (RANK, layer.in_features), (layer.out_features, RANK)
        else:
            down, up = (RANK, layer.in_channels, *layer.kernel_size), (layer.out_channels, RANK, 1, 1)
        given: Any = {"device": layer.weight.device, "dtype": torch.float32}
        self.down, self.up = nn.Parameter(torch.empty(down, **given)), nn.Parameter(torch.zeros(up, **given))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """What the layer makes of `x`, and what the pair adds."""
        layer = self.layer
        if isinstance(layer, nn.Linear):
            added = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        else:
            inner = nn.functional.conv2d(x, self.down, None, layer.stride, layer.padding)
            added = nn.functional.conv2d(inner, self.up)
        made: Tensor = layer(x) + added
        return made


class Pairs(nn.Module):
    """The trained pairs alone, by their layers' names with `/` for dots: what a checkpoint holds."""

    def __init__(self, layers: dict[str, LowRank]) -> None:
        super().__init__()
        self.factors = nn.ParameterDict()
        for name, one in layers.items():
            for side in _SIDES:
                self.factors[f"{name.replace('.', '/')}/{side}"] = getattr(one, side)

    def exported(self) -> dict[str, Tensor]:
        """By the keys that diffusers and peft write, in float16."""
        found = {}
        for name, factor in self.factors.items():
            layer, side = name.rsplit("/", 1)
            found[f"unet.{layer.replace('/', '.')}.{_SIDES[side]}.weight"] = factor.detach().half().cpu().contiguous()
        return found


def adapt_(denoiser: nn.Module, seed: int = 0) -> Pairs:
    """Puts fresh pairs beside the denoiser's layers, in place; without training it draws as before."""
    torch.manual_seed(seed)
    names = [name for name, _ in denoiser.named_modules() if ADAPTED.fullmatch(name)]
    layers = {name: LowRank(denoiser.get_submodule(name)) for name in names}  # type: ignore[arg-type]
    for name, layer in layers.items():
        denoiser.set_submodule(name, layer)
    return Pairs(layers)


def stage(style: str) -> str:
    """The stage's name, under which its checkpoints lie."""
    return f"lora-{style}"


class StyleLoss:
    """Epsilon's error on noisy pictures of the stream in a style."""

    def __init__(self, run: TrainingRun, style: str, parts: unet.TrainedModules) -> None:
        self._run, self._style, self._frozen = run, STYLES[style], unet.Frozen.load(run, parts)
        self._model = PerSize(run, parts.unet)
        self._stream = SceneStream(run, run.batch or (256 if run.on_gpu else 32))
        self._empty = tokens.encode(tokens.clip_tokenizer(run), [""]).to(run.device)

    def __call__(self, iteration: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        run = self._run
        drawn = self._stream.at(iteration)
        pixels = self._style(self._stream.draw(drawn))
        noised = self._frozen.noised(pixels, generator)
        chance = torch.rand(len(pixels), generator=generator, device=run.device)
        keep = (chance >= unet.DROP_ALL).float()
        ids = torch.where((chance >= 1 - unet.DROP_TEXT)[:, None], self._empty, drawn.ids)
        time_ids = drawn.scenes.time_ids.to(run.device, non_blocking=True)
        with run.autocast():
            states, pooled = self._frozen.read_text(ids, keep)
            model, told = self._model.at(drawn.scenes.size), {"text_embeds": pooled, "time_ids": time_ids}
            guess = model(noised.latents, noised.step, states, added_cond_kwargs=told, return_dict=False)[0]
        return self._frozen.objective.loss(guess, noised)


def train(run: TrainingRun, style: str) -> loop.Outcome:
    """Trains a style's pairs on the trained denoiser (or the one that the stage `adopt` took)."""
    parts = unet.load(run)
    pairs = adapt_(parts.unet, run.seed)
    return loop.train(
        loop.Stage(
            stage(style),
            {"lora": pairs},
            StyleLoss(run, style, parts),
            rate=2e-3,
            decay=0.0,
            warmup=30,
            average=0.998 if run.on_gpu else 0.98,
        ),
        run,
    )


def load(run: TrainingRun, style: str) -> tuple[Any, Pairs]:
    """The denoiser with a style's averaged pairs, and these; raises `FileNotFoundError` when it is not trained."""
    denoiser = unet.load(run).unet
    pairs = adapt_(denoiser)
    loop.load_average(stage(style), {"lora": pairs}, run)
    return denoiser, pairs


def export(run: TrainingRun, style: str) -> Path:
    """Writes a style's file in diffusers' layout, in float16, and the folder's card.

    Raises ValueError for a file of more than `MOST_BYTES`.
    """
    from safetensors.torch import save

    about = {
        "base_model": "emoji-xl", "license": "apache-2.0", "style": style, "rank": str(RANK), "format": "pt",
        "data": "Noto Emoji, Copyright Google, Apache License 2.0",
    }  # fmt: skip
    data = save(load(run, style)[1].exported(), about)
    path = run.models / FOLDER / f"{style}.safetensors"
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path}: has {len(data)} bytes, more than {MOST_BYTES}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    (path.parent / "README.md").write_text(_card(run), encoding="utf-8")
    return path


def _card(run: TrainingRun) -> str:
    """What the folder's files are, with what their curves say."""
    trained = "\n".join(cards.trained(stage(style), run) for style in STYLES)
    return f"""\
---
license: apache-2.0
library_name: diffusers
tags: [text-to-image, stable-diffusion-xl, lora, emoji]
---
# emoji-xl-loras

LoRAs of `emoji-xl`, of rank {RANK}, in diffusers' layout: `mosaic` draws pixel art in blocks of 8 pixels, and `pencil`
draws edges in graphite on paper. No word in a prompt switches them on, and a weight of 1 suits them. They load by
`StableDiffusionXLPipeline.load_lora_weights`, and in Diptych from a worker's `DIPTYCH_LORA_DIR`.

## Data

{cards.DATA} What each LoRA saw are scenes of these as `training/styles.py` changes them.

## Training

{trained}

Side of the pictures: {run.size} px. Seed {run.seed}. Code: `training/lora.py`.

## Limits

They fit the `emoji-xl` beside which they lie and no other model. Small things lose their features in blocks and lines,
and colours that a prompt names are lost in `pencil`.
"""


def main() -> None:
    """`python -m training.lora --style STYLE [--export]`."""
    options = parser(__doc__ or "")
    options.add_argument("--style", choices=sorted(STYLES), required=True)
    options.add_argument("--export", action="store_true", help="write what is trained, and train no further")
    found = options.parse_args()
    run = from_options(found)
    print(export(run, found.style) if found.export else train(run, found.style))


if __name__ == "__main__":
    main()
