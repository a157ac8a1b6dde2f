"""From fields to a job: what the model offers is checked, what is not given is filled in, the work is estimated.

Knows model cards and backlogs; knows nothing of HTTP and of Redis.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from typing import Any

from api.cards import Snapshot
from api.errors import ApiError, refused
from api.schemas import MAX_SEED, CacheFields, EditFields, ImageFields
from api.uploads import Upload
from core import loras, markup, schedule
from core.jobs.broker import level
from core.jobs.cards import ModelCard
from core.jobs.record import Backlog, Draft, new_id
from core.text import complaint

# A picture's own defaults: SDXL's, at 20 steps.
_STEPS, _GUIDANCE, _PRIORITY = 20, 5.0, 5
_STRENGTH = 0.8  # of an edit without a mask
_QUANTIZED = ("int8", "fp8")
_ENDPOINTS = {"image": ("an image", "/v1/images/generations"), "text": ("a text", "/v1/chat/completions")}
_CHARACTERS = 10_000  # of a text, where the model's card does not say


def image_draft(fields: ImageFields, card: ModelCard, upload: Upload | None = None) -> Draft:
    """The job that these fields ask of this model, still nobody's. What is edited (`upload`) is not in it yet.

    Raises `ApiError` (400) naming the field that it does not offer.
    """
    limits = card.limits
    _check_text("prompt", fields.prompt, limits)
    if fields.negative_prompt is not None:
        _check_text("negative_prompt", fields.negative_prompt, limits)
    if not _words(fields).strip():
        raise refused("prompt", "must not be empty")
    width, height = _size(fields.size, card, upload)
    if fields.scheduler is not None and fields.scheduler not in card.schedulers:
        raise refused("scheduler", f"must be one of {', '.join(card.schedulers)}")
    if fields.lora:
        _check_loras(fields.lora, card)
    n = _at_most("n", fields.n, 1, limits.get("max_images"))
    steps = _at_most("steps", fields.steps, _STEPS, limits.get("max_steps"))
    edit = {} if upload is None else {"edit": {"strength": _strength(fields, upload, int(steps))}}
    made = int(steps * edit["edit"]["strength"]) if edit else int(steps)  # as diffusers counts them
    guidance = _at_most("guidance_scale", fields.guidance_scale, _GUIDANCE, limits.get("max_guidance"))
    max_seed = int(min(MAX_SEED, limits.get("max_seed", MAX_SEED)))
    seed = _at_most("seed", fields.seed, secrets.randbelow(max_seed + 1), max_seed)
    parameters = {
        "prompt": fields.prompt,
        "negative_prompt": fields.negative_prompt,
        "n": int(n),
        "seed": int(seed),
        "steps": int(steps),
        "guidance_scale": float(guidance),
        "width": width,
        "height": height,
        "scheduler": fields.scheduler,
        "deterministic": bool(fields.deterministic),
        **{name: True for name in ("expand_prompt", "prompt_weighting") if getattr(fields, name)},
        **({"lora": fields.lora} if fields.lora else {}),
        **edit,
        **_cached(fields, made),
        **_form(fields, made),
    }
    return Draft(
        id=new_id(),
        modality="image",
        model=card.name,
        parameters=parameters,
        priority=_PRIORITY if fields.priority is None else fields.priority,
        deadline_s=fields.deadline_s,
        work_ms=round(1000 * work_s(card, parameters)),
    )


def work_s(card: ModelCard, parameters: Mapping[str, Any]) -> float:
    """How long one worker is busy with a job of these parameters when its batches are full."""
    steps_s = _rows(parameters) * _steps_s(card, "row_step_s", parameters)
    return float(parameters["n"]) * (_cost_s(card, "encode_s") + steps_s + _cost_s(card, "vae_s"))


def solo_s(card: ModelCard, parameters: Mapping[str, Any]) -> float:
    """How long it takes at best, on a worker that does nothing else: its n pictures side by side."""
    # Measured with two rows; one row takes at least half of that.
    steps_s = _rows(parameters) / 2 * _steps_s(card, "solo_step_s", parameters)
    return max(_cost_s(card, "encode_s") + steps_s + _cost_s(card, "vae_s"), work_s(card, parameters))


def check_deadline(draft: Draft, card: ModelCard, backlog: Backlog, ready: int) -> None:
    """Refuse a deadline that cannot be met even if all goes well. Raises `ApiError` (400) with the estimate.

    With no worker ready nothing can be estimated: the job is taken, and expires by itself if none comes.
    """
    if draft.deadline_s is None or ready < 1:
        return
    best_s = solo_s(card, draft.parameters)
    if level(draft.priority) > 0:  # the most urgent pass by what is queued
        best_s += backlog.queued_ms / 1000 / ready
    if draft.deadline_s < best_s:
        message = f"cannot be met: with what is queued it takes {_rounded(best_s)} s at best"
        raise refused("deadline_s", message, "deadline_hopeless")


def check_expansion(fields: ImageFields, expands: bool) -> None:
    """Refuse a prompt to expand where `expands` says that nobody would. Raises `ApiError` (400)."""
    if fields.expand_prompt and not expands:
        raise refused("expand_prompt", "no text model is served beside this model", "no_text_model")


def retry_after_s(wait_s: float) -> int:
    """When a full queue is worth another try: when the work in it is done, within 1 to 120 seconds."""
    return min(120, max(1, math.ceil(wait_s)))


def unknown_model() -> ApiError:
    return ApiError(404, "model: is not known; see GET /v1/models", param="model", code="model_not_found")


def no_such_model(now: Snapshot, name: str | None, modality: str) -> ApiError | None:
    """Why no model of this modality has this name: it is one of another, or not known. None: there is no model yet."""
    for other, (article, endpoint) in _ENDPOINTS.items():
        card = now.model(name, other) if name is not None and other != modality else None
        if card is not None:
            words = f"{card.name} is {article} model; use POST {endpoint}"
            return refused("model", words, "wrong_modality")
    return None if now.model(None, modality) is None else unknown_model()


def no_model() -> ApiError:
    message = "No worker has announced a model yet; see GET /readyz."
    return ApiError(503, message, code="no_model", headers={"Retry-After": "10"})


def _cached(fields: ImageFields, steps: int) -> dict[str, Any]:
    """DeepCache's schedule as jobs carry it; nothing where the worker's own is good enough. Raises `ApiError`."""
    if not isinstance(fields.deepcache, CacheFields):
        return {} if fields.deepcache is None else {"deepcache": fields.deepcache}
    given = fields.deepcache.model_dump(exclude_none=True)
    deep = given.get("deep_steps")
    if deep is not None:
        if len(given.keys() - {"depth"}) > 1:
            raise refused("deepcache.deep_steps", "cannot be given together with interval, first and last")
        if len(set(deep)) < len(deep) or not all(0 <= step < steps for step in deep):
            raise refused("deepcache.deep_steps", f"must be different numbers between 0 and {steps - 1}")
    return {"deepcache": given}


def _form(fields: ImageFields, steps: int) -> dict[str, int | str]:
    """What is asked for beyond a PNG in the end; nothing where that is all."""
    form: dict[str, int | str] = {}
    if fields.output_format not in (None, "png"):
        form["output_format"] = str(fields.output_format)
        if fields.output_compression is not None:
            form["output_compression"] = fields.output_compression
    every = fields.preview_every
    if every is None and fields.stream and fields.partial_images:
        every = max(1, steps // (fields.partial_images + 1))
    if every:
        form["preview_every"] = min(every, steps)
    return form


def _check_text(field: str, text: str, limits: dict[str, float]) -> None:
    wrong = complaint(text, int(limits.get("max_prompt_characters", _CHARACTERS)))
    if wrong is not None:
        raise refused(field, wrong)


def _check_loras(text: str, card: ModelCard) -> None:
    try:
        named = loras.read(text)
    except ValueError as error:
        raise refused("lora", str(error)) from error
    if not named:
        raise refused("lora", "must name one, or be empty")
    if not card.loras:
        why = f"its weights in {card.precision} take none" if card.precision in _QUANTIZED else "it has none"
        raise refused("lora", f"is not offered with this model: {why}")
    for lora in named:
        if lora.name not in card.loras:
            raise refused("lora", f"{lora.name} is not known; GET /v1/models lists those that are")


def _words(fields: ImageFields) -> str:
    """The prompt without the marks of its weights. Raises `ApiError` (400) for weights that are not offered."""
    if not fields.prompt_weighting:
        return fields.prompt
    if fields.expand_prompt:
        raise refused("prompt_weighting", "cannot be given together with expand_prompt")
    read: dict[str, str] = {}
    for name, text in (("prompt", fields.prompt), ("negative_prompt", fields.negative_prompt or "")):
        try:
            found = markup.read(text)
        except markup.MarkupError as error:
            raise refused(name, str(error)) from error
        read[name] = found if isinstance(found, str) else found.text
    return read["prompt"]


def _at_most(field: str, given: float | None, default: float, limit: float | None) -> float:
    if given is None:
        return default if limit is None else min(default, limit)
    if limit is not None and given > limit:
        raise refused(field, f"must be at most {limit if isinstance(limit, int) else format(limit, 'g')}")
    return given


def _strength(fields: ImageFields, upload: Upload, steps: int) -> float:
    given = fields.strength if isinstance(fields, EditFields) else None
    strength = given if given is not None else _STRENGTH if upload.mask is None else 1.0
    if int(steps * strength) < 1:
        raise refused("strength", f"{strength:g} of {steps} steps is less than one step")
    return float(strength)


def _size(given: str | None, card: ModelCard, upload: Upload | None) -> tuple[int, int]:
    if given is None or given == "auto":
        return (card.native, card.native) if upload is None else _nearest(upload.size, card)
    match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", given)
    size = (int(match[1]), int(match[2])) if match else None
    if size is None or list(size) not in card.sizes:
        offered = ", ".join(f"{w}x{h}" for w, h in sorted(card.sizes, key=lambda s: (-s[0] * s[1], s)))
        what = "must look like 1024x1024, or be auto" if size is None else "is not offered"
        raise refused("size", f"{what}; offered: {offered}")
    return size


def _nearest(size: tuple[int, int], card: ModelCard) -> tuple[int, int]:
    """Of the model's sizes the one whose shape is most like this, and of those the one nearest in area."""

    def apart(offered: list[int]) -> tuple[float, float]:
        (width, height), (w, h) = size, offered
        return round(abs(math.log(width * h / height / w)), 6), abs(math.log(width * height / w / h))

    width, height = min(card.sizes, key=apart)
    return width, height


