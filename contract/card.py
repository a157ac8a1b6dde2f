"""Model cards: what a worker offers, its limits and costs; and checks of a request against them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError

from contract import loras, pipeline_call
from contract.bounds import MAX_SEED
from contract.control import CANNY
from contract.errors import UNSUPPORTED, Invalid
from contract.offered import check_offered, list_offered

MAX_PROMPT_CHARACTERS = 10_000
MAX_STEPS = 1_000
MAX_GUIDANCE = 100.0
MAX_IMAGES = 10  # per job
MAX_CHOICES = 16  # per job, over all its prompts

FULL, TINY = "full", "tiny"  # decoders: the model's VAE, and a small one in its place
VAES = (FULL, TINY)

Size = tuple[int, int]  # width and height in pixels
_Side = Annotated[int, Field(strict=True, gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """The bounds of a request's fields."""

    max_prompt_characters: StrictInt = MAX_PROMPT_CHARACTERS
    max_steps: StrictInt = MAX_STEPS
    max_guidance: StrictFloat = MAX_GUIDANCE
    max_seed: StrictInt = MAX_SEED
    max_images: StrictInt = MAX_IMAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDefaults:
    """The values that an image model uses where a request does not say; those here are SDXL's.

    Classifier-free guidance is on, and doubles the work, for a `guidance_scale` above `guided_above`. `scheduler`,
    `schedule_type`, `timesteps` and `eta` are as in a request; None: as the model's scheduler says. `student`: by which
    method the model was distilled to few steps, at most `most_steps` (`contract.students`); "": it was not.
    """

    steps: StrictInt = 20
    guidance_scale: StrictFloat = 5.0
    guided_above: StrictFloat = 1.0
    scheduler: StrictStr | None = None
    schedule_type: StrictStr | None = None
    timesteps: tuple[StrictInt, ...] | None = None
    eta: StrictFloat | None = None
    student: StrictStr = ""
    most_steps: StrictInt = 0

    def rows(self, guidance_scale: float) -> int:
        """The rows of a picture in each forward."""
        return 2 if guidance_scale > self.guided_above else 1


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Sizes whose sides are multiples of `multiple` from `shortest` to `longest`, of at most `most_pixels`."""

    multiple: _Side
    shortest: _Side
    longest: _Side
    most_pixels: _Side

    def __contains__(self, size: Size) -> bool:
        fits = (self.shortest <= side <= self.longest and side % self.multiple == 0 for side in size)
        return all(fits) and size[0] * size[1] <= self.most_pixels

    def __str__(self) -> str:
        return (
            f"any sides from {self.shortest} to {self.longest} that are multiples of {self.multiple}, "
            f"of at most {self.most_pixels} pixels"
        )


@dataclass(frozen=True, slots=True)
class ImageOffer(ImageLimits):
    """An image model's offer. `loras` are the names that a request may use; None: only the syntax is checked.

    `sizes` are those that it is best at, and `size_range` all others that it draws; None: no others.

    `plans` are its tuned plans (`contract.tuned`), and `plan` the one of requests that say none; "": none. `vaes` are
    its decoders, of `VAES`. `prompt_fields` are those of `contract.prompts.FIELDS` that it reads; None: not checked.
    `inpaint_only`: every request needs a source image and a mask. `upscalers` are the networks that may enlarge a
    finished image, `refiners` the models that may take its last steps; None: only the syntax is checked. `controls` are
    the control networks that a request may use, `preprocessors` what makes their pictures of others, `image_prompts`
    the IP-Adapters; None: not checked. `cascades` are the models that may draw first, with the pairs' tuned gates
    (`contract.cascade`); None: only the syntax is checked. `fields` are those of `contract.pipeline_call.FIELDS` that
    it reads, and `sources` the kinds of request that it draws, of that module; None: all. `options` are what
    `pipeline_options` may have: by name the `type`, and `default`, `minimum` and `maximum` if there are; None: only
    the form is checked. `checker` is what the service does to pictures that its checker flags (`contract.content`);
    "": there is none; None: not checked. `refusals` say of fields with names of files, such as `loras`, why it takes
    none, as where its worker has no folder of them; None: not announced. `upscale_filters` enlarge a finished image
    without a network; None: not checked.
    """

    sizes: Collection[Size]
    schedulers: Collection[str]
    native: Size = (0, 0)
    _: KW_ONLY
    precision: str = ""
    loras: Collection[str] | None = None
    defaults: ImageDefaults = ImageDefaults()
    plans: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plan: str = ""
    vaes: Collection[str] = (FULL,)
    prompt_fields: Collection[str] | None = None
    inpaint_only: bool = False
    size_range: SizeRange | None = None
    upscalers: Collection[str] | None = None
    controls: Collection[str] | None = None
    preprocessors: Collection[str] | None = None
    refiners: Collection[str] | None = None
    image_prompts: Collection[str] | None = None
    cascades: Mapping[str, float | None] | None = None
    fields: Collection[str] | None = None
    sources: Collection[str] | None = None
    options: Mapping[str, Mapping[str, Any]] | None = None
    checker: str | None = None
    refusals: Mapping[str, str] | None = None
    upscale_filters: Collection[str] | None = None

    def refusal(self, kind: str) -> str | None:
        """Return why it takes no files of a kind, by the offer's field of their names; "": it does; None: unknown."""
        return None if self.refusals is None else self.refusals.get(kind, "")

    def draws_from(self, kind: str) -> bool:
        """Return whether the model draws requests of this kind, of those of `contract.pipeline_call`."""
        return self.sources is None or kind in self.sources

    def check_source(self, *, edited: bool, masked: bool, soft: bool = False) -> None:
        """Raise `Invalid` for a request without a source image or mask, if the model only inpaints.

        `soft`: it asks for a soft mask, which needs a mask, and a model that does not read it.
        """
        if soft and self.inpaint_only:
            raise Invalid("soft_mask", "is not supported by this model, which was trained on masks of all or nothing")
        if soft and not masked:
            raise Invalid("soft_mask", "needs a mask")
        if self.inpaint_only and not edited:
            raise Invalid("model", "only inpaints: it takes an image and a mask, at /v1/images/edits")
        if self.inpaint_only and not masked:
            raise Invalid("mask", "is missing, and this model only inpaints")
        kind = pipeline_call.MASK if masked else pipeline_call.IMAGE if edited else pipeline_call.TEXT
        if self.draws_from(kind):
            return
        if kind == pipeline_call.TEXT:
            raise Invalid("model", "only edits: it takes an image, at /v1/images/edits")
        raise Invalid(kind, "is not supported by this model")

    def check_vae(self, name: str) -> None:
        """Raise `Invalid` for a decoder that the model does not have."""
        if name not in VAES:
            raise Invalid("vae", f"must be one of {', '.join(self.vaes)}")
        if name not in self.vaes:
            raise Invalid("vae", f"this model has no {name} decoder; it has {', '.join(self.vaes)}")

    def check_scheduler(self, name: str | None) -> None:
        """Raise `Invalid` for a sampler that the model does not offer."""
        if name is not None and (not isinstance(name, str) or name not in self.schedulers):
            raise Invalid("scheduler", f"must be one of {', '.join(self.schedulers)}")

    def check_loras(self, text: str) -> None:
        """Raise `Invalid` for text that names no LoRA, or one that the model does not offer."""
        if not isinstance(text, str):
            raise Invalid("lora", "must be text")
        try:
            named = loras.read(text)
        except ValueError as error:
            raise Invalid("lora", str(error)) from error
        if text and not named:
            raise Invalid("lora", "must name one, or be empty")
        if not named or self.loras is None:
            return
        for lora in named:
            if self.loras and lora.name not in self.loras:
                raise Invalid("lora", f"there is no LoRA {lora.name}; {list_offered(self.loras)}")
            check_offered("lora", lora.name, self.loras, self.refusal("loras"))

    def check_size(self, width: int, height: int) -> None:
        """Raise `Invalid` for a size that the model does not offer."""
        if not all(isinstance(side, int) and not isinstance(side, bool) for side in (width, height)):
            raise Invalid("size", "width and height must be whole numbers")
        if not self.offers((width, height)):
            short = all(abs(side) < 10**9 for side in (width, height))
            raise self._not_offered(f"{f'{width}x{height}' if short else 'that'} is not offered")

    def size(self, text: str | None, hint: Size | None = None) -> Size:
        """Parse a request's size. Without one: the model's native size, or the one nearest to `hint`.

        Raises `Invalid`.
        """
        if text is None or text == "auto":
            return self.native if hint is None else self.nearest(hint)
        size = self.read_size(text)
        if size is None:
            digits = ", with at most five digits a side" if re.fullmatch(r"[0-9]+x[0-9]+", text) else ""
            raise self._not_offered(f"must look like 1024x1024{digits}, or be auto")
        if not self.offers(size):
            raise self._not_offered("is not offered")
        return size

    @staticmethod
    def read_size(text: str | None) -> Size | None:
        """Parse width and height; None for any other text."""
        match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text or "")
        return None if match is None else (int(match[1]), int(match[2]))

    def nearest(self, size: Size) -> Size:
        """The offered size with the nearest aspect ratio, and of those the nearest area."""

        def apart(offered: Size) -> tuple[float, float]:
            (width, height), (w, h) = size, offered
            return round(abs(math.log(width * h / height / w)), 6), abs(math.log(width * height / w / h))

        return min(self.sizes, key=apart)

    def closest(self, size: Size) -> Size:
        """The size itself if it is offered; else its sides rounded, where that is, or the one of the nearest shape."""
        if (sides := self.size_range) is not None and not self.offers(size):
            width, height = (round(side / sides.multiple) * sides.multiple for side in size)
            if (width, height) in sides and sides.shortest <= min(size) and max(size) <= sides.longest:
                return width, height
        return size if self.offers(size) else self.nearest(size)

    def offers(self, size: Size) -> bool:
        """Return whether the model draws pictures of this size."""
        return size in self.sizes or (self.size_range is not None and size in self.size_range)

    def _not_offered(self, wrong: str) -> Invalid:
        offered = ", ".join(f"{w}x{h}" for w, h in sorted(self.sizes, key=lambda s: (-s[0] * s[1], s)))
        alternatives = "" if self.size_range is None else f"; and {self.size_range}"
        return Invalid("size", f"{wrong}; offered: {offered}{alternatives}")


