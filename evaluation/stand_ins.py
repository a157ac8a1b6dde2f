"""Makes stand-ins for the files of MLPerf's test, of their shapes and with seeded random content, for dry runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evaluation.captions import render
from evaluation.clip import EMBEDDED
from evaluation.inception import WEIGHTS, InceptionNetwork
from evaluation.mlperf_files import CAPTIONS, CLIP, LATENT, STATISTICS
from evaluation.run import write
from pipeline.checkpoints import sdxl
from pipeline.families import registry

_WIDTH, _RANK = 2048, 64  # of the statistics, and of what their covariance holds beside a multiple of the identity
_LAYERS = 2  # of each tower, where ViT-B/32 has 12
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")


def make(name: str, folder: Path, *, model: str, captions: int) -> Path:
    """Write the stand-in of this published name into `folder`, unless it is there. Raises KeyError for the model.

    The latent is what pictures of `model` begin from.
    """
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        {
            CAPTIONS: lambda: _captions(path, captions),
            LATENT: lambda: _latent(path, model),
            STATISTICS: lambda: _statistics(path),
            WEIGHTS: lambda: torch.save(inception_weights(), path),
            CLIP: lambda: _clip(path),
        }[name]()
    return path


def inception_weights(seed: int = 0) -> dict[str, Tensor]:
    """Random weights in the published file's layout, scaled so that no layer dies or overflows."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, value in InceptionNetwork().state_dict().items():
        if name.endswith("conv.weight"):
            tensors[name] = torch.randn(value.shape, generator=generator) * (2 / value[0].numel()) ** 0.5
        elif name.endswith(("running_var", "bn.weight")):
            tensors[name] = 0.5 + torch.rand(value.shape, generator=generator)
        elif value.is_floating_point():
            tensors[name] = 0.2 * torch.randn(value.shape, generator=generator)
    return tensors | {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}


def latent_side(model: str) -> int:
    """The side of the square latents that a seeded model's pictures begin from; SDXL's for any other."""
    network = registry.seeded(model)
    if network is None or model == sdxl.NAME:  # which takes a minute to be built on a CPU
        return int(sdxl.UNET["sample_size"])
    return int(network[1].build(torch.device("cpu"))["unet"].config.sample_size)


def _captions(path: Path, count: int) -> None:
    write(path, render(("id", "caption"), [(str(k), f"A stand-in for caption {k}.") for k in range(count)]))


def _latent(path: Path, model: str) -> None:
    side = latent_side(model)
    np.save(path, np.random.default_rng(0).normal(0, 1, (1, 4, side, side)).astype(np.float32))


def _statistics(path: Path) -> None:
    draw = np.random.default_rng(0)
    factors = draw.normal(0, 1, (_WIDTH, _RANK))
    np.savez(path, mu=draw.uniform(0, 1, _WIDTH), sigma=factors @ factors.T / _RANK + 0.1 * np.eye(_WIDTH))


def _clip(folder: Path) -> None:
    """ViT-B/32's widths with few layers, and emoji-clip's words."""
    from transformers import CLIPConfig, CLIPModel

    partial = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    text_config = json.loads((EMBEDDED / "config.json").read_text("utf-8"))["text_config"]
    words = {key: text_config[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    towers: dict[str, Any] = {
        "text_config": words | {"num_hidden_layers": _LAYERS}, "vision_config": {"num_hidden_layers": _LAYERS},
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        CLIPModel(CLIPConfig(**towers)).save_pretrained(partial)
    for name in _TOKENIZER:
        shutil.copy(EMBEDDED / name, partial / name)
    mean, deviation = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    (partial / "preprocessor_config.json").write_text(json.dumps({"image_mean": mean, "image_std": deviation}))
    partial.rename(folder)
