"""Tiny Z-Images of several shapes, and their stock diffusers twins."""

from __future__ import annotations

import functools
from typing import Any

from pipeline.checkpoints import tiny_zimage
from pipeline.checkpoints.load import ImageModel, load
from pipeline.checkpoints.tiny_zimage import TINY_Z, ZImageShape

SHAPES = {
    "tiny": tiny_zimage.SHAPES[TINY_Z],
    "deep": ZImageShape(native=64, layers=3, refiners=2, text_layers=3, text_kv_heads=2, shift=6.0),
}

tiny_zimage.SHAPES.update({f"random:test-z-{name}": shape for name, shape in SHAPES.items()})


@functools.cache
def model(name: str) -> ImageModel:
    return load(f"random:test-z-{name}")


@functools.cache
def stock(name: str) -> Any:
    """diffusers' pipeline with the same weights, in memory of its own."""
    pipeline = tiny_zimage.make(SHAPES[name])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
