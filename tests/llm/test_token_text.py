"""Single tokens as log probabilities tell them: bytes of a tokenizer's tokens give its text again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm import token_text
from tests.llm import stage
from tests.llm.test_detokenizer import sentencepiece


def joined(tokenizer: Any, tokens: list[int]) -> bytes:
    entries = [token_text.describe(tokenizer, token) for token in tokens]
    assert [entry["id"] for entry in entries] == tokens
    return b"".join(bytes(entry["bytes"]) if "bytes" in entry else entry["token"].encode() for entry in entries)


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=40))
def test_bytes_of_a_byte_level_vocabulary_are_the_texts(text: str) -> None:
    tokenizer = stage.small().tokenizer.backend_tokenizer
    assert joined(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids) == text.encode()


@pytest.mark.parametrize("text", ["s", "é", "🦊", " s .", "s\u2028."])
def test_bytes_of_a_vocabulary_with_spaces_and_bytes_are_the_texts(text: str) -> None:
    """As SentencePiece's: a space is a part of the word after it, which decoders drop from a text's beginning."""
    tokenizer = sentencepiece("strip")
    pieces, tokens = tokenizer.get_vocab(), []
    for character in text.replace(" ", "▁"):
        whole = pieces.get(character)
        tokens += [pieces[f"<0x{byte:02X}>"] for byte in character.encode()] if whole is None else [whole]
    assert joined(tokenizer, tokens) == text.encode()
    assert token_text.describe(tokenizer, pieces["▁the"])["token"] == " the"
