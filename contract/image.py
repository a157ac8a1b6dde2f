"""Image requests: the parameters of each image, the job in a record, and their validation.

Imports no torch. A field that only changes how an image is generated is one line of `ImageFields`, one of
`ImageParameters` and, if types and bounds do not suffice, one of `check`; records, batches and workers pass it on
generically.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from contract import plan, prompts, students, tuned
from contract.bounds import MAX_SEED, check_flag, check_number, check_whole, next_seed
from contract.card import FULL, MAX_IMAGES, MAX_STEPS, ImageDefaults, ImageOffer, Size
from contract.errors import Invalid
from contract.image_fields import ImageFields
from contract.plan import GUIDANCE_FIELDS, CacheFields, DeepCache, GuidanceSchedule
from contract.prompts import Prompting
from contract.schedule import SCHEDULE_FIELDS, NoiseSchedule, schedule_of
from contract.upscale import Upscale, read_upscale

MEDIA_TYPES = {"png": "image/png", "webp": "image/webp", "jpeg": "image/jpeg"}
STRENGTH = 0.8  # of an edit without a mask; with one it is 1


@dataclass(frozen=True, slots=True)
class Edit:
    """The source image of image-to-image generation, and with a mask of inpainting.

    Only the last `strength` (0 to 1, rounded down to whole steps) of the steps are run, as in diffusers. With a `mask`,
    unmasked pixels are kept exactly. With `soft_mask` its values are the share of steps that draw a pixel.
    """

    image: bytes = field(repr=False)  # [height, width, 3]: RGB, at the size of the request
    mask: bytes | None = field(default=None, repr=False)  # [height, width]: 255 where it is repainted, else 0
    strength: float = 0.8
    soft_mask: bool = False


@dataclass(frozen=True, slots=True)
class ImageParameters:
    """The parameters of one image. The defaults are SDXL's own, at 20 steps.

    `negative_prompt` None means the model's default for an absent one (SDXL: zero embeddings), "" an empty prompt.
    Classifier-free guidance is on where `guidance_scale` > `ImageDefaults.guided_above` of the model; otherwise a
    request has one row instead of two, as it has in steps outside `guidance_interval` or `guided_steps` (`guidance`).
    `scheduler` is the sampler; None means the model's own. `schedule_type`, `timesteps`, `sigmas` and `eta` are as in
    `NoiseSchedule`. `preview_every` n > 0 requests a preview after every n-th step. `deepcache` None runs every step
    deep. `prompt_weighting` is the syntax of prompts (contract.prompts): False for plain text, True for compel's.
    `prompt_2` and `negative_prompt_2` are read by the second text encoder; None: the same text as by the first.
    `clip_skip` is diffusers': so many more of the encoders' last layers are left out, for the prompt only. `lora` names
    the LoRAs applied to this image only (contract.loras). `vae` is the decoder: the model's VAE, or its tiny one.
    `upscale` enlarges the finished image.
    """

    prompt: str
    seed: int
    width: int
    height: int
    negative_prompt: str | None = None
    steps: int = 20
    guidance_scale: float = 5.0
    scheduler: str | None = None
    deterministic: bool = False
    preview_every: int = 0
    deepcache: DeepCache | None = None
    edit: Edit | None = None
    prompt_weighting: bool | str = False
    lora: str = ""
    guidance_interval: tuple[float, float] | None = None
    guided_steps: tuple[int, ...] | None = None
    schedule_type: str | None = None
    timesteps: tuple[int, ...] | None = None
    sigmas: tuple[float, ...] | None = None
    eta: float | None = None
    vae: str = FULL
    prompt_2: str | None = None
    negative_prompt_2: str | None = None
    clip_skip: int | None = None
    upscale: Upscale | None = None

    def __post_init__(self) -> None:
        if isinstance(self.upscale, Mapping):
            object.__setattr__(self, "upscale", read_upscale(self.upscale))
        for name in (*GUIDANCE_FIELDS, "timesteps", "sigmas"):
            if isinstance(value := getattr(self, name), list):  # from JSON
                object.__setattr__(self, name, tuple(value))

    @property
    def prompting(self) -> Prompting:
        """What it says of its prompts."""
        return Prompting(
            self.prompt, self.negative_prompt, self.prompt_weighting, self.prompt_2, self.negative_prompt_2,
            self.clip_skip,
        )  # fmt: skip

    @property
    def schedule(self) -> NoiseSchedule:
        """What it says of its noise schedule."""
        return NoiseSchedule(self.schedule_type, self.timesteps, self.sigmas, self.eta)

    @property
    def guidance(self) -> GuidanceSchedule:
        """What it says of the steps with guidance."""
        return GuidanceSchedule(self.guidance_interval, self.guided_steps)

    @property
    def skipped(self) -> int:
        """How many of `steps` are skipped at the start."""
        return 0 if self.edit is None else max(0, self.steps - int(self.steps * self.edit.strength))

    @property
    def made(self) -> int:
        """How many steps are run."""
        return self.steps - self.skipped

    def planned(self, fields: Mapping[str, Any]) -> ImageParameters:
        """With these fields of a request in place of its own; `deepcache` as `plan.read` takes it. Raises `Invalid`."""
        given = dict(fields)
        if "deepcache" in given:
            given["deepcache"] = plan.read(given["deepcache"])
        return replace(self, **given)

    def completed(self, given: Mapping[str, Any], named: Mapping[str, Any], defaults: ImageDefaults) -> ImageParameters:
        """With the fields `given`, a plan's where these are open, and the model's defaults where both are.

        A plan's guided steps that are none for so few steps give way. Raises `Invalid`.
        """
        found = self.planned(students.fill(tuned.fill(given, named), defaults))
        if any(given.get(name) is not None for name in GUIDANCE_FIELDS) or found.guidance.fits(found.steps):
            return found
        return found.guided_throughout()

    def guided_throughout(self) -> ImageParameters:
        """With guidance in every step, if it has any."""
        return replace(self, guidance_interval=None, guided_steps=None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for an image file's metadata. Of the source image, the SHA-256 of its pixels."""
        told = asdict(self)
        told["upscale"] = None if self.upscale is None else self.upscale.model_dump(exclude_none=True)
        for name in (*prompts.FIELDS, "lora", *GUIDANCE_FIELDS, *SCHEDULE_FIELDS, "vae", "upscale"):
            if told[name] == _PICTURE[name].default:
                del told[name]
        if self.edit is None:
            del told["edit"]
        else:
            hashes = {
                name: None if pixels is None else hashlib.sha256(pixels).hexdigest()
                for name, pixels in (("image", self.edit.image), ("mask", self.edit.mask))
            }
            soft = {"soft_mask": True} if self.edit.soft_mask else {}
            told["edit"] = {**hashes, "strength": self.edit.strength, **soft}
        return told