def check_stages(request: Mapping[str, Any], offer: ImageOffer) -> None:
    """Raise `Invalid` for a request for a stage around the engine that the model's worker does not have."""
    if "checker" in request and offer.checker == "":
        raise Invalid("checker", "is not offered: this model's worker has none (DIPTYCH_CHECKER)", UNSUPPORTED)


@dataclass(frozen=True, slots=True)
class TextOffer:
    """A text model's offer. `context` is the most tokens of prompt and answer together; 0: not announced.

    `max_prompt_logprobs` bounds the log probabilities of a job's prompts, those of the likeliest tokens included.
    `tool_format` is how calls of tools are written, of `contract.tools`; "": not announced. `embedding_dimensions` is
    the width of an embedding; 0: the model gives none. `generates`: it answers, and does not only embed. `beam_search`:
    it also does by beam search; false: not announced. `token_bytes` are the bytes of a text that one token has at most;
    0: not announced, or any number of them. `options` are those of `contract.text.LATER_OPTIONS` that it reads.
    """

    context: StrictInt = 0
    max_prompt_characters: StrictInt = 0
    max_choices: StrictInt = MAX_CHOICES
    max_stops: StrictInt = 0
    max_logprobs: StrictInt = 0
    max_prompt_logprobs: StrictInt = 0
    max_logit_bias: StrictInt = 0
    max_seed: StrictInt = MAX_SEED
    cache_tokens: StrictInt = 0
    tool_format: StrictStr = ""
    embedding_dimensions: StrictInt = 0
    generates: StrictBool = True
    beam_search: StrictBool = False
    token_bytes: StrictInt = 0
    options: tuple[StrictStr, ...] = ()


