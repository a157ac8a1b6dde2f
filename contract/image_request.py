"""The request for images: what a client says, and how a model's card, a plan and defaults complete it to a job.

The body of `/v1/images/generations` is an `ImageRequest`; of edits, jobs and batch lines one with more fields. The
command line fills in the same model.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, model_validator

from contract import field_names, pipeline_call, plan, prompts, sampler_labels, students, tuned
from contract.bodies import InBody, check_bounds, with_fields_of
from contract.bounds import MAX_DEADLINE_S, MAX_EXACT
from contract.card import FULL, MAX_IMAGES, MAX_PROMPT_CHARACTERS, ImageOffer, Size, check_stages
from contract.cascade import Cascade
from contract.errors import Invalid
from contract.image import (
    FIELDS,
    JOB_FIELDS,
    PICTURES,
    ImageJob,
    ImageParameters,
    check_inputs,
    check_strength,
    check_unread,
    limits,
)
from contract.picture_input import Edit, Fit, PictureInput
from contract.plan import GUIDANCE_FIELDS, CacheFields, DeepCache
from contract.schedule import schedule_of
from contract.strict import MAX_IGNORED, MAX_NAME, StrictModel

T = TypeVar("T", bound=PictureInput)

STRENGTH = 0.8  # of an edit without a mask; with one it is 1
MAX_MARGIN = 4096  # pixels
_MAX_SIZE = 64  # characters
_IGNORED = Field(max_length=MAX_IGNORED)
_WITHOUT_EFFECT: dict[str, tuple[tuple[str, ...], str]] = {
    "quality": (("auto", "standard"), "steps and plan decide"),
    "complexity": ((), "steps and plan decide"),
    "style": ((), "the prompt decides"),
    "background": (("auto", "opaque"), "pictures are opaque"),
    "moderation": (("auto",), "the service's checker decides, if it has one"),
    "input_fidelity": (("low",), "strength decides"),
}
"""OpenAI's fields that change nothing: the values that ask for nothing else, and what a warning says of others."""


class Margins(StrictModel):
    """The number of pixels that are drawn beyond each side of an edit's source."""

    model_config = ConfigDict(title="Outpaint")

    left: int = Field(default=0, ge=0, le=MAX_MARGIN)
    top: int = Field(default=0, ge=0, le=MAX_MARGIN)
    right: int = Field(default=0, ge=0, le=MAX_MARGIN)
    bottom: int = Field(default=0, ge=0, le=MAX_MARGIN)

    def around(self, size: Size) -> Size:
        """The size of a source of this size with its margins."""
        return size[0] + self.left + self.right, size[1] + self.top + self.bottom


@with_fields_of(ImageParameters, ImageJob)
class ImageRequest(StrictModel):
    """The fields of an image request: OpenAI's, and our own. null means not given.

    Most of them are those that `ImageParameters` and `ImageJob` declare.
    """

    model_config = ConfigDict(title="ImageRequest", json_schema_extra=field_names.document)

    if TYPE_CHECKING:
        control: Sequence[Any] | None
        image_prompts: Sequence[Any] | None
        expand_prompt: bool | None
        cascade: Cascade | None

    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS), "what to draw"]
    model: Annotated[
        str | None, Field(max_length=MAX_NAME), "a name from /v1/models; default: the first that is live there"
    ] = None
    size: Annotated[
        str | None,
        Field(max_length=_MAX_SIZE),
        'one of the model\'s sizes such as "1024x1024", or of its size_range; "auto": its own',
    ] = None
    response_format: Annotated[Literal["b64_json", "url"] | None, "b64_json by default"] = None
    stream: Annotated[bool | None, "true: previews and pictures as server-sent events"] = None
    partial_images: Annotated[int | None, Field(ge=0, le=3), "previews of each picture, with stream"] = None
    true_cfg_scale: Annotated[
        float | None, Field(ge=0), "guidance_scale, where that is not given; beside it no effect, and a warning"
    ] = None
    user: Annotated[str | None, _IGNORED, "accepted and ignored"] = None
    safety_identifier: Annotated[str | None, _IGNORED, "accepted and ignored"] = None
    quality: Annotated[str | None, _IGNORED, "no effect, see steps; a warning unless auto or standard"] = None
    complexity: Annotated[str | None, _IGNORED, "no effect, see steps; a warning"] = None
    style: Annotated[str | None, _IGNORED, "no effect; a warning"] = None
    background: Annotated[str | None, _IGNORED, "no effect, pictures are opaque; a warning if transparent"] = None
    moderation: Annotated[str | None, _IGNORED, "no effect; a warning unless auto"] = None
    input_fidelity: Annotated[str | None, _IGNORED, "no effect, see strength; a warning unless low"] = None
    frame_count: Annotated[None, "only null: animations are not offered"] = None
    frame_duration_ms: Annotated[None, "only null: animations are not offered"] = None
    svg: Annotated[None, "only null: vector graphics are not offered"] = None
    deadline_s: Annotated[float | None, Field(gt=0, le=MAX_DEADLINE_S), "from now; then the job expires"] = None
    priority: Annotated[int | None, Field(ge=0, le=9), "0 is the most urgent, 5 the default"] = None
    plan: Annotated[
        str | None,
        Field(max_length=MAX_NAME),
        "off: every step whole; auto or a name from the model's plans: which steps and how, for what the request "
        "leaves open; default: the model's",
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, value: Any) -> Any:
        return field_names.renamed(value) if isinstance(value, dict) else value

    def complete(
        self, offer: ImageOffer, edited: Size | None = None, *, masked: bool = False, hint: Size | None = None
    ) -> ImageJob:
        """Complete the request to a job of this model: with its plan, or else the model's, and the model's defaults.

        `edited` is the size of the source image, `masked` whether there is a mask; without a source, `hint` is a size
        to take after where the request has none. Raises `Invalid` for what the model does not offer.
        """
        request = self.given
        if "scheduler" in request and request["scheduler"] not in offer.schedulers:
            _read_scheduler(request, offer)
        warnings = (*self.warnings, *_warnings(request))
        if (scale := request.pop("true_cfg_scale", None)) is not None:
            request.setdefault("guidance_scale", scale)
        pictures = {
            name: tuple(_input(kind, item) for item in getattr(self, name) or ()) for name, kind in PICTURES.items()
        }
        offer.check_source(edited=edited is not None, masked=masked, soft=bool(request.get("soft_mask")))
        check_inputs(pictures, offer)
        _check_offered(request, offer)
        edit = None if edited is None else _edit(request, offer, masked=masked)
        values = _filled(request, offer, edit)
        values |= pictures
        values["width"], values["height"] = offer.size(self.size, edited or hint)
        if edit is not None:
            # An edit of one step that does not say its strength has that step.
            edit = replace(edit, strength=1.0) if "strength" not in request and values["steps"] == 1 else edit
            check_strength(edit.strength, values["steps"])
            values["edit"] = edit
        if self.expand_prompt:
            prompts.check_expandable(request)
        if self.cascade is not None:
            request["cascade"] = self.cascade.complete(request, offer.cascades, edited=edit is not None)
        values["preview_every"] = _previews(request, int(values["steps"] * (1.0 if edit is None else edit.strength)))
        job = _job(ImageParameters(**{name: values[name] for name in FIELDS if name in values}), request, values)
        check_unread(job.picture, offer)
        return replace(job, warnings=warnings)


