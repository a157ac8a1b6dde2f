"""Builds the message of `diptych serve` when it is ready: its URL, and a command that draws a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contract.card import ModelCard


def welcome(url: str, models: Sequence[ModelCard]) -> str:
    """`url` has no slash at its end. Each model is listed with its kernels, and why no faster ones run."""
    offered = "; ".join(map(_offered, models))
    pages = f"The playground: {url}/. The API: {url}/docs."
    return f"Diptych serves at {url} ({offered}). {pages} A first picture:\n\n  {_first(url, models)}\n"


def _first(url: str, models: Sequence[ModelCard]) -> str:
    """A command for the first image model."""
    image = next((model for model in models if model.modality == "image"), None)
    return edit_command(url) if image is not None and image.inpaint_only else command(url)


def _offered(model: ModelCard) -> str:
    text = f"{model.name}, {model.precision} on {model.device}"
    kernels = ": ".join(filter(None, (model.kernels, model.kernels_reason)))
    return f"{text}, {kernels}" if kernels else text


def command(url: str) -> str:
    """A shell command that requests an image and writes it into pizza.png."""
    body = '{"prompt": "a slice of pizza", "response_format": "url"}'
    request = f"curl -sS {url}/v1/images/generations -H 'Content-Type: application/json' -d '{body}'"
    return f'curl -sS --output pizza.png "$({request} | grep -o \'http[^"]*\')"'


def edit_command(url: str) -> str:
    """A shell command that repaints what is transparent in mask.png, for a model that only inpaints."""
    fields = "-F image=@cat.png -F mask=@mask.png -F prompt='a hat' -F response_format=url"
    return f'curl -sS --output hat.png "$(curl -sS {url}/v1/images/edits {fields} | grep -o \'http[^"]*\')"'
