"""Stage `start`: lets training begin where an exported emoji-xl and emoji-clip ended.

It leaves `start/NAME.pt` for each stage, with token embeddings moved to the new vocabulary. With `--denoiser` the codec
stays as it is, and the denoiser alone is trained on; with `--text` the language models begin where emoji-lm
and its draft ended, with their tokenizer, and `tokens` need not come before it.

    python -m lab.training.start --data DATA --work WORK --models models

`--keep FOLDER` writes what the stages have trained so far, averaged weights alone and in 16 bits. Laid over
another WORK, the folder's files are exported as the stages' own would be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.training import checkpoint, tokens
from lab.training.run import TrainingRun, from_options, parser

_EMBEDDINGS = "token_embedding.weight"


def convert(run: TrainingRun, *, denoiser: bool = False) -> None:
    """Write `start/unet.pt`, `start/vae.pt` and `start/clip.pt`; for the denoiser alone `start/unet.pt` and
    `latents/latents.pt`. The stage `tokens` comes before it.
    """
    parts = read(run, clip=not denoiser)
    old: dict[str, int] = json.loads(parts["vocab"])
    pieces = tokens.clip_tokenizer(run)
    for name in [name for name in ("text", "text_2", "clip") if name in parts]:
        for key in [key for key in parts[name] if key.endswith(_EMBEDDINGS)]:
            parts[name][key] = remap_embeddings(parts[name][key], old, pieces)
    folder = run.work / "start"
    if denoiser:
        state = {"scaling_factor": parts["scaling_factor"], "vae": parts["vae"]}
        checkpoint.save(run.work / "latents" / "latents.pt", state)
    else:
        # Positions of the towers are a buffer of some versions of transformers.
        towers = {f"clip.{key}": value for key, value in parts["clip"].items()}
        towers |= {f"text.{key}": value for key, value in parts["text"].items()}
        checkpoint.save(folder / "clip.pt", {"towers": towers})
        checkpoint.save(folder / "vae.pt", {"vae": parts["vae"]})
    checkpoint.save(folder / "unet.pt", {name: parts[name] for name in ("unet", "text", "text_2")})


def convert_text(run: TrainingRun) -> None:
    """Write `start/lm.pt`, `start/draft.pt` and `tokens/lm` of the exported models; raises `OSError` without them."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(run.models / "emoji-lm", dtype=torch.float32, local_files_only=True)
    checkpoint.save(run.folder("start") / "lm.pt", {"lm": model.state_dict()})
    checkpoint.save(
        run.folder("start") / "draft.pt", {"draft": load_file(run.models / "emoji-lm-draft" / "model.safetensors")}
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run.models / "emoji-lm", local_files_only=True)
    tokenizer.save_pretrained(run.folder("tokens") / "lm")


def read(run: TrainingRun, *, clip: bool = True) -> dict[str, Any]:
    """Weights of the exported models in float32, by part, their vocabulary as JSON, and the codec's scale.

    Raises `OSError` where one is missing.
    """
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPModel, CLIPTextModel, CLIPTextModelWithProjection

    source = run.models / "emoji-xl"
    classes: dict[str, tuple[Any, Path]] = {
        "unet": (UNet2DConditionModel, source / "unet"),
        "text": (CLIPTextModel, source / "text_encoder"),
        "text_2": (CLIPTextModelWithProjection, source / "text_encoder_2"),
        "vae": (AutoencoderKL, source / "vae"),
        **({"clip": (CLIPModel, run.models / "emoji-clip")} if clip else {}),
    }
    models = {name: cls.from_pretrained(folder, local_files_only=True) for name, (cls, folder) in classes.items()}
    tensors: dict[str, Any] = {name: model.float().state_dict() for name, model in models.items()}
    tensors["vocab"] = (source / "tokenizer" / "vocab.json").read_text(encoding="utf-8")
    return tensors | {"scaling_factor": float(models["vae"].config.scaling_factor)}


def save_averages(run: TrainingRun, folder: Path) -> list[str]:
    """Write `STAGE/state.pt` of each stage that has one, with the averaged weights alone in float16, and the latents'
    scale; returns the stages' names.
    """
    stages = []
    for name in ("vae", "clip", "unet", "tiny_vae"):
        state = checkpoint.load(run.work / name / "state.pt")
        if state is not None:
            averaged = {
                module: {key: value.half() if value.is_floating_point() else value for key, value in weights.items()}
                for module, weights in state["averaged"].items()
            }
            checkpoint.save(folder / name / "state.pt", {"averaged": averaged})
            stages.append(name)
    scale = checkpoint.load(run.work / "latents" / "latents.pt")
    if scale is not None:
        checkpoint.save(folder / "latents" / "latents.pt", scale)
    return stages


def remap_embeddings(embeddings: Tensor, old: dict[str, int], tokenizer: Any) -> Tensor:
    """Rows [V, W] for `tokenizer`'s tokens: known to `old` they stay, a new one is the mean of its pieces'."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    table = torch.empty(len(vocabulary), embeddings.shape[1])
    for token, place in vocabulary.items():
        rows = [old[token]] if token in old else [old[piece] for piece in _pieces(token, old)]
        table[place] = embeddings[rows].mean(0) if rows else embeddings.mean(0)
    return table


def _pieces(token: str, old: dict[str, int]) -> list[str]:
    """The longest known pieces of a token, from its beginning."""
    rest, pieces = token, []
    while rest:
        length = next((n for n in range(len(rest), 0, -1) if rest[:n] in old), 0)
        if not length:
            break
        pieces.append(rest[:length])
        rest = rest[length:]
    return pieces


def main() -> None:
    """`python -m lab.training.start [--denoiser | --text | --keep FOLDER]`."""
    options = parser(__doc__ or "")
    options.add_argument("--denoiser", action="store_true", help="train the denoiser alone, with the codec as it is")
    options.add_argument("--text", action="store_true", help="begin with the exported language models")
    options.add_argument("--keep", type=Path, help="write the averaged weights of what is trained into this folder")
    arguments = options.parse_args()
    run = from_options(arguments)
    if arguments.keep:
        print(f"{arguments.keep}: {', '.join(save_averages(run, arguments.keep)) or 'nothing is trained'}")
    elif arguments.text:
        convert_text(run)
    else:
        convert(run, denoiser=arguments.denoiser)


if __name__ == "__main__":
    main()
