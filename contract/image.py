"""Image requests: the parameters of each image, the job in a record, their validation, and what is told of an image.

A field is declared once, here: `image_request` generates the bodies of HTTP from it, records, batches and workers pass
it on generically. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from contract import control, loras, pipeline_call, plan, prompts
from contract.bodies import InBody, body_of, check_bounds, declarations
from contract.bounds import FLAG, MAX_SEED, OBJECT, WORD, check_number, next_seed
from contract.card import FULL, MAX_IMAGES, MAX_PROMPT_CHARACTERS, MAX_STEPS, ImageOffer, Size
from contract.cascade import Cascade
from contract.control import MAX_CONTROLS, Control
from contract.errors import Invalid
from contract.image_prompt import MAX_IMAGE_PROMPTS, ImagePrompt
from contract.loras import MAX_CHARACTERS
from contract.picture_input import Edit as Edit
from contract.picture_input import PictureInput, check_all
from contract.plan import GUIDANCE_FIELDS, CacheFields, DeepCache, GuidanceSchedule
from contract.prompts import MAX_CLIP_SKIP
from contract.refining import Refining
from contract.schedule import NoiseSchedule, ScheduleType
from contract.strict import MAX_NAME, Nested
from contract.upscale import Upscale

MEDIA_TYPES = {"png": "image/png", "webp": "image/webp", "jpeg": "image/jpeg"}

_PROMPT = Field(max_length=MAX_PROMPT_CHARACTERS)
_LIST = Field(min_length=1, max_length=MAX_STEPS)
_Weighting = Annotated[
    Annotated[bool, Tag(FLAG)] | Annotated[Literal["compel", "a1111"], Tag(WORD)],
    Discriminator(lambda value: WORD if isinstance(value, str) else FLAG),
]
_Cache = Annotated[
    Annotated[Literal["off", "auto"], Tag(WORD)] | Annotated[CacheFields, Tag(OBJECT)],
    Discriminator(lambda value: WORD if isinstance(value, str) else OBJECT),
]


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
    `image_prompts` pictures that it is drawn like. `pipeline_options` are as in `contract.pipeline_call`.
    """

    prompt: str
    seed: Annotated[int, Field(ge=0, le=MAX_SEED), "of the first picture; default: random"]
    width: int
    height: int
    negative_prompt: Annotated[str | None, _PROMPT, "what the picture should not show"] = None
    steps: Annotated[int, Field(ge=1), "of denoising; default: the model's, 20 for SDXL"] = 20
    guidance_scale: Annotated[
        float, Field(ge=0), "default: the model's, 5.0 for SDXL; up to 1 (Z-Image: 0) no guidance, half the work"
    ] = 5.0
    scheduler: Annotated[
        str | None,
        Field(max_length=MAX_NAME),
        "one of the model's, such as euler, euler-ancestral, dpm++2m, dpm++2m-sde, lcm or tcd; default: its own",
    ] = None
    deterministic: Annotated[bool, "equal seed and fingerprint give equal bytes; slower"] = False
    preview_every: Annotated[int, Field(ge=0), "steps from one preview to the next; 0, the default: none"] = 0
    deepcache: Annotated[
        DeepCache | None,
        InBody(_Cache),
        "off: all steps whole; auto: every other and the last; or an object; default: ours",
    ] = None
    edit: Edit | None = None
    prompt_weighting: Annotated[
        bool | str,
        InBody(_Weighting),
        "the syntax of weights in prompts: compel or true: (words)1.3, word++, word--; "
        "a1111: (words:1.3), ((words)), [words], BREAK; default: none",
    ] = False
    lora: Annotated[
        str,
        Field(max_length=MAX_CHARACTERS),
        "LoRAs that it is drawn with, of the model's loras: name, name:0.8, or several, with commas",
    ] = ""
    guidance_interval: Annotated[
        tuple[float, float] | None,
        Field(min_length=2, max_length=2),
        "the share of the steps with guidance, such as [0, 0.5]; others cost half; default: all",
    ] = None
    guided_steps: Annotated[
        tuple[int, ...] | None,
        _LIST,
        "exactly these have guidance, counted from 0; in place of guidance_interval",
    ] = None
    schedule_type: Annotated[
        str | None, InBody(ScheduleType), "the spacing or curve of the noise schedule; default: the model's"
    ] = None
    timesteps: Annotated[tuple[int, ...] | None, _LIST, "of each step, descending; in place of steps"] = None
    sigmas: Annotated[
        tuple[float, ...] | None,
        Field(min_length=1, max_length=MAX_STEPS + 1),
        "noise levels of each step, descending, with or without a last 0; in place of steps",
    ] = None
    eta: Annotated[float | None, Field(ge=0, le=1), "how much noise tcd adds in each step, 0 by default"] = None
    vae: Annotated[
        str,
        InBody(Literal["full", "tiny"]),
        "what decodes the picture: the model's VAE, or its tiny decoder; full by default",
    ] = FULL
    prompt_2: Annotated[str | None, _PROMPT, "for the second text encoder; default: the prompt"] = None
    negative_prompt_2: Annotated[str | None, _PROMPT, "for the second text encoder; default: the negative prompt"] = (
        None
    )
    clip_skip: Annotated[
        int | None,
        Field(ge=0, le=MAX_CLIP_SKIP),
        "how many more of the text encoders' last layers are left out, as in diffusers; 0 by default",
    ] = None
    upscale: Annotated[Upscale | None, "the finished picture is enlarged, by one of the model's upscalers"] = None
    control: Annotated[
        tuple[Control, ...],
        InBody(list[body_of(Control, "model")]),
        Field(max_length=MAX_CONTROLS),
        f"pictures that it follows, at most {MAX_CONTROLS}, and the networks that read them",
    ] = ()
    refiner: Annotated[Refining | None, "a second model, one of the model's refiners, takes the last steps"] = None
    image_prompts: Annotated[
        tuple[ImagePrompt, ...],
        InBody(list[body_of(ImagePrompt, "model")]),
        Field(max_length=MAX_IMAGE_PROMPTS),
        f"pictures that it is drawn like, at most {MAX_IMAGE_PROMPTS}, and the IP-Adapters that read them",
    ] = ()
    pipeline_options: Annotated[
        dict[str, Any] | None,
        InBody(pipeline_call.Options),
        "further arguments of a pipeline of diffusers, of the model's options, such as true_cfg_scale",
    ] = None

    def __post_init__(self) -> None:
        for name, kind in _OBJECTS.items():
            if isinstance(current := getattr(self, name), Mapping):  # from JSON
                object.__setattr__(self, name, kind.read(name, current))
        for name in (*GUIDANCE_FIELDS, "timesteps", "sigmas"):
            if isinstance(value := getattr(self, name), list):  # from JSON
                object.__setattr__(self, name, tuple(value))

    @property
    def schedule(self) -> NoiseSchedule:
        """The noise schedule that the parameters give."""
        return NoiseSchedule(self.schedule_type, self.timesteps, self.sigmas, self.eta)

    @property
    def guidance(self) -> GuidanceSchedule:
        """The steps with guidance that the parameters give."""
        return GuidanceSchedule(self.guidance_interval, self.guided_steps)

    @property
    def added(self) -> bool:
        """Whether these pictures add to what the denoiser computes."""
        return bool(self.pictures)

    @property
    def skipped(self) -> int:
        """The number of `steps` that are skipped at the start."""
        return 0 if self.edit is None else max(0, self.steps - int(self.steps * self.edit.strength))

    @property
    def made(self) -> int:
        """The number of steps that are run."""
        return self.steps - self.skipped

    @property
    def own_steps(self) -> int:
        """The number of steps that the model runs before its refiner, for a schedule whose timesteps are even."""
        return self.made if self.refiner is None else max(0, round(self.refiner.start * self.steps) - self.skipped)

    @property
    def size(self) -> Size:
        return self.width, self.height

    @property
    def pictures(self) -> tuple[PictureInput, ...]:
        """All pictures that the request brings along but an edit's."""
        return tuple(picture for field in PICTURES for picture in getattr(self, field))

    def planned(self, fields: Mapping[str, Any]) -> ImageParameters:
        """Return the parameters with these fields of a request in place of their own; `deepcache` as `plan.read` takes
        it. Raises `Invalid`.
        """
        changes = dict(fields)
        if "deepcache" in changes:
            changes["deepcache"] = plan.read_schedule(changes["deepcache"])
        return replace(self, **changes)

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """The values of these fields, by name."""
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """The parameters as JSON, for an image file's metadata, with digests of pictures."""
        document = self.to_record()
        document.setdefault("preview_every", 0)
        document["deepcache"] = None if self.deepcache is None else asdict(self.deepcache)
        if self.edit is not None:
            document["edit"].setdefault("mask", None)
        return document

    def to_record(self) -> dict[str, Any]:
        """The parameters as JSON, without `deepcache`. Default values are left out, except those that the first version
        wrote.
        """
        currents = {
            name: value
            for name, value in self.values(FIELDS).items()
            if name in _ALWAYS or value != FIELDS[name].default
        }
        return {name: _json(value) for name, value in currents.items()}

    def check(self, offer: ImageOffer) -> None:
        """Raise `Invalid` for the first field that the model does not offer. Text values are not echoed."""
        check_unread(self, offer)
        edit, (width, height) = self.edit, self.size
        if self.refiner is not None:
            self.refiner.check(offer.refiners, soft=edit is not None and edit.soft_mask)
        if edit is not None:
            check_strength(edit.strength, self.steps)
        self.guidance.check(self.made)
        if self.deepcache is not None:
            if not isinstance(self.deepcache, DeepCache):
                raise Invalid(plan.FIELD, "must be a DeepCache plan or null")
            if (wrong := self.deepcache.error_for(self.made)) is not None:
                raise wrong
        if edit is not None:
            _check_pixels("image", edit.image, 3 * width * height)
            if edit.mask is not None:
                _check_pixels("mask", edit.mask, width * height)
        check_inputs(self.values(PICTURES), offer)
        for item in self.pictures:
            item.check_pixels(self.size)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> ImageParameters:
        """Parse what `to_record` wrote, ignoring unknown fields. Raises `Invalid`; `check` validates values."""
        for name in _NEEDED:
            if name not in record:
                raise Invalid(name, "is missing")
        values = {name: record[name] for name in FIELDS if name in record}
        if (edit := values.pop("edit", None)) is not None:
            values["edit"] = Edit.read(edit)
        for name, kind in PICTURES.items():
            entries = values.pop(name, None) or ()
            if not isinstance(entries, list | tuple):
                raise Invalid(name, "must be a list")
            values[name] = tuple(map(kind.read, entries))
        return cls(**values)


