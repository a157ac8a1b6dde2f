"""A fuller prompt for each picture of a job, written by the worker's text model before the picture is begun.

It is a part of the picture's own job, and no job of its own: there is one record, one lease and one deadline, and a
worker that dies between the two parts has both done again. What is written follows from the prompt and the picture's
seed, so that it is the same then. Knows both panels' parameters; knows nothing of engines and queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from contract.card import MAX_PROMPT_CHARACTERS
from contract.characters import complaint
from contract.errors import Invalid
from contract.image import ImageParameters
from contract.text import TextJob

if TYPE_CHECKING:
    from workers.panels import Panel

FIELD = "expand_prompt"
MOST_TOKENS = 96  # what SDXL reads of a prompt, and some to spare
TEMPERATURE = 0.7  # so that another seed brings another picture
INSTRUCTION = (
    "You write prompts for an image generator. Rewrite what you are given as one fuller prompt: keep everything that "
    "it asks for, and add the subject's details, the setting, the light and the style. Answer with the prompt alone, "
    "in at most 60 words."
)


def ask(pictures: Sequence[ImageParameters], panel: Panel | None) -> list[Any]:
    """Requests of the text modality, one for each picture. Raises `Invalid`, naming expand_prompt."""
    if panel is None:
        raise Invalid(FIELD, "this worker serves no text model")
    instruction = panel.expansion_instruction or INSTRUCTION
    return [wanted for picture in pictures for wanted in _requests(picture, panel, instruction)]


def _requests(picture: ImageParameters, panel: Panel, instruction: str) -> list[Any]:
    messages = [{"role": "system", "content": instruction}, {"role": "user", "content": picture.prompt}]
    asked = TextJob(messages=messages, max_tokens=MOST_TOKENS, seed=picture.seed, temperature=TEMPERATURE)
    try:
        return panel.requests(asked)
    except Invalid as error:
        raise error.of(FIELD) from error  # the request is ours, the client's is what it was made for


def expanded(pictures: Sequence[ImageParameters], texts: Sequence[str]) -> list[ImageParameters]:
    """The pictures with what was written for each. What is no prompt leaves the one that was given."""
    made = []
    for picture, text in zip(pictures, texts, strict=True):
        prompt = " ".join(text.split()).strip(' "“”')
        fit = prompt and complaint(prompt, MAX_PROMPT_CHARACTERS) is None
        made.append(replace(picture, prompt=prompt) if fit else picture)
    return made


def tell(result: dict[str, Any], pictures: Sequence[ImageParameters]) -> dict[str, Any]:
    """The job's result, with what each of its pictures was drawn from."""
    images = [
        {**image, "revised_prompt": picture.prompt} for image, picture in zip(result["images"], pictures, strict=True)
    ]
    return {**result, "images": images}
