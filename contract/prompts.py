"""Reads and checks the prompts of an image request: their syntax, and the fields that go with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from contract import a1111, markup
from contract.bounds import check_text
from contract.errors import Invalid
from contract.markup import A1111, COMPEL, MarkupError, WeightedPrompt

if TYPE_CHECKING:
    from contract.card import ImageOffer

SYNTAXES = (COMPEL, A1111)
MAX_CLIP_SKIP = 31
EXPANSION_TOKENS = 96  # of an expanded prompt: the length SDXL reads of one, with some margin
FIELDS = ("prompt_weighting", "prompt_2", "negative_prompt_2", "clip_skip")
"""What only some families of models read."""

_TEXTS = ("prompt", "negative_prompt", "prompt_2", "negative_prompt_2")
CHECKED = ("prompt", "negative_prompt", *FIELDS)


def read(text: str, weighting: bool | str) -> str | WeightedPrompt:
    """Parse a prompt in the syntax of a request's `prompt_weighting`: none, compel's (also True), or A1111's.

    Raises `MarkupError`.
    """
    if not weighting:
        return text
    return a1111.read(text) if weighting == A1111 else markup.read(text)


def check(request: Mapping[str, Any], offer: ImageOffer) -> None:
    """Raise `Invalid` for the first of the fields `CHECKED` that is wrong, or that the model does not read. Texts are
    not echoed.
    """
    weighting = request["prompt_weighting"]
    if not isinstance(weighting, bool) and weighting not in SYNTAXES:
        raise Invalid("prompt_weighting", f"must be true or false, or one of {', '.join(SYNTAXES)}")
    for name in _TEXTS:
        if request[name] is None and name != "prompt":
            continue
        words = _words(name, check_text(name, request[name], offer.max_prompt_characters), weighting)
        if name == "prompt" and not words.strip() and weighting != A1111:  # in the web UI an empty one draws
            raise Invalid(name, "must not be empty")
    if request["negative_prompt_2"] is not None and request["negative_prompt"] is None:
        raise Invalid("negative_prompt_2", "needs a negative_prompt, which may be empty")
    if offer.prompt_fields is not None:
        check_known(request, offer.prompt_fields)


def check_known(request: Mapping[str, Any], fields: Collection[str]) -> None:
    """Raise `Invalid` for one of `FIELDS` that is given and not among these."""
    for name in FIELDS:
        if request[name] and name not in fields:
            raise Invalid(name, "is not supported by this model")


def _words(field: str, text: str, weighting: bool | str) -> str:
    """The text without marks."""
    try:
        words = read(text, weighting)
    except MarkupError as error:
        raise Invalid(field, str(error)) from error
    return words if isinstance(words, str) else words.text


def check_expandable(fields: Mapping[str, object]) -> None:
    """Raise `Invalid` for fields that cannot be given together with `expand_prompt`, which rewrites the prompt."""
    for name in ("prompt_weighting", "prompt_2"):
        if fields.get(name):
            raise Invalid(name, "cannot be given together with expand_prompt")
