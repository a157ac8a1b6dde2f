"""What a picture is asked for with, and what is refused.

Knows the limits of values; knows nothing of weights, devices or HTTP, and imports no torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from core import loras, markup
from core.batching.runner import Refused
from core.schedule import DeepCache
from core.text import complaint

MAX_PROMPT_CHARACTERS = 10_000
MAX_STEPS = 1_000
MAX_IMAGES = 10  # of one job
MAX_GUIDANCE = 100.0
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Edit:
    """A picture to begin with instead of noise: image to image, and with a mask inpainting.

    Of so many steps only the last `strength` of them (0 to 1, rounded down to whole steps) are made, as in diffusers.
    Where there is a `mask`, what it leaves out is kept, pixel by pixel.
    """

    image: bytes = field(repr=False)  # [height, width, 3]: red, green and blue, at the size of the request
    mask: bytes | None = field(default=None, repr=False)  # [height, width]: 255 where it is drawn anew, else 0
    strength: float = 0.8


@dataclass(frozen=True, slots=True)
class ImageParameters:
    """One picture. The defaults are SDXL's own, at 20 steps.

    `negative_prompt` None means what the model says of an absent one (SDXL: zero embeddings), "" an empty prompt.
    Guidance works where `guidance_scale` > 1; below that a request brings one row instead of two. `scheduler` None
    means the model's own. `preview_every` n > 0 asks for a preview after every n-th step. `deepcache` None runs every
    step deep. With `prompt_weighting` both prompts are read with their weights (core.markup). `lora` names what is
    added to the model's weights for this picture alone (core.loras).
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
    prompt_weighting: bool = False
    lora: str = ""

    @property
    def skipped(self) -> int:
        """How many of `steps` are left out, from the first on."""
        return 0 if self.edit is None else max(0, self.steps - int(self.steps * self.edit.strength))

    @property
    def made(self) -> int:
        """How many steps are made."""
        return self.steps - self.skipped

    def told(self) -> dict[str, Any]:
        """As JSON: what a picture's file says of them. Of the picture that was edited, the SHA-256 of its pixels."""
        told = asdict(self)
        if not self.prompt_weighting:
            del told["prompt_weighting"]
        if not self.lora:
            del told["lora"]
        if self.edit is None:
            del told["edit"]
        else:
            hashes = {
                name: None if pixels is None else hashlib.sha256(pixels).hexdigest()
                for name, pixels in (("image", self.edit.image), ("mask", self.edit.mask))
            }
            told["edit"] = {**hashes, "strength": self.edit.strength}
        return told


def check(parameters: ImageParameters, sizes: Collection[tuple[int, int]], schedulers: Collection[str]) -> None:
    """Raise `Refused` naming the first field that is wrong. Values are not echoed where they are text."""
    if not isinstance(parameters.prompt_weighting, bool):
        raise Refused("prompt_weighting: must be true or false")
    if not _checked_text("prompt", parameters.prompt, weights=parameters.prompt_weighting).strip():
        raise Refused("prompt: must not be empty")
    if parameters.negative_prompt is not None:
        _checked_text("negative_prompt", parameters.negative_prompt, weights=parameters.prompt_weighting)
    _check_integer("seed", parameters.seed, 0, MAX_SEED)
    _check_integer("steps", parameters.steps, 1, MAX_STEPS)
    _check_integer("preview_every", parameters.preview_every, 0, MAX_STEPS)
    scale = parameters.guidance_scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not _finite(scale):
        raise Refused("guidance_scale: must be a finite number")
    if not 0 <= scale <= MAX_GUIDANCE:
        raise Refused(f"guidance_scale: must be between 0 and {MAX_GUIDANCE:g}{_but(scale)}")
    name = parameters.scheduler
    if name is not None and (not isinstance(name, str) or name not in schedulers):
        raise Refused(f"scheduler: must be one of {', '.join(schedulers)}")
    if not isinstance(parameters.deterministic, bool):
        raise Refused("deterministic: must be true or false")
    _check_loras(parameters.lora)
    if parameters.edit is not None:
        _check_strength(parameters.edit.strength, parameters)
    if parameters.deepcache is not None:
        if not isinstance(parameters.deepcache, DeepCache):
            raise Refused("deepcache: must be a schedule or nothing")
        wrong = parameters.deepcache.complaint(parameters.made)
        if wrong is not None:
            raise Refused(f"deepcache.{wrong}")
    width, height = parameters.width, parameters.height
    if not all(isinstance(side, int) and not isinstance(side, bool) for side in (width, height)):
        raise Refused("size: width and height must be whole numbers")
    if (width, height) not in sizes:
        offered = ", ".join(f"{w}x{h}" for w, h in sorted(sizes, key=lambda size: (-size[0] * size[1], size)))
        found = f"{width}x{height}" if max(abs(width), abs(height)) < 10**9 else "that"
        raise Refused(f"size: {found} is not offered; offered: {offered}")
    if parameters.edit is not None:
        _check_pixels("image", parameters.edit.image, 3 * width * height)
        if parameters.edit.mask is not None:
            _check_pixels("mask", parameters.edit.mask, width * height)


def sizes(native: int, multiple: int) -> tuple[tuple[int, int], ...]:
    """The (width, height) that a model of this native size is asked for, in pixels.

    Squares at and at half the native size, and the rectangles of about the native area with sides up to 1:2, every
    side a multiple of `multiple`: SDXL's own training buckets lie on such a grid (Podell et al., 2023, appendix I).
    """
    step = multiple * max(1, native // (16 * multiple))  # SDXL: 64
    offered = {(native, native)}
    if native // 2 % multiple == 0:
        offered.add((native // 2, native // 2))
    for width in range(native + step, 2 * native, step):
        height = round(native * native / width / step) * step
        if width <= 2 * height:
            offered |= {(width, height), (height, width)}
    return tuple(sorted(offered))


def _check_strength(strength: float, parameters: ImageParameters) -> None:
    if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0 <= strength <= 1:
        raise Refused("strength: must be between 0 and 1")
    if parameters.made < 1:
        raise Refused(f"strength: {strength:g} of {parameters.steps} steps is less than one step")


def _check_loras(text: str) -> None:
    if not isinstance(text, str):
        raise Refused("lora: must be text")
    try:
        named = loras.read(text)
    except ValueError as error:
        raise Refused(f"lora: {error}") from error
    if text and not named:
        raise Refused("lora: must name one, or be empty")


def _check_pixels(field: str, pixels: bytes, count: int) -> None:
    if not isinstance(pixels, bytes) or len(pixels) != count:
        raise Refused(f"{field}: must be of the picture's size")


def _checked_text(field: str, text: str, *, weights: bool) -> str:
    """The text without the marks of its weights, where it has any."""
    if not isinstance(text, str):
        raise Refused(f"{field}: must be text")
    wrong = complaint(text, MAX_PROMPT_CHARACTERS)
    if wrong is not None:
        raise Refused(f"{field}: {wrong}")
    if not weights:
        return text
    try:
        read = markup.read(text)
    except markup.MarkupError as error:
        raise Refused(f"{field}: {error}") from error
    return read if isinstance(read, str) else read.text


def _check_integer(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(f"{field}: must be a whole number")
    if not low <= value <= high:
        raise Refused(f"{field}: must be between {low} and {high}{_but(value)}")


def _finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)  # an int of 400 digits is too large to ask


def _but(value: float) -> str:
    """The value that was given, where it is short: an integer may have a million digits."""
    return f", not {value:g}" if isinstance(value, float) else f", not {value}" if abs(value) < 10**20 else ""
