"""Names of models that are not their own: an operator's aliases, and OpenAI's image models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from contract.characters import text_error
from contract.strict import MAX_NAME

# https://developers.openai.com/api/reference: `gpt-image-2.5-flare`, `chatgpt-image-latest`, the retired `dall-e-3`.
_OPENAI_IMAGE = re.compile(r"dall-e-[23]|(chat)?gpt-image-[a-z0-9][a-z0-9.-]{0,63}")


PLACEHOLDERS = ("dummy", "tgi")  # which Hugging Face's clients send for a server's only model


def is_openai_image(name: str | None) -> bool:
    """Return whether this is the name of an image model of OpenAI's."""
    return name is not None and _OPENAI_IMAGE.fullmatch(name) is not None


def read_aliases(text: str) -> Mapping[str, str]:
    """Parse `alias=model,alias=model`. Raises ValueError, naming the entry that is wrong."""
    aliases: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        alias, separator, model = (part.strip() for part in entry.partition("="))
        if not separator or not alias or not model or "=" in model:
            raise ValueError(f"{entry!r} must be alias=model")
        if any(text_error(name, MAX_NAME) is not None for name in (alias, model)):
            raise ValueError(f"{entry!r} must have names of at most {MAX_NAME} printable characters")
        if alias == model:
            raise ValueError(f"{entry!r} is an alias of itself")
        if alias in aliases:
            raise ValueError(f"{entry!r} gives the alias {alias} a second model")
        aliases[alias] = model
    for alias, model in aliases.items():
        if model in aliases:
            raise ValueError(f"'{alias}={model}' is an alias of an alias")
    return MappingProxyType(aliases)