_OF_DRAFTS = (
    "prompt", "prompt_2", "negative_prompt", "negative_prompt_2", "prompt_weighting", "clip_skip", "seed",
    "deterministic",
)  # fmt: skip


def draft_of(picture: ImageParameters, offer: ImageOffer) -> ImageJob:
    """The job of a cascade's draft: this picture's prompt, seed and size, and all else by the draft model's own plan
    and defaults.

    `offer` is the draft model's. Raises `Invalid`, naming cascade.draft.
    """
    size = f"{picture.width}x{picture.height}"
    try:
        return ImageRequest.model_construct(size=size, **picture.values(_OF_DRAFTS)).complete(offer)
    except Invalid as error:
        raise Invalid("cascade.draft", f"cannot draw this request: {error}", error.code) from error


Given = Mapping[str, Any]
"""Fields of a request, by name."""


def _input(kind: type[T], entry: StrictModel | T) -> T:
    """The entry of a list, whose picture is not stored yet; the command line's has it."""
    if isinstance(entry, kind):
        return entry
    assert isinstance(entry, StrictModel)
    return kind(**{name: value for name, value in entry.given.items() if name != "image"})


def _with_checked_steps(job: ImageJob, schedule: DeepCache | None, request: Given) -> ImageJob:
    """The job, whose DeepCache schedule and guided steps are ones for the steps that are made. Raises `Invalid`.

    What `request` does not say comes from a plan, and gives way where it is none for so few steps.
    """
    steps = job.picture.made
    if schedule is not None and (wrong := schedule.error_for(steps)):
        if plan.FIELD in request:
            raise wrong
        job = replace(job, deepcache=plan.OFF)
    if request.keys() & set(GUIDANCE_FIELDS):
        job.picture.guidance.check(steps)
    elif not job.picture.guidance.fits(steps):
        return replace(job, picture=replace(job.picture, guidance_interval=None, guided_steps=None))
    return job


def _planned(request: Given, offer: ImageOffer, usual: str, strength: float) -> dict[str, Any]:
    """The fields with those of their plan where they are left open; `strength` is an edit's. Raises `Invalid`.

    `usual` is the plan of requests that name none; "": none. It refuses nobody: one that this version cannot read is
    ignored, and so are too few steps for an edit's strength and a decoder that the model does not have.
    """
    if "plan" in request:
        return tuned.fill(request, tuned.named(request["plan"], offer.plans))
    try:
        values = tuned.fill(request, tuned.named(usual, offer.plans) if usual else {})
    except Invalid:
        return dict(request)
    if "steps" not in request and int(values.get("steps", offer.max_steps) * strength) < 1:
        values.pop("steps", None)
    if "vae" not in request and values.get("vae", FULL) not in offer.vaes:
        values.pop("vae", None)
    return values


