"""The limits and options of a model that requests are checked against."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from contract import loras
from contract.bounds import MAX_SEED
from contract.errors import Invalid
from contract.precision import is_quantized

MAX_PROMPT_CHARACTERS = 10_000
MAX_STEPS = 1_000
MAX_GUIDANCE = 100.0
MAX_IMAGES = 10  # per job
MAX_CHOICES = 16  # per job, over all its prompts

Size = tuple[int, int]  # width and height in pixels


@dataclass(frozen=True, slots=True)
class ImageOffer:
    """The options of an image model. `loras` are the names that a request may use; None: only their form is checked."""

    sizes: Collection[Size]
    schedulers: Collection[str]
    native: Size = (0, 0)
    precision: str = ""
    loras: Collection[str] | None = None
    max_prompt_characters: int = MAX_PROMPT_CHARACTERS
    max_steps: int = MAX_STEPS
    max_guidance: float = MAX_GUIDANCE
    max_seed: int = MAX_SEED
    max_images: int = MAX_IMAGES

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
        if not self.loras:
            why = f"its weights in {self.precision} take none" if is_quantized(self.precision) else "it has none"
            raise Invalid("lora", f"is not offered with this model: {why}")
        for lora in named:
            if lora.name not in self.loras:
                raise Invalid("lora", f"{lora.name} is not known; GET /v1/models lists those that are")

    def check_size(self, width: int, height: int) -> None:
        """Raise `Invalid` for a size that the model does not offer."""
        if not all(isinstance(side, int) and not isinstance(side, bool) for side in (width, height)):
            raise Invalid("size", "width and height must be whole numbers")
        if (width, height) not in self.sizes:
            short = all(abs(side) < 10**9 for side in (width, height))
            raise self._not_offered(f"{f'{width}x{height}' if short else 'that'} is not offered")

    def size(self, text: str | None, like: Size | None = None) -> Size:
        """Parse a request's size. Without one: the model's native size, or the one most `like` another.

        Raises `Invalid`.
        """
        if text is None or text == "auto":
            return self.native if like is None else self.nearest(like)
        match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
        if match is None:
            raise self._not_offered("must look like 1024x1024, or be auto")
        size = int(match[1]), int(match[2])
        if size not in self.sizes:
            raise self._not_offered("is not offered")
        return size

    def nearest(self, size: Size) -> Size:
        """The offered size with the nearest aspect ratio, and of those the nearest area."""

        def apart(offered: Size) -> tuple[float, float]:
            (width, height), (w, h) = size, offered
            return round(abs(math.log(width * h / height / w)), 6), abs(math.log(width * height / w / h))

        return min(self.sizes, key=apart)

    def _not_offered(self, wrong: str) -> Invalid:
        offered = ", ".join(f"{w}x{h}" for w, h in sorted(self.sizes, key=lambda s: (-s[0] * s[1], s)))
        return Invalid("size", f"{wrong}; offered: {offered}")


@dataclass(frozen=True, slots=True)
class TextOffer:
    """The options of a text model. `context` is its maximum of prompt and answer tokens; 0: unknown."""

    context: int = 0
    max_choices: int = MAX_CHOICES
    max_logit_bias: int = 0
