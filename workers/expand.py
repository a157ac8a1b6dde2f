"""Expands each image prompt of a job with the worker's text model before the image is generated.

Expansion is part of the image's job, not a job of its own: one record, one lease, one deadline; a worker that dies in
between has both parts repeated. The expansion depends only on the prompt and the image's seed, so that a repeat gives
the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from contract.card import MAX_PROMPT_CHARACTERS
from contract.characters import text_error
from contract.errors import Invalid
from contract.image import ImageParameters
from contract.prompts import EXPANSION_TOKENS
from contract.text import TextJob

if TYPE_CHECKING:
    from workers.handlers import JobHandler

FIELD = "expand_prompt"
TEMPERATURE = 0.7  # so that another seed gives another image
INSTRUCTION = (
    "You write prompts for an image generator. Rewrite what you are given as one fuller prompt: keep everything that "
    "it asks for, and add the subject's details, the setting, the light and the style. Answer with the prompt alone, "
    "in at most 60 words."
)


def expansion_requests(pictures: Sequence[ImageParameters], handler: JobHandler | None) -> list[Any]:
    """Build text requests, one per image. Raises `Invalid`, naming expand_prompt."""
    if handler is None:
        raise Invalid(FIELD, "this worker serves no text model")
    instruction = handler.expansion_instruction or INSTRUCTION
    return [request for picture in pictures for request in _requests(picture, handler, instruction)]


def _requests(picture: ImageParameters, handler: JobHandler, instruction: str) -> list[Any]:
    messages = [{"role": "system", "content": instruction}, {"role": "user", "content": picture.prompt}]
    job = TextJob(messages=messages, max_tokens=EXPANSION_TOKENS, seed=picture.seed, temperature=TEMPERATURE)
    try:
        return handler.requests(job)
    except Invalid as error:
        raise error.of(FIELD) from error  # the client sent expand_prompt, not this request


def expanded(pictures: Sequence[ImageParameters], texts: Sequence[str]) -> list[ImageParameters]:
    """The image parameters with their expanded prompts. An expansion that is no valid prompt leaves the original."""
    revised = []
    for picture, text in zip(pictures, texts, strict=True):
        prompt = " ".join(text.split()).strip(' "“”')
        fit = prompt and text_error(prompt, MAX_PROMPT_CHARACTERS) is None
        revised.append(replace(picture, prompt=prompt) if fit else picture)
    return revised


def add_prompts(result: dict[str, Any], pictures: Sequence[ImageParameters]) -> dict[str, Any]:
    """The job's result, with the prompt that each image was generated from."""
    images = [
        {**image, "revised_prompt": picture.prompt} for image, picture in zip(result["images"], pictures, strict=True)
    ]
    return {**result, "images": images}
