"""Finds LoRA files by name in one folder, and merges them into a model's weights at load time (Hu et al., 2021).

`pipeline.extensions.lora_file` reads the files; `pipeline.extensions.adapters` serves per-request LoRAs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract import loras as names
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions.weight_files import path_of
from pipeline.families.family import Adapters


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA file and its scale."""

    name: str
    path: Path
    scale: float = 1.0

    def data(self) -> bytes:
        """The file's bytes. Raises `ModelError`, naming the LoRA."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ModelError(f"{self.name}: {self.path} cannot be read ({error.strerror})", kind="lora") from error


def find(text: str, folder: str) -> tuple[Lora, ...]:
    """Resolve `name:scale,name` to files `name.safetensors` in the folder. Raises `ModelError`, naming the LoRA."""
    try:
        named = names.read(text)
    except ValueError as error:
        raise ModelError(f"lora: {error}") from error
    loras: list[Lora] = []
    for name, scale in named:
        if not folder:
            raise ModelError(f"{name}: no folder is named to look in", kind="lora")
        path = path_of(Path(folder).expanduser(), name)
        if not path.is_file():
            raise ModelError(f"{name}: there is no {path}", kind="lora")
        loras.append(Lora(name, path, scale))
    return tuple(loras)


def digest(model: str, loras: Sequence[Lora]) -> str:
    """The digest of the merged weights, where `model` is the unmerged ones'. Raises `ModelError`."""
    sha256 = hashlib.sha256(model.encode())
    for lora in loras:
        sha256.update(f"{hashlib.sha256(lora.data()).hexdigest()}:{lora.scale!r}".encode())
    return sha256.hexdigest()


def fuse_(parts: Mapping[str, Any], adapters: Adapters, loras: Sequence[Lora]) -> None:
    """Merge them into the weights of the parts that the family adapts, in place, one after another, in fp32.

    What DoRA adds depends on the weights: it is computed of those before any is merged, as in a request. So that it can
    be, a copy of each changed weight is kept meanwhile where one but the first is DoRA.

    Raises `ModelError`, naming the LoRA, for one that does not fit this model.
    """
    from pipeline.extensions import lora_file

    originals: lora_file.Originals | None = (
        {} if any(lora_file.is_decomposed(lora.path) for lora in loras[1:]) else None
    )
    for lora in loras:
        lora_file.fuse_(lora.name, lora.data(), parts, adapters, lora.scale, originals)
