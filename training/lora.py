"""Stage `lora`: trains a LoRA (Hu et al., 2021) by which emoji-xl draws in one of `training.styles`, with peft.

The denoiser, the text towers and the codec are frozen. Low-rank pairs stand beside the linear layers of the denoiser's
transformers and the convolutions of its residual blocks. Captions stay as they are, so that the LoRA alone is what
switches a style on; as in the denoiser's training a share of rows is not told them, and guidance keeps the style.

    python -m training.adopt --data DATA --work WORK --models models
    python -m training.lora --data DATA --work WORK --models models --style mosaic --minutes 3
    python -m training.lora --data DATA --work WORK --models models --style mosaic --export

The folder `models/emoji-xl-loras`, with `mosaic.safetensors` in it, is then one for DIPTYCH_LORA_DIR.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training import cards, export, loop, tokens, unet
from training.run import TrainingRun, from_options, parser
from training.stream import PerSize, SceneStream
from training.styles import STYLES

RANK = 4
FOLDER = "emoji-xl-loras"
MOST_BYTES = 1_200_000
ADAPTED = r".*\.(attn[12]\.to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2)|resnets\.\d+\.conv[12])"


def adapt_(denoiser: Any, seed: int = 0) -> nn.ParameterDict:
    """Put fresh pairs beside the denoiser's layers, in place, and freeze the rest; it draws as before.

    Returns the pairs alone, by their names with `/` for dots: what a checkpoint holds.
    """
    from peft import LoraConfig

    torch.manual_seed(seed)
    denoiser.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=ADAPTED))
    trained = {name.replace(".", "/"): p for name, p in denoiser.named_parameters() if p.requires_grad}
    return nn.ParameterDict(trained)


def exported(pairs: nn.ParameterDict) -> dict[str, Tensor]:
    """The pairs by the keys that diffusers and peft write, in float16."""
    names = {name: f"unet.{name.replace('/default/', '/').replace('/', '.')}" for name in pairs}
    return {names[name]: pair.detach().half().cpu().contiguous() for name, pair in pairs.items()}


class StyleLoss:
    """Epsilon's error on noisy pictures of the stream in a style."""

    def __init__(self, run: TrainingRun, style: str, parts: unet.TrainedModules) -> None:
        self._run, self._style, self._frozen = run, STYLES[style], unet.Frozen.load(run, parts)
        self._model = PerSize(run, parts.unet)
        self._stream = SceneStream(run, run.batch or (256 if run.on_gpu else 32))
        self._empty = tokens.encode(tokens.clip_tokenizer(run), [""]).to(run.device)

    def __call__(self, iteration: int, generator: torch.Generator) -> tuple[Tensor, loop.Logged]:
        run = self._run
        batch = self._stream.at(iteration)
        pixels = self._style(self._stream.draw(batch))
        noised = self._frozen.noised(pixels, generator)
        chance = torch.rand(len(pixels), generator=generator, device=run.device)
        ids = torch.where((chance >= 1 - unet.DROP_TEXT)[:, None], self._empty, batch.ids)
        with run.autocast():
            states, pooled = self._frozen.read_text(ids, (chance >= unet.DROP_ALL).float())
            conditions = {"text_embeds": pooled, "time_ids": batch.scenes.time_ids.to(run.device, non_blocking=True)}
            model = self._model.at(batch.scenes.size)
            guess = model(noised.latents, noised.step, states, added_cond_kwargs=conditions, return_dict=False)[0]
        return self._frozen.objective.loss(guess, noised)


def train(run: TrainingRun, style: str) -> loop.StageOutcome:
    """Train a style's pairs on the trained denoiser (or the one that the stage `adopt` took)."""
    parts = unet.load(run)
    modules: dict[str, nn.Module] = {"lora": adapt_(parts.unet, run.seed)}
    average = 0.998 if run.on_gpu else 0.98
    loss = StyleLoss(run, style, parts)
    return loop.train(loop.Stage(f"lora-{style}", modules, loss, rate=2e-3, decay=0.0, warmup=30, average=average), run)


def load(run: TrainingRun, style: str) -> tuple[Any, nn.ParameterDict]:
    """The denoiser with a style's averaged pairs, and these; raises `FileNotFoundError` when it is not trained."""
    denoiser = unet.load(run).unet
    pairs = adapt_(denoiser)
    loop.load_average(f"lora-{style}", {"lora": pairs}, run)
    return denoiser, pairs


def export_style(run: TrainingRun, style: str) -> Path:
    """Write a style's file in diffusers' layout, in float16, and the folder's card."""
    metadata = {
        "base_model": "emoji-xl", "license": "apache-2.0", "style": style, "rank": str(RANK), "format": "pt",
        "data": "Noto Emoji, Copyright Google, Apache License 2.0",
    }  # fmt: skip
    path = run.models / FOLDER / f"{style}.safetensors"
    export.write_weights(path, exported(load(run, style)[1]), metadata, MOST_BYTES)
    cards.write(path.parent, run)
    return path


def main() -> None:
    """`python -m training.lora --style STYLE [--export]`."""
    options = parser(__doc__ or "")
    options.add_argument("--style", choices=sorted(STYLES), required=True)
    options.add_argument("--export", action="store_true", help="write what is trained, and train no further")
    arguments = options.parse_args()
    print((export_style if arguments.export else train)(from_options(arguments), arguments.style))


if __name__ == "__main__":
    main()
