"""Builds an image job from a request's fields: fills in a plan's and the model's defaults, and checks its limits."""

from __future__ import annotations

import secrets
from dataclasses import replace

from contract import control, image_prompt, plan, prompts, students, tuned
from contract.bounds import check_number, check_whole
from contract.card import FULL, ImageOffer, Size
from contract.control import ControlSource
from contract.errors import Invalid
from contract.image import FIELDS, ImageJob, ImageParameters, Source, check, check_strength
from contract.image_fields import ImageFields
from contract.image_prompt import ImagePromptSource
from contract.plan import GUIDANCE_FIELDS, CacheFields, DeepCache
from contract.schedule import SCHEDULE_FIELDS, schedule_of

STRENGTH = 0.8  # of an edit without a mask; with one it is 1


def image_job(
    fields: ImageFields,
    offer: ImageOffer,
    edited: Size | None = None,
    *,
    masked: bool = False,
    like: Size | None = None,
) -> ImageJob:
    """Build the job for these fields on this model. Defaults are filled in, within the model's limits.

    `edited` is the size of the source image, `masked` whether there is a mask; without a source, `like` is a size to
    take after where the fields have none. Raises `Invalid`.
    """
    offer.check_source(edited=edited is not None, masked=masked, soft=bool(getattr(fields, "soft_mask", None)))
    controls, image_prompts = _controls(fields, offer), _image_prompts(fields, offer)
    _check_refiner(fields, offer)
    _check_limits(fields, offer)
    offer.check_loras(fields.lora or "")
    student = students.of_loras(fields.lora or "", offer.schedulers)
    strength = None if edited is None else _strength(fields, masked=masked)
    # The model's default plan was not made for a student's LoRA.
    asked, fields = fields, _planned(fields, offer, strength, offer.plan if student is None else "")
    given = {name: value for name in FIELDS if (value := getattr(fields, name, None)) is not None}
    given.setdefault("seed", secrets.randbelow(offer.max_seed + 1))
    usual = student or offer.defaults
    least = min(usual.steps, offer.max_steps), min(usual.guidance_scale, offer.max_guidance)
    given = students.fill(given, replace(usual, steps=least[0], guidance_scale=least[1]))
    given["guidance_scale"] = float(given["guidance_scale"])
    given["width"], given["height"] = offer.size(fields.size, edited or like)
    source = None if edited is None else _source(fields, given["steps"], masked=masked)
    cached = fields.deepcache
    if fields.expand_prompt:
        prompts.check_expandable(fields)
    job = ImageJob(
        ImageParameters(**given),
        fields.n or 1,
        cached.model_dump(exclude_none=True) if isinstance(cached, CacheFields) else cached,
        source,
        bool(fields.expand_prompt),
        fields.output_format or "png",
        None if fields.output_format in (None, "png") else fields.output_compression,
        controls,
        image_prompts,
    )
    job = replace(job, picture=replace(job.picture, preview_every=_previews(fields, job.made)))
    schedule = None if cached is None else plan.read(cached)
    job = _with_checked_steps(job, schedule, asked)
    check(job.picture.guided_throughout(), offer)  # which knows no source, and so not how many are made
    return job


def _controls(fields: ImageFields, offer: ImageOffer) -> tuple[ControlSource, ...]:
    """The controls, whose pictures are not stored yet. Raises `Invalid`."""
    found = tuple(one.choice for one in fields.control or ())
    control.check(found, offer.controls, offer.preprocessors)
    return found


def _image_prompts(fields: ImageFields, offer: ImageOffer) -> tuple[ImagePromptSource, ...]:
    """The image prompts, whose pictures are not stored yet. Raises `Invalid`."""
    found = tuple(one.choice for one in fields.image_prompts or ())
    image_prompt.check(found, offer.image_prompts)
    return found


def _with_checked_steps(job: ImageJob, schedule: DeepCache | None, asked: ImageFields) -> ImageJob:
    """The job, whose DeepCache schedule and guided steps are ones for the steps that are made. Raises `Invalid`.

    What `asked` does not say comes from a plan, and gives way where it is none for so few steps.
    """
    if schedule is not None and (wrong := schedule.error_for(job.made)):
        if asked.deepcache is not None:
            raise wrong
        job = replace(job, deepcache=plan.OFF)
    if any(getattr(asked, name) is not None for name in GUIDANCE_FIELDS):
        job.picture.guidance.check(job.made)
    elif not job.picture.guidance.fits(job.made):
        return replace(job, picture=job.picture.guided_throughout())
    return job


def _planned(fields: ImageFields, offer: ImageOffer, strength: float | None, usual: str) -> ImageFields:
    """The fields with those of its plan where they are left open; `strength` is an edit's. Raises `Invalid`.

    `usual` is the plan of requests that name none; "": none. It refuses nobody: one that this version cannot read is
    ignored, and so are too few steps for an edit's strength and a decoder that the model does not have.
    """
    given = {name: getattr(fields, name) for name in (*tuned.PlanFields.model_fields, *SCHEDULE_FIELDS)}
    if fields.plan is not None:
        return fields.model_copy(update=tuned.fill(given, tuned.named(fields.plan, offer.plans)))
    if not usual:
        return fields
    try:
        found = tuned.fill(given, tuned.named(usual, offer.plans))
    except Invalid:
        return fields
    if fields.steps is None and strength is not None and int(found.get("steps", offer.max_steps) * strength) < 1:
        del found["steps"]
    if fields.vae is None and found.get("vae", FULL) not in offer.vaes:
        del found["vae"]
    return fields.model_copy(update=found)


def _check_refiner(fields: ImageFields, offer: ImageOffer) -> None:
    """Raise `Invalid` for a refiner that is not offered, or not for this request."""
    if fields.refiner is not None:
        fields.refiner.check(offer.refiners, soft=bool(getattr(fields, "soft_mask", None)))


def _check_limits(fields: ImageFields, offer: ImageOffer) -> None:
    """Raise `Invalid` for a number outside the model's limits."""
    for name in ("timesteps", "sigmas"):
        count = schedule_of({name: getattr(fields, name)}).steps
        if count is not None and count > offer.max_steps:
            raise Invalid(name, f"must be at most {offer.max_steps} steps, not {count}")
    if fields.n is not None:
        check_whole("n", fields.n, 1, offer.max_images)
    if fields.steps is not None:
        check_whole("steps", fields.steps, 1, offer.max_steps)
    if fields.guidance_scale is not None:
        check_number("guidance_scale", fields.guidance_scale, 0, offer.max_guidance)
    if fields.seed is not None:
        check_whole("seed", fields.seed, 0, offer.max_seed)


def _source(fields: ImageFields, steps: int, *, masked: bool) -> Source:
    """The source of an edit, not stored yet. Raises `Invalid` for its strength."""
    strength = _strength(fields, masked=masked)
    if getattr(fields, "strength", None) is None and steps == 1:
        strength = 1.0
    check_strength(strength, steps)
    return Source(strength, soft_mask=getattr(fields, "soft_mask", None) or None)


def _strength(fields: ImageFields, *, masked: bool) -> float:
    strength = getattr(fields, "strength", None)
    return float(strength if strength is not None else 1.0 if masked else STRENGTH)


def _previews(fields: ImageFields, steps: int) -> int:
    """The number of steps between previews; 0: no previews."""
    every = fields.preview_every
    if every is None and fields.stream and fields.partial_images:
        every = max(1, steps // (fields.partial_images + 1))
    return min(every or 0, steps)
