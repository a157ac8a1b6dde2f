"""Finds a model's quantized parts, and loads them in place of the original ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from core.quant import store
from pipeline.checkpoints.folder import ModelError


def folder(parent: Path, part: str, scheme: str) -> Path:
    """Return a model's folder for a quantized part: `unet-int8` beside `unet`."""
    return parent / f"{part}-{scheme}"


def variant(parent: Path | None, scheme: str, parts: Sequence[str], first: Path | None = None) -> dict[str, Path]:
    """Return the folders of a model's quantized parts, of those that its family quantizes.

    The first of `parts` must be there, else this raises `ModelError`; `first` overrides its folder, and beside that one
    the others are looked for first. A part without a quantized variant stays unquantized.
    """
    folders: dict[str, Path] = {}
    first_parent = [] if first is None else [first.parent]
    parents = first_parent + ([] if parent is None else [parent])
    candidates: list[Path] = [first] if first is not None else [folder(parent, parts[0], scheme) for parent in parents]
    for candidate in candidates:
        if (candidate / store.MANIFEST).is_file():
            folders[parts[0]] = candidate
    if not folders:
        where = candidates[0] if candidates else f"{parts[0]}-{scheme}"
        label = "UNet" if parts[0] == "unet" else parts[0]
        raise ModelError(f"precision {scheme}: there is no quantized {label} in {where}; `diptych quantize` makes one")
    for part, parent in product(parts[1:], parents):
        if part not in folders and (folder(parent, part, scheme) / store.MANIFEST).is_file():
            folders[part] = folder(parent, part, scheme)
    return folders


def apply_(modules: Mapping[str, Any], folders: Mapping[str, Path], *, digest: str) -> str:
    """Load quantized parts; returns a digest of them and the weights. Raises `ModelError`, naming the file.

    `folders` names the parts to replace. `digest` is of the weights that they must have been made from.
    """
    hasher = hashlib.sha256(digest.encode())
    for part, where in folders.items():
        try:
            manifest = store.load_(modules[part], where, source=digest)
        except store.QuantizedStoreError as error:
            raise ModelError(str(error)) from error
        hasher.update(f"{part}:{manifest.scheme}:{manifest.recipe}:{manifest.sha256}".encode())
    return hasher.hexdigest()


def check_scales_alone(where: Path) -> None:
    """Raise `ModelError` for a quantized denoiser that contains weights: the model's LoRA-merged ones would be lost."""
    try:
        if store.read_manifest(where).weights:
            raise ModelError(f"lora: {where} holds weights of its own; `diptych quantize` makes one of scales alone")
    except store.QuantizedStoreError as error:
        raise ModelError(str(error)) from error