BySize = dict[StrictStr, StrictFloat]  # "WxH" to seconds


@dataclass(frozen=True, slots=True)
class ImageCosts:
    """Seconds of an image's phases; 0 or no entry where nothing was measured.

    `vae_s` is an image's decoding by the model's VAE, `vae_tiny_s` by its tiny decoder. `solo_step_s` is a deep forward
    of two rows, `row_step_s` one row of a deep forward at the cheapest batch width. The shallow tables hold the same
    for each measured depth of DeepCache. `upscale_megapixel_s` is a million pixels of a finished image being enlarged,
    `control_row_step_s` one row of a control network's forward.
    """

    encode_s: StrictFloat = 0.0
    vae_s: StrictFloat = 0.0
    solo_step_s: BySize = field(default_factory=dict)
    row_step_s: BySize = field(default_factory=dict)
    shallow_solo_step_s: dict[StrictStr, BySize] = field(default_factory=dict)
    shallow_row_step_s: dict[StrictStr, BySize] = field(default_factory=dict)
    vae_tiny_s: StrictFloat = 0.0
    upscale_megapixel_s: StrictFloat = 0.0
    control_row_step_s: BySize = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextCosts:
    """Seconds per token: at the cheapest batch width, and for a single answer. 0: not measured."""

    token_s: StrictFloat = 0.0
    solo_token_s: StrictFloat = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """Fields that the cards of all modalities share.

    `kernels` names the kernels that run the model (avx512-vnni, avx2, hopper, triton or torch), `kernels_reason` says
    why no faster ones run it; both are "" in cards of older workers. `live`: whether a ready worker serves the model
    now; only `Registry.models` sets it. `loaded`: whether it is in the worker's memory, in `Registry.models`
    in any ready worker's; `load_s`: seconds that it took to load, 0 where it always is in memory.
    """

    name: StrictStr
    precision: StrictStr
    device: StrictStr
    capacity_per_s: StrictFloat
    kernels: StrictStr = ""
    kernels_reason: StrictStr = ""
    live: StrictBool = False
    loaded: StrictBool = True
    load_s: StrictFloat = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCard(_Card):
    """The card of an image model.

    `capacity_per_s`: images per second at native size, with the defaults and all steps deep. `costs` are expected,
    `least_costs` what iterations of the last minute have shown to be the least: 0 where none ran, since a load that has
    gone may have slowed what was measured before. `deepcache` is the default schedule, in the format of the request's
    field; a newer worker's may contain fields that this version cannot read.
    `loras` are the names that a job may use, `embeddings` the textual inversions that prompts may name, `prompt_fields`
    those of `contract.prompts` that the model reads; None in cards of older workers. `scheduler_reason` says why
    `default_scheduler` is not the one that the model's files name; "": it is. `plans` are request fields by the
    name of a tuned plan, and `plan` the default plan of requests, a name or a word of `contract.tuned`; "": none.
    `vaes` are the decoders, of `VAES`. `inpaint_only`: every request needs a source image and a mask. `graphs`: the
    numbers of CUDA graphs "recorded" and "wanted"; empty where none are used. `sizes` and `size_range` are as in the
    offer, and so are `upscalers`, `refiners`, `controls`, `preprocessors`, `image_prompts`, `cascades`, `fields`,
    `sources`, `options`, `checker`, `refusals` and `upscale_filters`. `loop`: "diffusers" for a model that runs by
    diffusers' own loop, "" for one of a native family. `lora_aliases` are names of LoRAs by those that they were
    trained as.
    """

    modality: Literal["image"] = "image"
    native: StrictInt
    sizes: tuple[tuple[_Side, _Side], ...]
    schedulers: tuple[StrictStr, ...]
    default_scheduler: StrictStr
    scheduler_reason: StrictStr = ""
    limits: ImageLimits
    costs: ImageCosts
    least_costs: ImageCosts = ImageCosts()
    deepcache: object = "off"
    loras: tuple[StrictStr, ...] = ()
    graphs: dict[StrictStr, StrictInt] = field(default_factory=dict)
    defaults: ImageDefaults = ImageDefaults()
    plans: dict[StrictStr, dict[StrictStr, Any]] = field(default_factory=dict)
    plan: StrictStr = ""
    vaes: tuple[StrictStr, ...] = (FULL,)
    embeddings: tuple[StrictStr, ...] = ()
    prompt_fields: tuple[StrictStr, ...] | None = None
    inpaint_only: StrictBool = False
    size_range: SizeRange | None = None
    upscalers: tuple[StrictStr, ...] = ()
    controls: tuple[StrictStr, ...] = ()
    preprocessors: tuple[StrictStr, ...] = (CANNY,)
    refiners: tuple[StrictStr, ...] = ()
    image_prompts: tuple[StrictStr, ...] = ()
    cascades: dict[StrictStr, StrictFloat | None] = field(default_factory=dict)
    fields: tuple[StrictStr, ...] | None = None
    sources: tuple[StrictStr, ...] | None = None
    options: dict[StrictStr, dict[StrictStr, Any]] = field(default_factory=dict)
    loop: StrictStr = ""
    checker: StrictStr = ""
    refusals: dict[StrictStr, StrictStr] | None = None
    upscale_filters: tuple[StrictStr, ...] = ()
    lora_aliases: dict[StrictStr, StrictStr] = field(default_factory=dict)

    @property
    def offer(self) -> ImageOffer:
        """The offer that requests are checked against."""
        limits = asdict(self.limits)
        limits["max_seed"] = min(MAX_SEED, self.limits.max_seed)  # older workers announce more than records can hold
        shared = {name: getattr(self, name) for name in _OFFERED}
        return ImageOffer(**shared | limits | {"native": (self.native, self.native)})


