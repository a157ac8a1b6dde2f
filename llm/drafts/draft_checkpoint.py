"""Reads the published checkpoints of drafters, with errors that name the folder and what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.json_files import read_object
from llm.checkpoints.load import TextModelError

_CONFIG = "config.json"


class DraftCheckpoint:
    """A folder with a config.json, whose `fields` these are, and weights. Raises `TextModelError`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fields: dict[str, Any] = read_object(folder / _CONFIG, lambda reason: TextModelError(f"draft {reason}"))
        architectures = self.fields.get("architectures")
        self.architectures = architectures if isinstance(architectures, list) else []

    def refuse(self, reason: str) -> TextModelError:
        """The error of a checkpoint that does not do."""
        return TextModelError(f"draft {self.folder}: {reason}")

    def fill_(self, network: nn.Module, *, ignored: tuple[str, ...] = ()) -> None:
        """Load a network's weights, of which the files have exactly its own, and perhaps those `ignored`."""
        weights = self._weights()
        for key in ignored:
            weights.pop(key, None)
        expected = {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
        actual = {key: tuple(tensor.shape) for key, tensor in weights.items()}
        for key in sorted(expected.keys() | actual.keys()):
            if expected.get(key) != actual.get(key):
                form = actual.get(key, "missing")
                raise self.refuse(f"{key} is {form}, where {_CONFIG} wants {expected.get(key, 'none')}")
        network.load_state_dict(weights)

    def _weights(self) -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        weights: dict[str, Tensor] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                weights |= load_file(path)
            except (OSError, SafetensorError) as error:
                raise self.refuse(f"{path.name}: {error}") from error
        if weights:
            return weights
        try:
            weights = torch.load(self.folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        except Exception as error:  # damaged, or anything but tensors
            raise self.refuse(f"has no weights that can be read ({type(error).__name__})") from error
        return weights
