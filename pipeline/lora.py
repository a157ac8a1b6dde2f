"""LoRA files by name, from one folder, fused into a model's weights as it is loaded (Hu et al., 2021).

Reading them, in any of the layouts that are about, and adding them to weights is diffusers' and peft's; knows files,
scales and digests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.folder import ModelError, first_line

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")  # no way to another folder
_MODULES = ("unet", "text_encoder", "text_encoder_2", "vae", "tokenizer", "tokenizer_2")


@dataclass(frozen=True, slots=True)
class Lora:
    """One file, and how much of it is added."""

    name: str
    path: Path
    scale: float = 1.0


def find(text: str, folder: str) -> tuple[Lora, ...]:
    """What `name:scale,name` means: files `name.safetensors` in the folder. Raises `ModelError`, naming the LoRA."""
    found: list[Lora] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, scale = part.partition(":")
        if not _NAME.fullmatch(name):
            raise ModelError("lora: a name is letters, digits, _, . and -, and begins with a letter or a digit")
        try:
            factor = float(scale) if scale else 1.0
        except ValueError:
            factor = math.nan
        if not math.isfinite(factor):
            raise ModelError(f"lora {name}: its scale must be a number")
        if not folder:
            raise ModelError(f"lora {name}: no folder is named to look in")
        path = Path(folder).expanduser() / f"{name}.safetensors"
        if not path.is_file():
            raise ModelError(f"lora {name}: there is no {path}")
        if name in (lora.name for lora in found):
            raise ModelError(f"lora {name}: is named twice")
        found.append(Lora(name, path, factor))
    return tuple(found)


def digest(model: str, loras: Sequence[Lora]) -> str:
    """Of the weights that come of those of digest `model`. Raises `ModelError`."""
    made = hashlib.sha256(model.encode())
    for lora in loras:
        try:
            made.update(f"{hashlib.sha256(lora.path.read_bytes()).hexdigest()}:{lora.scale!r}".encode())
        except OSError as error:
            raise ModelError(f"lora {lora.name}: {lora.path} cannot be read ({error.strerror})") from error
    return made.hexdigest()


def fuse_(parts: Mapping[str, Any], loras: Sequence[Lora]) -> None:
    """Add them to the weights of UNet and text encoders, in place, one after another.

    Raises `ModelError`, naming the LoRA, for one that does not fit this model, and where peft is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise ModelError(f"lora {loras[0].name}: peft is not installed; `pip install diptych[lora]`")
    from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import StableDiffusionXLPipeline
    from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler

    pipeline = StableDiffusionXLPipeline(
        **{name: parts[name] for name in _MODULES}, scheduler=EulerDiscreteScheduler(), add_watermarker=False
    )
    for lora in loras:
        try:
            pipeline.load_lora_weights(str(lora.path.parent), weight_name=lora.path.name, local_files_only=True)
            if not pipeline.get_list_adapters():
                raise ModelError(f"lora {lora.name}: nothing in {lora.path} is for an SDXL")
            pipeline.fuse_lora(lora_scale=lora.scale, safe_fusing=True)
            pipeline.unload_lora_weights()
        except ModelError:
            raise
        except Exception as error:  # of several libraries: all say that it does not fit
            raise ModelError(f"lora {lora.name}: does not fit ({type(error).__name__}: {first_line(error)})") from error