_OFFERED = {item.name for item in fields(ImageOffer)} & {item.name for item in fields(ImageCard)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCard(_Card):
    """The card of a text model. `capacity_per_s`: answers of 64 tokens per second.

    `expansion_instruction` is the system message with which the model was trained to expand prompts; "": it was not
    trained for that. `adapters` are names of LoRAs, which requests may name in place of the model.
    """

    modality: Literal["text"] = "text"
    limits: TextOffer
    costs: TextCosts
    expansion_instruction: StrictStr = ""
    adapters: tuple[StrictStr, ...] = ()


ModelCard = ImageCard | TextCard

# Version 1 of the card format requires these fields in every card.
_REQUIRED_BY_VERSION_1 = {"native": 0, "sizes": [], "schedulers": [], "default_scheduler": ""}
KINDS: dict[str, type[ModelCard]] = {"image": ImageCard, "text": TextCard}  # by modality
_READ: TypeAdapter[ModelCard] = TypeAdapter(Annotated[ModelCard, Field(discriminator="modality")])


def to_data(card: ModelCard) -> dict[str, Any]:
    """A model's card as JSON data."""
    return {**_REQUIRED_BY_VERSION_1, **asdict(card)}


def read_card(data: object) -> ModelCard:
    """A model's card from JSON data; unknown fields are ignored. Raises `Invalid`."""
    try:
        return _READ.validate_python(data)
    except ValidationError as error:
        raise invalid_card(error) from None


def invalid_card(error: ValidationError) -> Invalid:
    """The error for the first invalid field, without its value."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in first["loc"] if part not in ("image", "text")]
    return Invalid(".".join(path) or "modality", "is missing" if first["type"] == "missing" else "has another form")


def is_placeholder(card: Mapping[str, Any]) -> bool:
    """Return whether an entry of `/v1/models` is of a model that loads for the first time: its kind alone is known."""
    return bool(card.get("loading")) and "precision" not in card
