"""Options of `diptych generate` for pictures that images are drawn like, and the files that they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cli.arguments import UsageError
from cli.control import opened
from contract.image_prompt import MAX_IMAGE_PROMPTS

if TYPE_CHECKING:
    from contract.image_prompt import ImagePrompt

_FLAG = "--image-prompt"


def add_image_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        _FLAG, dest="image_prompts", action="append", default=[], type=Path, metavar="IMAGE",
        help=f"a picture that the pictures are drawn like; up to {MAX_IMAGE_PROMPTS} times",
    )  # fmt: skip
    parser.add_argument(
        f"{_FLAG}-model", dest="image_prompt_models", action="append", default=[], metavar="NAME",
        help=f"the IP-Adapter that reads it, of the folder; one for each {_FLAG}, or one for all",
    )  # fmt: skip
    parser.add_argument(
        f"{_FLAG}-strength", dest="image_prompt_strengths", action="append", default=[], type=float, metavar="FACTOR",
        help=f"how much it counts beside the prompt; one for each {_FLAG}, or one for all; default: 1.0",
    )  # fmt: skip
    parser.add_argument("--ip-adapter-dir", metavar="DIR", help="where NAME.safetensors and image_encoder lie")


def read_image_prompts(options: argparse.Namespace) -> tuple[ImagePrompt, ...]:
    """The image prompts. Raises `UsageError`, naming the option or the file."""
    from PIL.Image import Resampling

    from contract import image_prompt
    from contract.errors import Invalid

    count = len(options.image_prompts)
    given = {f"{_FLAG}-model": options.image_prompt_models, f"{_FLAG}-strength": options.image_prompt_strengths}
    for flag, values in given.items():
        if values and not count:
            raise UsageError(f"{flag}: is of {_FLAG}, and there is none")
        if len(values) not in (0, 1, count):
            raise UsageError(f"{flag}: is given {len(values)} times, for {count} of {_FLAG}")
    if count and not options.image_prompt_models:
        raise UsageError(f"{_FLAG}-model: must name the IP-Adapter that reads {_FLAG}")
    models, strengths = ([*values] * (count if len(values) == 1 else 1) for values in given.values())
    choices = [
        image_prompt.ImagePromptChoice(model=models[n], strength=strengths[n] if strengths else 1.0)
        for n in range(count)
    ]
    try:
        image_prompt.check(choices, None)
    except Invalid as error:
        field = (error.field or image_prompt.FIELD).removeprefix(image_prompt.FIELD)
        raise UsageError(f"{_FLAG}{field.replace('.', '-')}: {error.message}") from error
    made = []
    for choice, path in zip(choices, options.image_prompts, strict=True):
        picture = opened(_FLAG, path)
        size = image_prompt.fitted(*picture.size)
        made.append(image_prompt.ImagePrompt.of(choice, picture.resize(size, Resampling.LANCZOS).tobytes(), size))
    return tuple(made)
