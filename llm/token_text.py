"""The text and the bytes of single tokens, as log probabilities tell them."""

from __future__ import annotations

import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte, of SentencePiece's vocabularies
_SPACE = "\u2581"  # of SentencePiece's, in place of a space
_REPLACEMENT = "\ufffd"


def _byte_characters() -> dict[str, int]:
    """GPT-2's characters of bytes: those that are printable in Latin-1 stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


_BYTES = _byte_characters()


def bytes_of(piece: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary, as its decoder reads them: what is none of GPT-2's characters
    stands for itself.
    """
    values = [_BYTES.get(character, -1) for character in piece]
    return piece.encode() if -1 in values else bytes(values)


def describe(tokenizer: Any, token: int, *, first: bool = False) -> dict[str, Any]:
    """Return a token's `id` and text as `token`, and its `bytes` where these are no whole characters.

    `tokenizer` is one of the tokenizers library. `first`: the text begins with it, and not with a space that the
    tokenizer put there.
    """
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    piece: str = tokenizer.id_to_token(token) or text
    if (
        piece.startswith(_SPACE) and not text.startswith(" ") and not first
    ):  # which decoders take off a text's beginning
        text = " " + text
    entry: dict[str, Any] = {"id": token, "token": text}
    if _REPLACEMENT in text:
        if match := _BYTE.fullmatch(piece):
            entry["bytes"] = [int(match[1], 16)]
        elif all(character in _BYTES for character in piece):
            entry["bytes"] = [_BYTES[character] for character in piece]
    return entry