def check(parameters: ImageParameters, offer: ImageOffer) -> None:
    """Raise `Invalid` for the first field that the model does not offer. Text values are not echoed."""
    parameters.prompting.check(offer)
    check_whole("seed", parameters.seed, 0, offer.max_seed)
    check_whole("steps", parameters.steps, 1, offer.max_steps)
    check_whole("preview_every", parameters.preview_every, 0, MAX_STEPS)
    check_number("guidance_scale", parameters.guidance_scale, 0, offer.max_guidance)
    offer.check_scheduler(parameters.scheduler)
    parameters.schedule.check(parameters.steps)
    check_flag("deterministic", parameters.deterministic)
    offer.check_loras(parameters.lora)
    offer.check_vae(parameters.vae)
    if parameters.upscale is not None:
        parameters.upscale.check(offer.upscalers)
    if parameters.edit is not None:
        check_strength(parameters.edit.strength, parameters.steps)
    parameters.guidance.check(parameters.made)
    if parameters.deepcache is not None:
        if not isinstance(parameters.deepcache, DeepCache):
            raise Invalid(plan.FIELD, "must be a DeepCache plan or null")
        wrong = parameters.deepcache.error_for(parameters.made)
        if wrong is not None:
            raise wrong
    offer.check_size(parameters.width, parameters.height)
    if parameters.edit is not None:
        _check_pixels("image", parameters.edit.image, 3 * parameters.width * parameters.height)
        if parameters.edit.mask is not None:
            _check_pixels("mask", parameters.edit.mask, parameters.width * parameters.height)


def check_strength(strength: object, steps: int) -> None:
    """Raise `Invalid` for a value outside 0 to 1, or one that leaves no step."""
    share = check_number("strength", strength, 0, 1)
    if int(steps * share) < 1:
        raise Invalid("strength", f"{share:g} of {steps} steps is less than one step")


def _check_pixels(field: str, pixels: bytes, count: int) -> None:
    if not isinstance(pixels, bytes) or len(pixels) != count:
        raise Invalid(field, "must have the image's size")


@dataclass(frozen=True, slots=True)
class Source:
    """An edit's source by its artifact keys; without keys it is not stored yet."""

    strength: float
    image: str | None = None
    mask: str | None = None
    soft_mask: bool | None = None


