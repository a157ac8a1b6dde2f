"""The text and the bytes of single tokens, as log probabilities tell them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte, of SentencePiece's vocabularies
_SPACE = "\u2581"  # of SentencePiece's, in place of a space
_REPLACEMENT = "\ufffd"
_COMPOSED = 4  # NFC makes at most so many bytes one: of nine of a Korean syllable three


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


def longest_token_bytes(tokenizer: Any) -> int:
    """Return how many bytes of a text one token has at most; 0: any number, as the tokenizer may leave some out.

    `tokenizer` is one of the tokenizers library. Only vocabularies of bytes, GPT-2's and SentencePiece's with a
    fallback to bytes, have each byte in a token, and only if nothing that precedes them shortens a text.
    """
    state = json.loads(tokenizer.to_str())
    model, vocabulary = state["model"], state["model"].get("vocab") or {}
    steps = _steps(state.get("pre_tokenizer"), "pretokenizers")
    if model.get("type") != "BPE" or state.get("truncation") or not all(map(_keeps_all, steps)):
        return 0
    bytelevel = any(step["type"] == "ByteLevel" for step in steps)  # each character of a token is one byte
    if bytelevel:
        complete = all(character in vocabulary for character in _BYTES)
    else:
        complete = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    normalizers = _steps(state.get("normalizer"), "normalizers")
    added = state.get("added_tokens") or []
    if (
        not complete
        or not all(map(_lengthens, normalizers))
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return 0
    pieces = [len(piece if bytelevel else piece.encode()) for piece in vocabulary]
    longest = max(*pieces, *(len(token["content"].encode()) for token in added), 1)
    return longest * _COMPOSED if any(step["type"] == "NFC" for step in normalizers) else longest


def _steps(step: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return [inner for each in step[name] for inner in _steps(each, name)] if step["type"] == "Sequence" else [step]


def _keeps_all(step: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer passes on each character."""
    return step["type"] in ("ByteLevel", "Digits", "Metaspace") or (
        step["type"] in ("Split", "Punctuation") and step.get("behavior") != "Removed"
    )


def _lengthens(step: Mapping[str, Any]) -> bool:
    """Return whether a normalizer leaves as many bytes at least; NFC's compositions are a known part of them."""
    spaces = step["type"] == "Replace" and (step.get("pattern"), step.get("content")) == ({"String": " "}, _SPACE)
    return spaces or step["type"] in ("NFC", "Prepend")
