"""Expands each image prompt of a job with the worker's text model before the image is generated.

Expansion is part of the image's job, not a job of its own: one record, one lease, one deadline; a worker that dies in
between has both parts repeated. The expansion depends only on the prompt and the image's seed, so that a repeat gives
the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from contract.card import MAX_PROMPT_CHARACTERS
from contract.characters import text_error
from contract.errors import Invalid
from contract.image import ImageParameters
from contract.prompts import EXPANSION_TOKENS
from contract.text import TextJob
from workers.handlers import JobHandler
from workers.stages.stage import JobStage

if TYPE_CHECKING:
    from workers.job_run import JobRun

TEMPERATURE = 0.7  # so that another seed gives another image
INSTRUCTION = (
    "You write prompts for an image generator. Rewrite what you are given as one fuller prompt: keep everything that "
    "it asks for, and add the subject's details, the setting, the light and the style. Answer with the prompt alone, "
    "in at most 60 words."
)


class ExpansionStage(JobStage):
    """Has prompts expanded by the first text model, which stays in memory."""

    field = "expand_prompt"

    def before(self, run: JobRun, requests: dict[int, Any]) -> dict[int, Any]:
        handler = next((each for each in [*run.handlers.values()] if each.modality == "text"), None)
        if handler is None:
            raise Invalid(self.field, "this worker serves no text model")
        try:
            texts = run.make(expansion_requests(requests, handler), handler, label="prompt-")
        except Invalid as error:
            raise error.of(self.field) from error  # the client sent expand_prompt, not these requests
        requests = {index: expanded(requests[index], answer.text) for index, answer in texts.items()}
        for index, picture in requests.items():
            run.facts.setdefault(index, {})["revised_prompt"] = picture.prompt
        return requests


def expansion_requests(pictures: Mapping[int, ImageParameters], handler: JobHandler) -> dict[int, Any]:
    """Build the text request of each image. Raises `Invalid`."""
    instruction = handler.expansion_instruction or INSTRUCTION
    return {index: _request(picture, handler, instruction) for index, picture in pictures.items()}


def _request(picture: ImageParameters, handler: JobHandler, instruction: str) -> Any:
    messages = [{"role": "system", "content": instruction}, {"role": "user", "content": picture.prompt}]
    (request,) = handler.requests(
        TextJob(messages=messages, max_tokens=EXPANSION_TOKENS, seed=picture.seed, temperature=TEMPERATURE)
    )
    return request


def expanded(picture: ImageParameters, text: str) -> ImageParameters:
    """The image parameters with the expanded prompt. An expansion that is no valid prompt leaves the original."""
    prompt = " ".join(text.split()).strip(' "“”')
    fit = prompt and text_error(prompt, MAX_PROMPT_CHARACTERS) is None
    return replace(picture, prompt=prompt) if fit else picture
