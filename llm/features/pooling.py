"""Pools a prompt's hidden states to an embedding, as sentence-transformers' files in a model's folder say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.json_files import read_json, read_object

if TYPE_CHECKING:
    from torch import Tensor

_FLAG, _LAST, _MEAN = "pooling_mode_", "lasttoken", "mean"
_NAMES = {"mean_tokens": _MEAN}  # of modes as flags, where they differ


@dataclass(frozen=True, slots=True)
class Pooling:
    """Which hidden states of the last layer, after its norm, are averaged: that of the last token, or all.

    `normalize`: embeddings have length 1. `reason` says why the model gives no embeddings; "": it does.
    """

    mean: bool = False
    normalize: bool = True
    reason: str = ""

    @classmethod
    def read(cls, folder: Path) -> Pooling:
        """Read a model's `modules.json` and the configuration of its pooling. Without them: the last token, normalised.

        Raises ValueError for files that are damaged.
        """
        modules = folder / "modules.json"
        if not modules.is_file():
            return cls()
        pooling, normalize = cls(), False
        for module in _entries(modules):
            kind = str(module.get("type", "")).rpartition(".")[2]
            if kind == "Normalize":
                normalize = True
            elif kind == "Pooling":
                pooling = cls._of(folder / str(module.get("path", "")) / "config.json")
            elif kind != "Transformer":
                pooling = cls(reason=f"its modules.json has a module of type {kind}")
            if pooling.reason:
                return pooling
        return cls(pooling.mean, normalize)

    @classmethod
    def _of(cls, path: Path) -> Pooling:
        config = read_object(path, ValueError)
        flags = {name.removeprefix(_FLAG) for name, value in config.items() if name.startswith(_FLAG) and value is True}
        mode = config.get("pooling_mode") or " and ".join(sorted(_NAMES.get(flag, flag) for flag in flags))
        return cls(mean=mode == _MEAN, reason="" if mode in (_LAST, _MEAN) else f"it asks for pooling by {mode!r}")

    def first(self, count: int) -> int:
        """The first position of a prompt of so many tokens whose hidden state counts; all later ones do too."""
        return 0 if self.mean else count - 1


@dataclass(frozen=True, slots=True, eq=False)
class PooledStates:
    """The sum [C] of the first `count` of the hidden states that count, in fp64."""

    count: int = 0
    total: Tensor | None = None

    def plus(self, states: Tensor) -> PooledStates:
        """Add states [n, C], one after another: the sum does not depend on how a prompt is cut into chunks."""
        rows = states.double().clone()
        if self.total is not None:
            rows[0] += self.total
        return PooledStates(self.count + len(states), rows.cumsum(0)[-1])

    def mean(self) -> Tensor:
        """Their mean [C] in fp32."""
        assert self.total is not None
        return (self.total / self.count).float()


def embedding(pooled: bytes, pooling: Pooling, dimensions: int | None) -> bytes:
    """The embedding of pooled states in fp32: so many first dimensions, of length 1 if the model's have that."""
    import torch

    vector = torch.frombuffer(bytearray(pooled), dtype=torch.float32)[:dimensions]
    if pooling.normalize:
        vector = torch.nn.functional.normalize(vector.double(), dim=0).float()
    data: bytes = vector.numpy().tobytes()
    return data


def _entries(path: Path) -> list[Mapping[str, Any]]:
    modules = read_json(path, ValueError)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{path} is no list of objects")
    return modules
