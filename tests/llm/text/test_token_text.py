"""Single tokens as log probabilities tell them: bytes of a tokenizer's tokens give its text again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from llm.text import token_text
from tests.llm import stage
from tests.llm.text.test_detokenizer import sentencepiece


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


def changed(tokenizer: Any, **parts: Any) -> Any:
    """The tokenizer with other parts; `added` tokens are added to its own."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] += parts.pop("added", [])
    return Tokenizer.from_str(json.dumps(state | parts))


def korean(tokenizer: Any) -> Any:
    return changed(tokenizer, normalizer={"type": "NFC"})


ODD = ["\u1112\u1161\u11ab" * 20, " " * 99, "\n\n\n\n", "e\u0301", "the cat"]
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=60)


@pytest.mark.parametrize("make", [lambda: stage.small().tokenizer.backend_tokenizer, lambda: sentencepiece("strip"),
                                  lambda: korean(stage.small().tokenizer.backend_tokenizer)],
                         ids=["bytes", "sentencepiece", "composed"])  # fmt: skip
@given(
    st.lists(
        TEXTS | st.sampled_from(["\u1112\u1161\u11ab" * 20, " " * 99, "\n\n\n\n", "e\u0301", "the cat"]), max_size=6
    )
)
def test_no_token_has_more_bytes_of_a_text_than_are_announced(make: Any, texts: list[str]) -> None:
    tokenizer, text = make(), "".join(texts)
    most = token_text.longest_token_bytes(tokenizer)
    assert 0 < most < 200
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) * most >= len(text.encode())


@pytest.mark.parametrize(
    "parts",
    [{"normalizer": {"type": "Lowercase"}}, {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
     {"normalizer": {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}},
     {"pre_tokenizer": {"type": "WhitespaceSplit"}}, {"pre_tokenizer": None},
     {"truncation": {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}},
     {"added": [{"id": 9999, "content": "<mask>", "single_word": False, "lstrip": True, "rstrip": False,
                 "normalized": False, "special": True}]}],
    ids=lambda parts: next(iter(parts)),
)  # fmt: skip
def test_a_tokenizer_that_may_leave_something_out_announces_no_bytes(parts: dict[str, Any]) -> None:
    tokenizer = stage.small().tokenizer.backend_tokenizer
    assert token_text.longest_token_bytes(changed(tokenizer, **parts)) == 0
