"""Stage `start`: lets training begin where an exported emoji-xl and emoji-clip ended.

`--pack FILE` writes their weights as one file of 8 bits a weight, small enough to travel beside the pictures: what is
lost by it is learnt again in seconds. Without it the stage reads that file, or the exported folders themselves, and
leaves `start/NAME.pt` for each stage, with token embeddings moved to the new vocabulary.

    python -m training.start --data DATA --work WORK --models models --pack .carry/start.pt
    python -m training.start --data .carry --work WORK --from .carry/start.pt

`--keep FOLDER` writes what the stages have trained so far, averaged weights alone and in 16 bits: a machine may be lost
between two commands. Laid over another WORK, the folder's files are exported as the stages' own would be.
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
    """Writes `start/unet.pt`, `start/vae.pt` and `start/clip.pt`; the stage `tokens` comes before it."""
    parts = read(run) if source is None else unpack(source)
    old: dict[str, int] = json.loads(parts["vocab"])
    pieces = tokens.clip_tokenizer(run)
    for name in ("text", "text_2", "clip"):
        for key in [key for key in parts[name] if key.endswith(_EMBEDDINGS)]:
            parts[name][key] = moved(parts[name][key], old, pieces)
    # Positions of the towers are a buffer of some versions of transformers.
    towers = {f"clip.{key}": value for key, value in parts["clip"].items()}
    towers |= {f"text.{key}": value for key, value in parts["text"].items()}
    folder = run.folder("start")
    checkpoint.save(folder / "clip.pt", {"towers": towers})
    checkpoint.save(folder / "vae.pt", {"vae": parts["vae"]})
    checkpoint.save(folder / "unet.pt", {name: parts[name] for name in ("unet", "text", "text_2")})


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
    return found


def pack(parts: dict[str, Any], path: Path) -> None:
    """Writes the parts: matrices as int8 with one scale a row, the rest as float16."""
    state: dict[str, Any] = {"vocab": parts["vocab"]}
    for name, weights in parts.items():
        if name == "vocab":
            continue
        state[name] = {}
        for key, value in weights.items():
            if not value.is_floating_point():
                state[name][key] = (value, torch.ones(1))
            elif value.ndim < 2 or value[0].numel() < 16:
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
    found: dict[str, Any] = {"vocab": state.pop("vocab")}
    for name, weights in state.items():
        found[name] = {
            key: value * scale.view(-1, *[1] * (value.ndim - 1)) if value.dtype == torch.int8 else _whole(value)
            for key, (value, scale) in weights.items()
        }
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
    """`python -m training.start [--pack FILE | --from FILE | --keep FOLDER]`."""
    options = parser(__doc__ or "")
    options.add_argument("--pack", type=Path, help="write the exported models' weights to this file")
    options.add_argument("--from", type=Path, dest="source", help="begin with such a file instead of with --models")
    options.add_argument("--keep", type=Path, help="write the averaged weights of what is trained into this folder")
    found = options.parse_args()
    run = from_options(found)
    if found.pack:
        pack(read(run), found.pack)
        print(f"{found.pack}: {found.pack.stat().st_size / 1e6:.1f} MB")
        return
    if found.keep:
        print(f"{found.keep}: {', '.join(keep(run, found.keep)) or 'nothing is trained'}")
        return
    train(run, found.source)


if __name__ == "__main__":
    main()
