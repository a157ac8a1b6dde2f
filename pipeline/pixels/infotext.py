"""Writes an image's parameters as AUTOMATIC1111's web UI does ("infotext"), which ComfyUI and other tools read too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from contract import a1111, loras, prompts
from contract.card import TINY
from contract.image import ImageParameters
from contract.markup import A1111, COMPEL
from contract.sampler_labels import AUTOMATIC, SCHEDULE_LABELS, SCHEDULES, label

_HASH_DIGITS = 10
_CUSTOM = "Custom"  # a noise schedule that readers have no name for


def infotext(
    parameters: ImageParameters, sampler: str, fingerprint: Mapping[str, Any], schedule_type: str | None = None
) -> str:
    """Write the prompt, a line `Negative prompt: …` if there is one, and a line of `name: value` pairs, so that readers
    of the web UI's syntax draw the same.

    `sampler` is the name of the one that ran, and `schedule_type` how its steps were spaced: "" in a way that no type
    names, None if it takes no type. LoRAs are `<lora:name:scale>` behind the prompt. Readers take the blanks off each
    line's ends: the file holds all fields exactly beside this.
    """
    named = [f"<lora:{lora.name}:{_number(lora.scale)}>" for lora in loras.read(parameters.lora)]
    lines = [" ".join([_written(parameters.prompt, parameters).strip(), *named])]
    if parameters.negative_prompt is not None:
        negative = _written(parameters.negative_prompt, parameters).strip()
        if not negative and parameters.guidance_scale > 1:
            negative = "()"  # to readers nothing is no prompt, which is not encoded
        if negative:
            lines.append(f"Negative prompt: {negative}")
    pairs = _pairs(parameters, sampler, fingerprint, schedule_type)
    lines.append(", ".join(f"{name}: {_quoted(value)}" for name, value in pairs))
    return "\n".join(lines)


def _written(text: str, parameters: ImageParameters) -> str:
    """Return a prompt in the web UI's syntax; of compel's weights the numbers."""
    if parameters.prompt_weighting == A1111:
        return a1111.unbroken(text)
    return a1111.write(prompts.read(text, parameters.prompt_weighting))


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _schedule(parameters: ImageParameters, schedule_type: str | None) -> str:
    if parameters.schedule.steps is not None or schedule_type == "":
        return _CUSTOM
    schedule_type = schedule_type or parameters.schedule_type
    return SCHEDULES[AUTOMATIC][0] if schedule_type is None else SCHEDULE_LABELS[schedule_type]


def _pairs(
    parameters: ImageParameters, sampler: str, fingerprint: Mapping[str, Any], schedule_type: str | None
) -> list[tuple[str, Any]]:
    hashes, upscale, refiner = fingerprint.get("lora", {}), parameters.upscale, parameters.refiner
    weights = fingerprint.get("refiner", {}).get("weights", "")[:_HASH_DIGITS]
    pairs = {
        "Steps": parameters.steps,
        "Sampler": label(sampler),
        "Schedule type": _schedule(parameters, schedule_type),
        "CFG scale": parameters.guidance_scale,
        "Seed": parameters.seed,
        "Size": f"{parameters.width}x{parameters.height}",
        "Model hash": fingerprint.get("weights", "")[:_HASH_DIGITS],
        "Model": fingerprint.get("model"),
        "Eta": parameters.eta,
        "Clip skip": None if parameters.clip_skip is None else parameters.clip_skip + 1,
        "Denoising strength": None if parameters.edit is None else parameters.edit.strength,
        "VAE": "taesd" if parameters.vae == TINY else None,
        "Prompt weighting": COMPEL if parameters.prompt_weighting in (True, COMPEL) else None,
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