def _edit(request: Given, offer: ImageOffer, *, masked: bool) -> Edit:
    """The edit, whose pictures are not stored yet. A model that reads no strength runs all steps."""
    whole = masked or (offer.fields is not None and "strength" not in offer.fields)
    strength = request.get("strength", 1.0 if whole else STRENGTH)
    return Edit(strength=float(strength), soft_mask=bool(request.get("soft_mask")))


def _filled(request: Given, offer: ImageOffer, edit: Edit | None) -> dict[str, Any]:
    """The fields with a plan's, a student's or the model's where they are open, within the model's limits."""
    student = students.of_loras(request.get("lora", ""), offer.schedulers)
    # The model's default plan was not made for a student's LoRA.
    values = _planned(request, offer, offer.plan if student is None else "", 1.0 if edit is None else edit.strength)
    defaults = student or offer.defaults
    floors = min(defaults.steps, offer.max_steps), min(defaults.guidance_scale, offer.max_guidance)
    values = students.fill(values, replace(defaults, steps=floors[0], guidance_scale=floors[1]))
    # The seeds of all pictures survive clients whose numbers are floats of 64 bits, such as JavaScript's.
    values.setdefault("seed", secrets.randbelow(min(offer.max_seed, MAX_EXACT - MAX_IMAGES) + 1))
    return {**values, "guidance_scale": float(values["guidance_scale"])}


def _job(picture: ImageParameters, request: Given, values: Given) -> ImageJob:
    """The job of these parameters, with what is not a picture's."""
    cached = values.get(plan.FIELD)
    unread = {"output_compression"} if request.get("output_format", "png") == "png" else set[str]()
    form = cached.model_dump(exclude_none=True) if isinstance(cached, CacheFields) else cached
    own = {name: request[name] for name in JOB_FIELDS - unread if name in request}
    job = ImageJob(picture, deepcache=form, **own)
    return _with_checked_steps(job, None if cached is None else plan.read_schedule(cached), request)


def _warnings(request: Given) -> Iterator[str]:
    """Yield a warning for each field that is given and has no effect."""
    for name, (harmless, reason) in _WITHOUT_EFFECT.items():
        if name in request and request[name] not in harmless:
            yield f"{name}: has no effect; {reason}"
    if "output_compression" in request and request.get("output_format", "png") == "png":
        yield "output_compression: has no effect; png is lossless"
    if "true_cfg_scale" in request and request["true_cfg_scale"] != request.get(
        "guidance_scale", request["true_cfg_scale"]
    ):
        yield "true_cfg_scale: has no effect beside guidance_scale"
    if request.get("partial_images") and not request.get("stream"):
        yield "partial_images: has no effect without stream"


def _read_scheduler(request: dict[str, Any], offer: ImageOffer) -> None:
    """Put the model's own scheduler, and the curve, in place of another server's name for them, if it is one."""
    named = sampler_labels.read(request["scheduler"], offer.schedulers)
    if named is not None and named.same:
        request["scheduler"] = named.scheduler
        if named.curve is not None:
            request.setdefault("schedule_type", named.curve)
    elif named is not None and named.scheduler is not None:
        offered = ", ".join(offer.schedulers)
        raise Invalid("scheduler", f"must be one of {offered}; the nearest is {named.scheduler}")


def _check_offered(request: Given, offer: ImageOffer) -> None:
    """Raise `Invalid` for a refiner or LoRAs that the model does not offer, and for numbers beyond its limits."""
    pipeline_call.check_fields(request, offer.fields)
    if "refiner" in request:
        request["refiner"].check(offer.refiners, soft=bool(request.get("soft_mask")))
    for name in ("timesteps", "sigmas"):
        count = schedule_of({name: request.get(name)}).steps
        if count is not None and count > offer.max_steps:
            raise Invalid(name, f"must be at most {offer.max_steps} steps, not {count}")
    for kind, names in ((ImageJob, ("n",)), (ImageParameters, ("steps", "guidance_scale", "seed"))):
        check_bounds(kind, {name: request[name] for name in names if name in request}, limits(offer))
    offer.check_loras(request.get("lora", ""))
    check_stages(request, offer)


def _previews(request: Given, steps: int) -> int:
    """The number of steps between previews; 0: no previews."""
    every = request.get("preview_every")
    if every is None and request.get("stream") and request.get("partial_images"):
        every = max(1, steps // (request["partial_images"] + 1))
    return min(every or 0, steps)


@with_fields_of(Edit)
class EditRequest(ImageRequest):
    """The fields of an edit. In a form all of them are text."""

    model_config = ConfigDict(title="EditRequest")

    fit: Annotated[
        str | None,
        InBody(Fit),
        "how the picture comes to the size: stretch (each side by itself, by default), crop (its middle), contain "
        "(whole, its outermost pixels repeated around it); exact: it must have that size",
    ] = None
    outpaint: Annotated[
        Margins | None, "pixels beyond left, top, right and bottom of the picture that are drawn too"
    ] = None
