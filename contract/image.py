"""Image requests: the parameters of each image, the job in a record, and their validation.

Imports no torch. A field that only changes how an image is generated is one line of `ImageFields`, one of
`ImageParameters` and, if types and bounds do not suffice, one of `check`; records, batches and workers pass it on
generically.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from contract import control, image_prompt, plan, prompts, students, tuned
from contract.bounds import MAX_SEED, check_flag, check_number, check_whole, next_seed
from contract.card import FULL, MAX_IMAGES, MAX_STEPS, ImageDefaults, ImageOffer, Size
from contract.control import Control, ControlSource
from contract.errors import Invalid
from contract.image_prompt import ImagePrompt, ImagePromptSource
from contract.nested import Nested
from contract.plan import GUIDANCE_FIELDS, DeepCache, GuidanceSchedule
from contract.prompts import Prompting
from contract.refining import Refining
from contract.schedule import SCHEDULE_FIELDS, NoiseSchedule
from contract.upscale import Upscale

MEDIA_TYPES = {"png": "image/png", "webp": "image/webp", "jpeg": "image/jpeg"}


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
    `upscale` enlarges the finished image, `refiner` takes its last steps. `control` are pictures that it follows,
    `image_prompts` pictures that it is drawn like.
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
    control: tuple[Control, ...] = ()
    refiner: Refining | None = None
    image_prompts: tuple[ImagePrompt, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in _OBJECTS.items():
            if isinstance(told := getattr(self, name), Mapping):  # from JSON
                object.__setattr__(self, name, kind.read(name, told))
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
    def added(self) -> bool:
        """Whether control networks or image prompts add to what the denoiser computes."""
        return bool(self.control or self.image_prompts)

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
        told |= _objects(self)
        for name, hashed in (
            ("control", control.hashes(self.control)), ("image_prompts", image_prompt.hashes(self.image_prompts)),
        ):  # fmt: skip
            del told[name]
            if hashed:
                told[name] = hashed
        for name in (*prompts.FIELDS, "lora", *GUIDANCE_FIELDS, *SCHEDULE_FIELDS, "vae", *_OBJECTS):
            if told[name] == FIELDS[name].default:
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


_OBJECTS: dict[str, type[Nested]] = {"upscale": Upscale, "refiner": Refining}


def _objects(parameters: ImageParameters) -> dict[str, Any]:
    """Of the fields that are objects those that are given, as JSON."""
    return {name: found.to_dict() for name in _OBJECTS if (found := getattr(parameters, name)) is not None}


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
    if parameters.refiner is not None:
        soft = parameters.edit is not None and parameters.edit.soft_mask
        parameters.refiner.check(offer.refiners, soft=soft)
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
    image_prompt.check(parameters.image_prompts, offer.image_prompts)
    control.check(parameters.control, offer.controls, offer.preprocessors)
    for one in parameters.control:
        _check_pixels("control.image", one.image, 3 * parameters.width * parameters.height)


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

    `deepcache` is in the form of `plan.read`; None leaves it to the worker. `source` is an edit's source image,
    `control` are the pictures that the images follow, `image_prompts` those that they are drawn like.
    """

    picture: ImageParameters
    n: int = 1
    deepcache: Any = None
    source: Source | None = None
    expand_prompt: bool = False
    output_format: str = "png"
    output_compression: int | None = None
    control: tuple[ControlSource, ...] = ()
    image_prompts: tuple[ImagePromptSource, ...] = ()

    @property
    def made(self) -> int:
        """How many steps of each image are run, as diffusers counts them."""
        return int(self.picture.steps * (1 if self.source is None else self.source.strength))

    @property
    def own_steps(self) -> int:
        """How many of these the model itself runs before its refiner, for a schedule whose timesteps are even."""
        refiner, steps = self.picture.refiner, self.picture.steps
        return self.made if refiner is None else max(0, round(refiner.start * steps) - steps + self.made)

    @property
    def size(self) -> Size:
        return self.picture.width, self.picture.height

    def to_dict(self) -> dict[str, Any]:
        """As JSON. Default values are left out, except those that the first version wrote."""
        one = {name: getattr(self.picture, name) for name in FIELDS}
        told = {name: value for name, value in one.items() if name in _ALWAYS or value != FIELDS[name].default}
        told |= _objects(self.picture)
        told["n"] = self.n
        if self.source is not None:
            told["edit"] = {name: value for name, value in asdict(self.source).items() if value is not None}
        told |= {name: [one.to_dict() for one in found] for name in _PICTURES if (found := getattr(self, name))}
        beside = {name: getattr(self, name) for name in _BESIDE}
        return told | {name: value for name, value in beside.items() if value != _BESIDE[name].default}

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> ImageJob:
        """Parse what `told` wrote. Raises `Invalid` for missing fields; `pictures` and `check` validate values."""
        for name in _NEEDED:
            if name not in told:
                raise Invalid(name, "is missing")
        picture = ImageParameters(**{name: told[name] for name in FIELDS if name in told})
        beside = {name: told[name] for name in _BESIDE if told.get(name) is not None}
        edit, source = told.get("edit"), None
        if edit is not None:
            if not isinstance(edit, Mapping) or "strength" not in edit:
                raise Invalid("image", "is missing")
            source = Source(edit["strength"], edit.get("image"), edit.get("mask"), edit.get("soft_mask"))
        for name, kind in _PICTURES.items():
            given = told.get(name) or ()
            if not isinstance(given, list | tuple):
                raise Invalid(name, "must be a list")
            beside[name] = tuple(map(kind.read, given))
        return cls(picture, told["n"], source=source, **beside)

    def pictures(
        self, usual: DeepCache | None = None, edit: Edit | None = None, controls: tuple[Control, ...] = (),
        image_prompts: tuple[ImagePrompt, ...] = (),
    ) -> list[ImageParameters]:  # fmt: skip
        """The parameters of each image, not yet checked against the model's offer. Raises `Invalid`.

        `usual` is the default DeepCache schedule, `edit` the decoded source; `controls` and `image_prompts` are read.
        """
        check_whole("n", self.n, 1, MAX_IMAGES)
        check_whole("seed", self.picture.seed, 0, MAX_SEED)
        if self.output_format not in MEDIA_TYPES:
            raise Invalid("output_format", f"must be one of {', '.join(MEDIA_TYPES)}")
        if self.output_compression is not None:
            check_whole("output_compression", self.output_compression, 0, 100)
        cached = usual if self.deepcache is None else plan.read(self.deepcache)
        first = replace(self.picture, deepcache=cached, edit=edit, control=controls, image_prompts=image_prompts)
        return [replace(first, seed=next_seed(first.seed, k)) for k in range(self.n)]


_PICTURES: dict[str, type[ControlSource | ImagePromptSource]] = {
    "control": ControlSource, "image_prompts": ImagePromptSource,
}  # fmt: skip
FIELDS = {one.name: one for one in fields(ImageParameters) if one.name not in ("deepcache", "edit", *_PICTURES)}
_BESIDE = {one.name: one for one in fields(ImageJob) if one.name not in ("picture", "n", "source", *_PICTURES)}
_NEEDED = ("prompt", "n", "seed", "steps", "guidance_scale", "width", "height")
_ALWAYS = (*_NEEDED, "negative_prompt", "scheduler", "deterministic")
