"""Aliases of models as operators write them, and the names of OpenAI's image models."""

from __future__ import annotations

from typing import get_args

import pytest
from openai.types import ImageModel

from contract.model_names import is_openai_image, read_aliases


def test_aliases_are_read_with_blanks_and_empty_entries() -> None:
    aliases = read_aliases(" gpt-image-1=emoji-xl, dall-e-3 = org/emoji-xl-turbo ,")
    assert aliases == {"gpt-image-1": "emoji-xl", "dall-e-3": "org/emoji-xl-turbo"}
    assert read_aliases("") == {}


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("a=x,b", "'b' must be alias=model"),
        ("a=x,=y", "'=y' must be alias=model"),
        ("a=x,b=", "'b=' must be alias=model"),
        ("a=b=c", "'a=b=c' must be alias=model"),
        ("a=x,a=y", "'a=y' gives the alias a a second model"),
        ("a=a", "'a=a' is an alias of itself"),
        ("a=b,b=c", "'a=b' is an alias of an alias"),
        ("a=x,\x07=y", "must have names of at most"),
        (f"{'a' * 257}=x", "must have names of at most"),
    ],
)
def test_a_wrong_entry_is_named(text: str, entry: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_aliases(text)
    assert entry in str(caught.value)


def test_every_name_of_openais_client_is_known_and_no_other() -> None:
    names = get_args(ImageModel)
    assert len(names) > 10 and all(map(is_openai_image, names))
    others = (None, "", "gpt-image", "dall-e-4", "my-gpt-image-1", "gpt-image-1/x", "dall-e-3\n")
    assert not any(map(is_openai_image, others))
