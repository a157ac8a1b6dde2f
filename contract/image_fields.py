"""The fields of image requests as HTTP bodies and batch lines have them.

A field that only changes how an image is generated is one line here and one of `contract.image.ImageParameters`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from contract.bounds import FLAG, MAX_DEADLINE_S, MAX_SEED, OBJECT, WORD
from contract.card import MAX_IMAGES, MAX_PROMPT_CHARACTERS, MAX_STEPS, Size
from contract.control import MAX_CONTROLS, MAX_MODE, ControlSource
from contract.image_prompt import MAX_IMAGE_PROMPTS, ImagePromptSource
from contract.loras import MAX_CHARACTERS
from contract.picture_input import MAX_STRENGTH
from contract.plan import CacheFields
from contract.prompts import MAX_CLIP_SKIP
from contract.refining import Refining
from contract.schedule import ScheduleType
from contract.strict import MAX_IGNORED, MAX_NAME, StrictModel
from contract.upscale import Upscale

MAX_MARGIN = 4096  # pixels
_MAX_ID = 64  # characters
_MAX_SIZE = 64
_MAX_DATA_URL = 24_000_000  # 16 MiB in base64


class ImageReference(StrictModel):
    """An image, by one of the two."""

    model_config = ConfigDict(title="ImageReference")

    file_id: str | None = Field(default=None, max_length=_MAX_ID, description="of a file with the purpose vision")
    image_url: str | None = Field(
        default=None, max_length=_MAX_DATA_URL,
        description="data:image/png;base64,… (or jpeg, webp), within the body's limit of 1 MiB",
    )  # fmt: skip


_Start = Annotated[
    float | None,
    Field(ge=0, le=1, allow_inf_nan=False, description="the share of the steps before it acts; 0 by default"),
]
_End = Annotated[
    float | None, Field(ge=0, le=1, allow_inf_nan=False, description="the share after which it ends; 1.0 by default")
]


class ControlFields(StrictModel):
    """A picture that the image follows, and the network that reads it."""

    model_config = ConfigDict(title="Control")

    model: str = Field(
        max_length=MAX_NAME, description="of the model's controls: a ControlNet, a ControlNet-Union or a T2I-Adapter"
    )
    image: ImageReference | None = Field(
        default=None, description="edges, a pose, …; of the shape of the picture that is drawn; in a form a file"
    )
    strength: float | None = Field(
        default=None, ge=0, le=MAX_STRENGTH, allow_inf_nan=False, description="of what it adds; 1.0 by default"
    )
    start: _Start = None
    end: _End = None
    preprocessor: Literal["canny", "depth"] | None = Field(
        default=None,
        description="canny: image is a picture, of which the edges are taken; depth: its depth map, by the model's "
        "depth model if it has one; default: it is read as given",
    )
    mode: int | None = Field(
        default=None, ge=0, le=MAX_MODE, description="the kind of the image, for a ControlNet-Union: 0 is a pose, …"
    )

    @property
    def choice(self) -> ControlSource:
        """What it says, without its image."""
        given = self.model_dump(exclude_none=True, exclude={"image"})
        return ControlSource(**given)


class ImagePromptFields(StrictModel):
    """A picture that the image is drawn like, and the IP-Adapter that reads it."""

    model_config = ConfigDict(title="ImagePrompt")

    model: str = Field(
        max_length=MAX_NAME, description="of the model's image_prompts: an IP-Adapter or IP-Adapter Plus"
    )
    image: ImageReference | None = Field(
        default=None, description="the picture, of any shape; its middle square is read; in a form a file"
    )
    strength: float | None = Field(
        default=None, ge=0, le=MAX_STRENGTH, allow_inf_nan=False,
        description="how much it counts beside the prompt; 1.0 by default",
    )  # fmt: skip
    start: _Start = None
    end: _End = None

    @property
    def choice(self) -> ImagePromptSource:
        """What it says, without its image."""
        return ImagePromptSource(**self.model_dump(exclude_none=True, exclude={"image"}))


class ImageFields(StrictModel):
    """The fields of an image request: OpenAI's, and below them our own. null means not given."""

    model_config = ConfigDict(title="ImageRequest")

    prompt: str = Field(max_length=MAX_PROMPT_CHARACTERS, description="what to draw")
    model: str | None = Field(
        default=None, max_length=MAX_NAME, description="a name from /v1/models; default: the first that is live there"
    )
    n: int | None = Field(default=None, ge=1, le=MAX_IMAGES, description="how many pictures, 1 by default")
    size: str | None = Field(
        default=None, max_length=_MAX_SIZE,
        description='one of the model\'s sizes such as "1024x1024", or of its size_range; "auto": its own',
    )  # fmt: skip
    response_format: Literal["b64_json", "url"] | None = Field(default=None, description="b64_json by default")
    output_format: Literal["png", "webp", "jpeg"] | None = Field(default=None, description="png by default")
    stream: bool | None = Field(default=None, description="true: previews and pictures as server-sent events")
    user: str | None = Field(default=None, max_length=MAX_IGNORED, description="accepted and ignored")
    quality: str | None = Field(default=None, max_length=MAX_IGNORED, description="accepted and ignored; see steps")
    style: str | None = Field(default=None, max_length=MAX_IGNORED, description="accepted and ignored")
    background: str | None = Field(
        default=None, max_length=MAX_IGNORED, description="accepted and ignored: pictures are opaque"
    )
    moderation: str | None = Field(default=None, max_length=MAX_IGNORED, description="accepted and ignored")
    output_compression: int | None = Field(
        default=None, ge=0, le=100, description="quality of webp and jpeg, 100 by default; webp at 100 loses nothing"
    )
    partial_images: int | None = Field(default=None, ge=0, le=3, description="previews of each picture, with stream")
    input_fidelity: str | None = Field(default=None, max_length=MAX_IGNORED, description="accepted and ignored")

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="of the first picture; default: random")
    steps: int | None = Field(default=None, ge=1, description="of denoising; default: the model's, 20 for SDXL")
    guidance_scale: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="default: the model's, 5.0 for SDXL; up to 1 (Z-Image: 0) no guidance, half the work",
    )
    guidance_interval: list[float] | None = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="the share of the steps with guidance, such as [0, 0.5]; others cost half; default: all",
    )
    guided_steps: list[int] | None = Field(
        default=None, min_length=1, max_length=MAX_STEPS, fail_fast=True,
        description="exactly these have guidance, counted from 0; in place of guidance_interval",
    )  # fmt: skip
    schedule_type: ScheduleType | None = Field(
        default=None, description="the spacing or curve of the noise schedule; default: the model's"
    )
    timesteps: list[int] | None = Field(
        default=None, min_length=1, max_length=MAX_STEPS, fail_fast=True,
        description="of each step, descending; in place of steps",
    )  # fmt: skip
    sigmas: list[float] | None = Field(
        default=None, min_length=1, max_length=MAX_STEPS + 1, fail_fast=True,
        description="noise levels of each step, descending, with or without a last 0; in place of steps",
    )  # fmt: skip
    eta: float | None = Field(
        default=None, ge=0, le=1, allow_inf_nan=False, description="how much noise tcd adds in each step, 0 by default"
    )
    negative_prompt: str | None = Field(
        default=None, max_length=MAX_PROMPT_CHARACTERS, description="what the picture should not show"
    )
    scheduler: str | None = Field(default=None, max_length=MAX_NAME, description="one of the model's; default: its own")
    deadline_s: float | None = Field(
        default=None, gt=0, le=MAX_DEADLINE_S, allow_inf_nan=False, description="from now; then the job expires"
    )
    priority: int | None = Field(default=None, ge=0, le=9, description="0 is the most urgent, 5 the default")
    deepcache: (
        Annotated[
            Annotated[Literal["off", "auto"], Tag(WORD)] | Annotated[CacheFields, Tag(OBJECT)],
            Discriminator(lambda value: WORD if isinstance(value, str) else OBJECT),
        ]
        | None
    ) = Field(
        default=None,
        description="off: all steps whole; auto: every other and the last; or an object; default: ours",
    )
    plan: str | None = Field(
        default=None,
        max_length=MAX_NAME,
        description="off: every step whole; auto or a name from the model's plans: which steps and how, for what the "
        "request leaves open; default: the model's",
    )
    vae: Literal["full", "tiny"] | None = Field(
        default=None, description="what decodes the picture: the model's VAE, or its tiny decoder; full by default"
    )
    deterministic: bool | None = Field(default=None, description="equal seed and fingerprint give equal bytes; slower")
    preview_every: int | None = Field(
        default=None, ge=0, description="steps from one preview to the next; 0, the default: none"
    )
    prompt_weighting: (
        Annotated[
            Annotated[bool, Tag(FLAG)] | Annotated[Literal["compel", "a1111"], Tag(WORD)],
            Discriminator(lambda value: WORD if isinstance(value, str) else FLAG),
        ]
        | None
    ) = Field(
        default=None,
        description="the syntax of weights in prompts: compel or true: (words)1.3, word++, word--; "
        "a1111: (words:1.3), ((words)), [words], BREAK; default: none",
    )
    prompt_2: str | None = Field(
        default=None, max_length=MAX_PROMPT_CHARACTERS, description="for the second text encoder; default: the prompt"
    )
    negative_prompt_2: str | None = Field(
        default=None, max_length=MAX_PROMPT_CHARACTERS,
        description="for the second text encoder; default: the negative prompt",
    )  # fmt: skip
    clip_skip: int | None = Field(
        default=None, ge=0, le=MAX_CLIP_SKIP,
        description="how many more of the text encoders' last layers are left out, as in diffusers; 0 by default",
    )  # fmt: skip
    lora: str | None = Field(
        default=None,
        max_length=MAX_CHARACTERS,
        description="LoRAs that it is drawn with, of the model's loras: name, name:0.8, or several, with commas",
    )
    upscale: Upscale | None = Field(
        default=None, description="the finished picture is enlarged, by one of the model's upscalers"
    )
    control: list[ControlFields] | None = Field(
        default=None, max_length=MAX_CONTROLS, fail_fast=True,
        description=f"pictures that it follows, at most {MAX_CONTROLS}, and the networks that read them",
    )  # fmt: skip
    image_prompts: list[ImagePromptFields] | None = Field(
        default=None,
        max_length=MAX_IMAGE_PROMPTS,
        fail_fast=True,
        description=f"pictures that it is drawn like, at most {MAX_IMAGE_PROMPTS}, and the IP-Adapters that read them",
    )
    refiner: Refining | None = Field(
        default=None, description="a second model, one of the model's refiners, takes the last steps"
    )
    expand_prompt: bool | None = Field(
        default=None, description="a fuller prompt is written first, by the text model, and told as revised_prompt"
    )


class Margins(StrictModel):
    """How many pixels are drawn beyond each side of an edit's source."""

    model_config = ConfigDict(title="Outpaint")

    left: int = Field(default=0, ge=0, le=MAX_MARGIN)
    top: int = Field(default=0, ge=0, le=MAX_MARGIN)
    right: int = Field(default=0, ge=0, le=MAX_MARGIN)
    bottom: int = Field(default=0, ge=0, le=MAX_MARGIN)

    def around(self, size: Size) -> Size:
        """The size of a source of this size with its margins."""
        return size[0] + self.left + self.right, size[1] + self.top + self.bottom


class EditFields(ImageFields):
    """The fields of an edit. In a form all of them are text."""

    model_config = ConfigDict(title="EditRequest")

    strength: float | None = Field(
        default=None, ge=0, le=1, allow_inf_nan=False,
        description="how much of the way from noise is gone; 0.8 by default, with a mask 1",
    )  # fmt: skip
    soft_mask: bool | None = Field(
        default=None,
        description="true: the mask's transparency is the share of the steps in which a pixel is drawn anew",
    )
    outpaint: Margins | None = Field(
        default=None, description="pixels beyond left, top, right and bottom of the picture that are drawn too"
    )