_OBJECTS: dict[str, type[Nested]] = {"upscale": Upscale, "refiner": Refining}
PICTURES: dict[str, type[PictureInput]] = {kind.FIELD: kind for kind in (Control, ImagePrompt)}
"""The fields that are lists of pictures."""
FIELDS = {item.name: item for item in fields(ImageParameters) if item.name != plan.FIELD}
"""The fields that records have, by name."""
_BOUNDED = [name for name, item in declarations(ImageParameters).items() if item.kind in (int, float, bool)]
_NEEDED = ("prompt", "seed", "steps", "guidance_scale", "width", "height")
_ALWAYS = (*_NEEDED, "negative_prompt", "scheduler", "deterministic")


def _json(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], PictureInput):
        return [item.to_dict() for item in value]
    return value.to_dict() if isinstance(value, Nested | Edit) else value


def check_unread(picture: ImageParameters, offer: ImageOffer) -> None:
    """Raise `Invalid` as `ImageParameters.check`, but neither for pictures, which need not be read, nor for what
    depends on the steps that are made.
    """
    prompts.check(picture.values(prompts.CHECKED), offer)
    check_bounds(ImageParameters, picture.values(_BOUNDED), limits(offer))
    offer.check_scheduler(picture.scheduler)
    picture.schedule.check(picture.steps)
    offer.check_loras(picture.lora)
    offer.check_vae(picture.vae)
    if picture.upscale is not None:
        picture.upscale.check(offer.upscalers, offer.refusal("upscalers"), offer.upscale_filters)
        if picture.upscale.is_filter:
            picture.upscale.check_filtered(picture.width, picture.height)
    pipeline_call.check_options(picture.pipeline_options, offer.options)
    offer.check_size(picture.width, picture.height)


