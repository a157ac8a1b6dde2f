"""Writes an image's parameters as AUTOMATIC1111's web UI does ("infotext"), which ComfyUI and other tools read too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from contract import loras
from contract.image import ImageParameters
from contract.sampler_labels import CURVE_LABELS, label

_HASH_DIGITS = 10


def infotext(parameters: ImageParameters, sampler: str, fingerprint: Mapping[str, Any]) -> str:
    """Write the prompt, a line `Negative prompt: …` if there is one, and a line of `name: value` pairs.

    `sampler` is the name of the one that ran. LoRAs are `<lora:name:scale>` behind the prompt. Readers take the blanks
    off each line's ends, and a prompt's line that begins with `Negative prompt:` for what it says: the file holds all
    fields exactly beside this.
    """
    named = [f"<lora:{lora.name}:{lora.scale:g}>" for lora in loras.read(parameters.lora)]
    lines = [" ".join([parameters.prompt.strip(), *named])]
    if negative := (parameters.negative_prompt or "").strip():
        lines.append(f"Negative prompt: {negative}")
    lines.append(", ".join(f"{name}: {_quoted(value)}" for name, value in _pairs(parameters, sampler, fingerprint)))
    return "\n".join(lines)


def _pairs(parameters: ImageParameters, sampler: str, fingerprint: Mapping[str, Any]) -> list[tuple[str, Any]]:
    hashes, upscale, refiner = fingerprint.get("lora", {}), parameters.upscale, parameters.refiner
    weights = fingerprint.get("refiner", {}).get("weights", "")[:_HASH_DIGITS]
    pairs = {
        "Steps": parameters.steps,
        "Sampler": label(sampler),
        "Schedule type": CURVE_LABELS.get(parameters.schedule_type or ""),
        "CFG scale": parameters.guidance_scale,
        "Seed": parameters.seed,
        "Size": f"{parameters.width}x{parameters.height}",
        "Model hash": fingerprint.get("weights", "")[:_HASH_DIGITS],
        "Model": fingerprint.get("model"),
        "Denoising strength": None if parameters.edit is None else parameters.edit.strength,
        "Lora hashes": ", ".join(f"{name}: {digest[:12]}" for name, digest in hashes.items()),
        "Refiner": None if refiner is None else f"{refiner.model} [{weights}]",
        "Refiner switch at": None if refiner is None else refiner.start,
        "Postprocess upscale by": None if upscale is None else upscale.scale,
        "Postprocess upscaler": None if upscale is None else upscale.model,
        "Version": " ".join(filter(None, ("Diptych", fingerprint.get("version")))),
    }
    return [(name, value) for name, value in pairs.items() if value not in (None, "")]


def _quoted(value: Any) -> str:
    """Return the value as text, in JSON's quotes where the line's own signs are in it."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(sign in text for sign in ',:"\n') else text
