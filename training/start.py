"""Stage `start`: lets training begin where an exported emoji-xl and emoji-clip ended.

`--pack FILE` writes their weights as one file of 8 bits a weight, which begins training on a machine without the
models: what is lost by it is learnt again in seconds. Without it the stage reads that file, or the exported folders
themselves, and leaves `start/NAME.pt` for each stage, with token embeddings moved to the new vocabulary.

    python -m training.start --data DATA --work WORK --models models --pack DATA/start.pt
    python -m training.start --data DATA --work WORK --from DATA/start.pt

With `--denoiser` the file has no emoji-clip, and the codec as it is: it stays, and the denoiser alone is trained on.

With `--text` training of the language models begins where emoji-lm and its draft ended, with their tokenizer: neither
`tokens` nor a file comes before it.

`--keep FOLDER` writes what the stages have trained so far, averaged weights alone and in 16 bits. Laid over
another WORK, the folder's files are exported as the stages' own would be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training import checkpoint, tokens
from training.run import TrainingRun, from_options, parser

Weights = dict[str, Tensor]
_EMBEDDINGS = "token_embedding.weight"


def train(run: TrainingRun, source: Path | None = None) -> None:
    """Writes `start/unet.pt`, `start/vae.pt` and `start/clip.pt`; of a file for the denoiser alone `start/unet.pt` and
    `latents/latents.pt`. The stage `tokens` comes before it.
    """
    parts = read(run) if source is None else unpack(source)
    old: dict[str, int] = json.loads(parts["vocab"])
    pieces = tokens.clip_tokenizer(run)
    for name in [name for name in ("text", "text_2", "clip") if name in parts]:
        for key in [key for key in parts[name] if key.endswith(_EMBEDDINGS)]:
            parts[name][key] = moved(parts[name][key], old, pieces)
    folder = run.folder("start")
    if "clip" in parts:
        # Positions of the towers are a buffer of some versions of transformers.
        towers = {f"clip.{key}": value for key, value in parts["clip"].items()}
        towers |= {f"text.{key}": value for key, value in parts["text"].items()}
        checkpoint.save(folder / "clip.pt", {"towers": towers})
        checkpoint.save(folder / "vae.pt", {"vae": parts["vae"]})
    else:
        state = {"scaling_factor": parts["scaling_factor"], "vae": parts["vae"]}
        checkpoint.save(run.folder("latents") / "latents.pt", state)
    checkpoint.save(folder / "unet.pt", {name: parts[name] for name in ("unet", "text", "text_2")})


def train_text(run: TrainingRun) -> None:
    """Writes `start/lm.pt`, `start/draft.pt` and `tokens/lm` of the exported models; raises `OSError` without them."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    for stage, name in (("lm", "emoji-lm"), ("draft", "emoji-lm-draft")):
        model = AutoModelForCausalLM.from_pretrained(run.models / name, dtype=torch.float32, local_files_only=True)
        checkpoint.save(run.folder("start") / f"{stage}.pt", {"lm": model.state_dict()})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run.models / "emoji-lm", local_files_only=True)
    tokenizer.save_pretrained(run.folder("tokens") / "lm")