def limits(offer: ImageOffer) -> dict[str, float]:
    """The upper bounds of this model, where it has lower ones than all requests have."""
    return {
        "n": offer.max_images, "seed": offer.max_seed, "steps": offer.max_steps, "guidance_scale": offer.max_guidance,
        "preview_every": MAX_STEPS,
    }  # fmt: skip


def check_inputs(pictures: Mapping[str, Sequence[Any]], offer: ImageOffer) -> None:
    """Raise `Invalid` for pictures of the fields of `PICTURES` that the model does not offer to read."""
    for field, kind in PICTURES.items():
        check_all(kind, pictures[field], getattr(offer, kind.OFFER), offer.refusal(kind.OFFER))
    control.check_preprocessors(pictures[control.FIELD], offer.preprocessors)


def check_strength(strength: object, steps: int) -> None:
    """Raise `Invalid` for a value outside 0 to 1, or one that leaves no step."""
    share = check_number("strength", strength, 0, 1)
    if int(steps * share) < 1:
        raise Invalid("strength", f"{share:g} of {steps} steps is less than one step")


def _check_pixels(field: str, pixels: object, count: int) -> None:
    if not isinstance(pixels, bytes) or len(pixels) != count:
        raise Invalid(field, "must have the image's size")


@dataclass(frozen=True, slots=True)
class ImageJob:
    """The request in a job's record: `n` images with consecutive seeds. Its pictures are keys, or not stored yet.

    `deepcache` is in the form of `plan.read`, in place of `picture`'s; None leaves it to the worker. `warnings` are for
    people: what of the request has no effect.
    """

    picture: ImageParameters
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES), "how many pictures, 1 by default"] = 1
    deepcache: Any = None
    expand_prompt: Annotated[
        bool, "a fuller prompt is written first, by the text model, and told as revised_prompt"
    ] = False
    cascade: Annotated[Cascade | None, "a faster model draws first, and this one redraws what scores below a gate"] = (
        None
    )
    output_format: Annotated[str, InBody(Literal["png", "webp", "jpeg"]), "png by default"] = "png"
    output_compression: Annotated[
        int | None, Field(ge=0, le=100), "quality of webp and jpeg, 100 by default; webp at 100 loses nothing"
    ] = None

    checker: Annotated[
        str,
        InBody(Literal["tag", "blur", "refuse"]),
        "what is done to pictures that the service's checker flags, where that is stricter than what is done anyway",
    ] = ""

    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(cascade := self.cascade, Mapping):  # from JSON
            object.__setattr__(self, "cascade", Cascade.read("cascade", cascade))
        object.__setattr__(self, "warnings", tuple(self.warnings))

    def to_dict(self) -> dict[str, Any]:
        """The job as JSON. Default values are left out, except those that the first version wrote."""
        extra = {name: getattr(self, name) for name in _BESIDE}
        changed = {name: _json(value) for name, value in extra.items() if value != _BESIDE[name].default}
        return {**self.picture.to_record(), "n": self.n, **changed}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> ImageJob:
        """Parse what `to_dict` wrote. Raises `Invalid` for missing fields; `pictures` and `check` validate values."""
        if "n" not in record:
            raise Invalid("n", "is missing")
        extra = {name: record[name] for name in _BESIDE if record.get(name) is not None}
        return cls(ImageParameters.read(record), record["n"], **extra)

    def files(self) -> set[str]:
        """The worker's files that it names, each as its field and its name. Raises `Invalid`."""
        try:
            named = loras.read(self.picture.lora)
        except ValueError as error:
            raise Invalid("lora", str(error)) from error
        return {f"lora {item.name}" for item in named} | {
            f"{item.FIELD} {item.model}" for item in self.picture.pictures
        }

    def redraw(self, model: str, deepcache: Any) -> dict[str, Any] | None:
        """Fields for `POST /v1/jobs` that leave nothing to chance or to defaults; None for a job that reads pictures.

        `deepcache` is the schedule that was followed, in the form of the request's field. The plan is "off", since what
        it said is among the fields.
        """
        if self.picture.edit is not None or self.picture.pictures:
            return None
        fields = replace(self, warnings=()).to_dict()
        size = f"{fields.pop('width')}x{fields.pop('height')}"
        fields |= {"type": "image", "model": model, "size": size, "plan": plan.OFF, "deepcache": deepcache}
        present = {name: value for name, value in fields.items() if value is not None}
        return {name: [*value] if isinstance(value, tuple) else value for name, value in present.items()}

    def pictures(self, usual: DeepCache | None = None) -> list[ImageParameters]:
        """The parameters of each image, not yet checked against the model's offer. Raises `Invalid`.

        `usual` is the default DeepCache schedule.
        """
        check_bounds(ImageJob, {name: getattr(self, name) for name in ("n", "output_compression")})
        check_bounds(ImageParameters, {"seed": self.picture.seed})
        if self.output_format not in MEDIA_TYPES:
            raise Invalid("output_format", f"must be one of {', '.join(MEDIA_TYPES)}")
        first = replace(self.picture, deepcache=usual if self.deepcache is None else plan.read_schedule(self.deepcache))
        return [replace(first, seed=next_seed(first.seed, k)) for k in range(self.n)]


_BESIDE = {item.name: item for item in fields(ImageJob) if item.name not in ("picture", "n")}
JOB_FIELDS = frozenset(declarations(ImageJob))
"""The fields of a request that its pictures do not have."""


class CheckedContent(BaseModel):
    flagged: bool
    labels: dict[str, float] = Field(description="the scores of those that flag it, or else of the nearest one")
    action: Literal["tag", "blur", "refuse"] | None = Field(
        description="what was done to it; null if it is not flagged"
    )


class ImageFacts(BaseModel):
    """What a result tells of an image that stages around the engine have changed or judged; of other stages nothing."""

    revised_prompt: str | None = Field(default=None, description="with expand_prompt: what it was drawn from")
    drawn_by: str | None = Field(default=None, description="with cascade: the model that drew it")
    draft_score: float | None = Field(default=None, description="with cascade: the score of its draft")
    content: CheckedContent | None = Field(default=None, description="what the service's checker says of it")
