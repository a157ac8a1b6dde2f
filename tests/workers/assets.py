"""Folders of every kind of file that requests name."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from tests.pipeline import controls, embeddings, ip_adapters, loras, refiners, upscalers


def write(place: Path) -> Path:
    """Write them beside each other, of the tiny model; `damaged` is in all but the upscalers'."""
    model = load(tiny.TINY)
    for name in ("loras", "controls", "adapters", "embeddings"):
        (place / name).mkdir()
        (place / name / "damaged.safetensors").write_bytes(b"none")
    loras.write(model, place / "loras", "ink")
    for seed, name in enumerate(("edges", "pose")):
        controls.save(controls.controlnet(model, seed), place / "controls", name)
    ip_adapters.encoder(place / "adapters")
    for name, plus in (("base", False), ("plus", True)):
        ip_adapters.save(ip_adapters.state(model, plus=plus), place / "adapters", name)
    embeddings.write(model, place / "embeddings", "ink")
    (place / "upscalers").mkdir()
    upscalers.write(place / "upscalers", "x4")
    refiners.second(tiny.SHAPES[tiny.TINY]).save_pretrained(place / "refiner")
    return place
