"""Skips tests that need a CUDA device if there is none; `make test-gpu` runs them. The model that they draw with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.quantization import quantized

SHAPE = tiny.SDXLShape(native=64, channels=(64, 128), heads=(1, 2), resnets=2, groups=16)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


def add_variant(folder: Path, scheme: Any) -> None:
    """Write the model's variant in 8 bits."""
    quantized.make(load(str(folder)), ["a red hat", "a blue hat", "an old cat"], folder, scheme=scheme)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its INT8 variant."""
    made = tiny.save(tmp_path_factory.mktemp("models") / "tiny", SHAPE)
    add_variant(made, "int8")
    return made
