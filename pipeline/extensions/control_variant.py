"""Loads control networks in the precision of their model: in 8 bits where there is such a variant."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from contract.precision import is_quantized
from core.quant import store
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import control_file
from pipeline.extensions.control_file import ControlFile
from pipeline.quantization.quantized_parts import folder

if TYPE_CHECKING:
    from pipeline.families.family import ImageModel


def variant_of(path: Path, name: str, precision: str) -> Path | None:
    """The folder of a network in this precision, `NAME-int8` beside it; None if there is none, or it is not in 8 bits.

    `path` is as `control_file.find` returns it.
    """
    if not is_quantized(precision):
        return None
    where = folder(path.parent, name, precision)
    return where if (where / store.MANIFEST).is_file() else None


def read(name: str, path: Path, model: ImageModel) -> ControlFile:
    """The network for this model: in its precision if that is one of 8 bits and there is such a variant, else in its
    type. Raises `ModelError`, naming it.
    """
    where = variant_of(path, name, model.precision)
    if where is None:
        return control_file.read(name, path, model, model.dtype)
    file = control_file.read(name, path, model, torch.float32)
    try:
        manifest = store.load_(file.network, where, source=file.digest)
    except store.QuantizedStoreError as error:
        raise ModelError(f"{name}: {str(error).replace(str(where), where.name)}", kind="control") from error
    file.network.to(dtype=model.dtype)
    identity = f"{file.digest}:{manifest.scheme}:{manifest.recipe}:{manifest.sha256}"
    return ControlFile(file.network, hashlib.sha256(identity.encode()).hexdigest()[:16])