def read(run: TrainingRun) -> dict[str, Any]:
    """Weights of the exported models, by part, and their vocabulary as JSON. Raises `OSError` where one is missing."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPModel, CLIPTextModel, CLIPTextModelWithProjection

    source = run.models / "emoji-xl"
    classes: dict[str, tuple[Any, Path]] = {
        "unet": (UNet2DConditionModel, source / "unet"),
        "text": (CLIPTextModel, source / "text_encoder"),
        "text_2": (CLIPTextModelWithProjection, source / "text_encoder_2"),
        "vae": (AutoencoderKL, source / "vae"),
        "clip": (CLIPModel, run.models / "emoji-clip"),
    }
    found: dict[str, Any] = {
        name: cls.from_pretrained(folder, local_files_only=True).float().state_dict()
        for name, (cls, folder) in classes.items()
    }
    found["vocab"] = (source / "tokenizer" / "vocab.json").read_text(encoding="utf-8")
    config = json.loads((source / "vae" / "config.json").read_text(encoding="utf-8"))
    found["scaling_factor"] = float(config["scaling_factor"])
    return found


def pack(parts: dict[str, Any], path: Path, *, denoiser: bool = False) -> None:
    """Writes the parts: matrices as int8 with one scale a row, the rest as float16. For the `denoiser` alone the codec
    is in float16 as well, with its scale, and emoji-clip is left out.
    """
    state: dict[str, Any] = {"vocab": parts["vocab"]}
    if denoiser:
        state["scaling_factor"] = parts["scaling_factor"]
    for name, weights in parts.items():
        if not isinstance(weights, dict) or (denoiser and name == "clip"):
            continue
        exact = denoiser and name == "vae"
        state[name] = {}
        for key, value in weights.items():
            if not value.is_floating_point():
                state[name][key] = (value, torch.ones(1))
            elif exact or value.ndim < 2 or value[0].numel() < 16:
                state[name][key] = (value.half(), torch.ones(1))
            else:
                scale = value.flatten(1).abs().amax(1).clamp(min=1e-8) / 127
                rows = (value.flatten(1) / scale[:, None]).round().to(torch.int8)
                state[name][key] = (rows.view(value.shape), scale)
    checkpoint.save(path, state)


def unpack(path: Path) -> dict[str, Any]:
    """What `pack` wrote, in float32. Raises `FileNotFoundError`."""
    state = checkpoint.load(path)
    if state is None:
        raise FileNotFoundError(f"{path}: write it with --pack first")
    found: dict[str, Any] = {}
    for name, weights in state.items():
        found[name] = (
            weights
            if not isinstance(weights, dict)
            else {
                key: value * scale.view(-1, *[1] * (value.ndim - 1)) if value.dtype == torch.int8 else _whole(value)
                for key, (value, scale) in weights.items()
            }
        )
    return found


def keep(run: TrainingRun, folder: Path) -> list[str]:
    """Writes `STAGE/state.pt` of each stage that has one, with the averaged weights alone in float16, and the latents'
    scale.

    Returns the stages' names.
    """
    kept = []
    for name in ("vae", "clip", "unet", "tiny_vae"):
        state = checkpoint.load(run.folder(name) / "state.pt")
        if state is not None:
            averaged = {
                module: {key: value.half() if value.is_floating_point() else value for key, value in weights.items()}
                for module, weights in state["averaged"].items()
            }
            (folder / name).mkdir(parents=True, exist_ok=True)
            checkpoint.save(folder / name / "state.pt", {"averaged": averaged})
            kept.append(name)
    scale = checkpoint.load(run.folder("latents") / "latents.pt")
    if scale is not None:
        (folder / "latents").mkdir(parents=True, exist_ok=True)
        checkpoint.save(folder / "latents" / "latents.pt", scale)
    return kept


def moved(embeddings: Tensor, old: dict[str, int], tokenizer: Any) -> Tensor:
    """Rows [V, W] for `tokenizer`'s tokens: known to `old` they stay, a new one is the mean of its pieces'."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    made = torch.empty(len(vocabulary), embeddings.shape[1])
    for token, place in vocabulary.items():
        rows = [old[token]] if token in old else [old[piece] for piece in _pieces(token, old)]
        made[place] = embeddings[rows].mean(0) if rows else embeddings.mean(0)
    return made


def _pieces(token: str, old: dict[str, int]) -> list[str]:
    """The longest known pieces of a token, from its beginning."""
    rest, found = token, []
    while rest:
        length = next((n for n in range(len(rest), 0, -1) if rest[:n] in old), 0)
        if not length:
            break
        found.append(rest[:length])
        rest = rest[length:]
    return found


def _whole(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def main() -> None:
    """`python -m training.start [--pack FILE [--denoiser] | --from FILE | --text | --keep FOLDER]`."""
    options = parser(__doc__ or "")
    options.add_argument("--pack", type=Path, help="write the exported models' weights to this file")
    options.add_argument("--denoiser", action="store_true", help="what only the denoiser's training reads")
    options.add_argument("--from", type=Path, dest="source", help="begin with such a file instead of with --models")
    options.add_argument("--text", action="store_true", help="begin with the exported language models")
    options.add_argument("--keep", type=Path, help="write the averaged weights of what is trained into this folder")
    found = options.parse_args()
    run = from_options(found)
    if found.pack:
        pack(read(run), found.pack, denoiser=found.denoiser)
        print(f"{found.pack}: {found.pack.stat().st_size / 1e6:.1f} MB")
        return
    if found.keep:
        print(f"{found.keep}: {', '.join(keep(run, found.keep)) or 'nothing is trained'}")
        return
    if found.text:
        train_text(run)
        return
    train(run, found.source)


if __name__ == "__main__":
    main()