@dataclass(frozen=True, slots=True)
class ImageJob:
    """The request in a job's record: `n` images with consecutive seeds.

    `deepcache` is in the form of `plan.read`; None leaves it to the worker. `source` is an edit's source image.
    """

    picture: ImageParameters
    n: int = 1
    deepcache: Any = None
    source: Source | None = None
    expand_prompt: bool = False
    output_format: str = "png"
    output_compression: int | None = None

    @property
    def made(self) -> int:
        """How many steps of each image are run, as diffusers counts them."""
        return int(self.picture.steps * (1 if self.source is None else self.source.strength))

    @property
    def size(self) -> Size:
        return self.picture.width, self.picture.height

    def to_dict(self) -> dict[str, Any]:
        """As JSON. Default values are left out, except those that the first version wrote."""
        one = {name: getattr(self.picture, name) for name in _PICTURE}
        told = {name: value for name, value in one.items() if name in _ALWAYS or value != _PICTURE[name].default}
        told |= {} if self.picture.upscale is None else {"upscale": self.picture.upscale.model_dump(exclude_none=True)}
        told["n"] = self.n
        if self.source is not None:
            told["edit"] = {name: value for name, value in asdict(self.source).items() if value is not None}
        beside = {name: getattr(self, name) for name in _BESIDE}
        return told | {name: value for name, value in beside.items() if value != _BESIDE[name].default}

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> ImageJob:
        """Parse what `told` wrote. Raises `Invalid` for missing fields; `pictures` and `check` validate values."""
        for name in _NEEDED:
            if name not in told:
                raise Invalid(name, "is missing")
        picture = ImageParameters(**{name: told[name] for name in _PICTURE if name in told})
        beside = {name: told[name] for name in _BESIDE if told.get(name) is not None}
        edit, source = told.get("edit"), None
        if edit is not None:
            if not isinstance(edit, Mapping) or "strength" not in edit:
                raise Invalid("image", "is missing")
            source = Source(edit["strength"], edit.get("image"), edit.get("mask"), edit.get("soft_mask"))
        return cls(picture, told["n"], source=source, **beside)

    def pictures(self, usual: DeepCache | None = None, edit: Edit | None = None) -> list[ImageParameters]:
        """The parameters of each image, not yet checked against the model's offer. Raises `Invalid`.

        `usual` is the default DeepCache schedule, `edit` the decoded source.
        """
        check_whole("n", self.n, 1, MAX_IMAGES)
        check_whole("seed", self.picture.seed, 0, MAX_SEED)
        if self.output_format not in MEDIA_TYPES:
            raise Invalid("output_format", f"must be one of {', '.join(MEDIA_TYPES)}")
        if self.output_compression is not None:
            check_whole("output_compression", self.output_compression, 0, 100)
        cached = usual if self.deepcache is None else plan.read(self.deepcache)
        first = replace(self.picture, deepcache=cached, edit=edit)
        return [replace(first, seed=next_seed(first.seed, k)) for k in range(self.n)]


_PICTURE = {one.name: one for one in fields(ImageParameters) if one.name not in ("deepcache", "edit")}
_BESIDE = {one.name: one for one in fields(ImageJob) if one.name not in ("picture", "n", "source")}
_NEEDED = ("prompt", "n", "seed", "steps", "guidance_scale", "width", "height")
_ALWAYS = (*_NEEDED, "negative_prompt", "scheduler", "deterministic")


def image_job(fields: ImageFields, offer: ImageOffer, edited: Size | None = None, *, masked: bool = False) -> ImageJob:
    """Build the job for these fields on this model. Defaults are filled in, within the model's limits.

    `edited` is the size of the source image, `masked` whether there is a mask. Raises `Invalid`.
    """
    offer.check_source(edited=edited is not None, masked=masked, soft=bool(getattr(fields, "soft_mask", None)))
    _check_limits(fields, offer)
    offer.check_loras(fields.lora or "")
    student = students.of_loras(fields.lora or "", offer.schedulers)
    strength = None if edited is None else _strength(fields, masked=masked)
    # The model's default plan was not made for a student's LoRA.
    asked, fields = fields, _planned(fields, offer, strength, offer.plan if student is None else "")
    given = {name: value for name in _PICTURE if (value := getattr(fields, name, None)) is not None}
    given.setdefault("seed", secrets.randbelow(offer.max_seed + 1))
    usual = student or offer.defaults
    least = min(usual.steps, offer.max_steps), min(usual.guidance_scale, offer.max_guidance)
    given = students.fill(given, replace(usual, steps=least[0], guidance_scale=least[1]))
    given["guidance_scale"] = float(given["guidance_scale"])
    given["width"], given["height"] = offer.size(fields.size, edited)
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
    )
    job = replace(job, picture=replace(job.picture, preview_every=_previews(fields, job.made)))
    schedule = None if cached is None else plan.read(cached)
    job = _with_checked_steps(job, schedule, asked)
    check(job.picture.guided_throughout(), offer)  # which knows no source, and so not how many are made
    return job


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