def _rows(parameters: Mapping[str, Any]) -> int:
    return 2 if parameters["guidance_scale"] > 1 else 1


def _cost_s(card: ModelCard, name: str) -> float:
    return float(card.costs.get(name, 0.0))


def _steps_s(card: ModelCard, name: str, parameters: Mapping[str, Any]) -> float:
    """Seconds of all steps that are made. Shallow ones whose cost nobody announced count as deep."""
    made = int(parameters["steps"] * parameters.get("edit", {}).get("strength", 1))
    width, height = parameters["width"], parameters["height"]
    deep_s = _step_s(card.costs.get(name), width, height)
    cached = _schedule(card, parameters, made)
    table = None if cached is None else card.costs.get(f"shallow_{name}", {}).get(cached.depth)
    if cached is None or not table:
        return made * deep_s
    deep = sum(cached.plan(made))
    return deep * deep_s + (made - deep) * _step_s(table, width, height)


def _schedule(card: ModelCard, parameters: Mapping[str, Any], made: int) -> schedule.DeepCache | None:
    """What the job asks for, or else the worker's own. None: all deep, or something that only its worker can read."""
    try:
        found = schedule.read(parameters.get("deepcache", card.deepcache))
    except ValueError:
        return None
    return found if found is not None and found.complaint(made) is None else None


def _step_s(table: Mapping[str, float] | None, width: int, height: int) -> float:
    """Seconds of one step at this size; a size that was not measured is scaled by area from the nearest that was."""
    if not table:
        return 0.0
    exact = table.get(f"{width}x{height}")
    if exact is not None:
        return exact
    areas = {math.prod(map(int, size.split("x"))): seconds for size, seconds in table.items()}
    near = min(areas, key=lambda area: (abs(math.log(area / (width * height))), area))
    return areas[near] * width * height / near


def _rounded(seconds: float) -> str:
    """Upwards to two digits, so that a deadline of what is said is taken."""
    digits = max(0, 1 - math.floor(math.log10(seconds)))
    return f"{math.ceil(seconds * 10**digits) / 10**digits:.{digits}f}"
