"""Finds a model's quantized UNet and VAE, and loads them in place of the original parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from core.quant import store
from pipeline.folder import ModelError

Part = Literal["unet", "vae"]
PARTS: tuple[Part, ...] = get_args(Part)


def folder(parent: Path, part: Part, scheme: str) -> Path:
    """A model's folder for a quantized part: `unet-int8` beside `unet`."""
    return parent / f"{part}-{scheme}"


def variant(parent: Path | None, scheme: str, unet: Path | None = None) -> dict[Part, Path]:
    """The folders of a model's quantized parts; `unet` overrides the UNet's. Raises `ModelError` if there is no UNet.

    A VAE without a quantized variant stays unquantized. Beside an overriding UNet its own VAE is looked for first.
    """
    found: dict[Part, Path] = {}
    beside = [] if unet is None else [unet.parent]
    parents = beside + ([] if parent is None else [parent])
    places: list[Path] = [unet] if unet is not None else [folder(parent, "unet", scheme) for parent in parents]
    for place in places:
        if (place / store.MANIFEST).is_file():
            found["unet"] = place
    if "unet" not in found:
        where = places[0] if places else f"unet-{scheme}"
        raise ModelError(f"precision {scheme}: there is no quantized UNet in {where}; `diptych quantize` makes one")
    for parent in parents:
        if "vae" not in found and (folder(parent, "vae", scheme) / store.MANIFEST).is_file():
            found["vae"] = folder(parent, "vae", scheme)
    return found


def apply_(modules: Mapping[str, Any], folders: Mapping[Part, Path], *, digest: str) -> str:
    """Load quantized parts; returns a digest of them and the weights. Raises `ModelError`, naming the file.

    `folders` names the parts to replace. `digest` is of the weights that they must have been made from.
    """
    made = hashlib.sha256(digest.encode())
    for part, where in folders.items():
        try:
            manifest = store.load_(modules[part], where, source=digest)
        except store.QuantizedStoreError as error:
            raise ModelError(str(error)) from error
        made.update(f"{part}:{manifest.scheme}:{manifest.recipe}:{manifest.sha256}".encode())
    return made.hexdigest()


def check_scales_alone(where: Path) -> None:
    """Raise `ModelError` for a quantized UNet that contains weights: the model's LoRA-merged ones would be lost."""
    try:
        if store.read_manifest(where).weights:
            raise ModelError(f"lora: {where} holds weights of its own; `diptych quantize` makes one of scales alone")
    except store.QuantizedStoreError as error:
        raise ModelError(str(error)) from error
