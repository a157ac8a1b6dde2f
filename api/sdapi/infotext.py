"""Reads the text chunks of a PNG, and AUTOMATIC1111's infotext, which one of them holds."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator

PARAMETERS = "parameters"
"""The chunk with the infotext."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_CHUNKS = 64  # with text
_MOST_BYTES = 2**20  # of all texts, decompressed
_PAIR = re.compile(r'(\w[\w \-/]{0,99}):\s*+("(?:\\.|[^\\"])*+"|[^,]*+)(?:,|$)')
_MOST_CHARACTERS = 8192  # of the line of pairs
_NEGATIVE = "Negative prompt:"


def texts(data: bytes) -> dict[str, str]:
    """The texts of a PNG by keyword, in order; {} for another file. Damaged and excessive chunks are left out."""
    entries: dict[str, str] = {}
    left = _MOST_BYTES
    for kind, content in _chunks(data):
        text = _text(kind, content, left)
        if text is not None and len(entries) < _MOST_CHUNKS:
            left -= len(text[1])
            entries.setdefault(*text)
    return entries


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The chunks of text: type and content."""
    at = len(_SIGNATURE) if data.startswith(_SIGNATURE) else len(data)
    while at + 8 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        if kind in (b"tEXt", b"zTXt", b"iTXt") and at + 8 + length <= len(data):
            yield kind, data[at + 8 : at + 8 + length]
        at += 12 + length


def _text(kind: bytes, content: bytes, limit: int) -> tuple[str, str] | None:
    """Keyword and text of a chunk; None if it is malformed, or longer than `limit` bytes."""
    keyword, separator, rest = content.partition(b"\0")
    if not separator or not 0 < len(keyword) < 80:
        return None
    encoding, compressed = "latin-1", kind == b"zTXt"
    if kind == b"zTXt":
        rest = rest[1:]
    elif kind == b"iTXt":
        encoding, compressed = "utf-8", rest[:1] == b"\1"
        parts = rest[2:].split(b"\0", 2)  # language and translated keyword before it
        if len(parts) < 3:
            return None
        rest = parts[2]
    try:
        if compressed:
            inflater = zlib.decompressobj()
            rest = inflater.decompress(rest, limit + 1)
        if len(rest) > limit:
            return None
        return keyword.decode("latin-1"), rest.decode(encoding)
    except (zlib.error, UnicodeDecodeError):
        return None


def parse(infotext: str) -> dict[str, str]:
    """The parameters of an infotext by name, with its `Prompt` and `Negative prompt`."""
    *lines, last = infotext.strip().split("\n") or [""]
    pairs = _PAIR.findall(last) if len(last) <= _MOST_CHARACTERS else []
    if len(pairs) < 3:  # as in the web UI: it belongs to the prompt
        lines, pairs = [*lines, last], []
    prompts: dict[str, list[str]] = {"Prompt": [], "Negative prompt": []}
    into = "Prompt"
    for line in map(str.strip, lines):
        if line.startswith(_NEGATIVE):
            into, line = "Negative prompt", line.removeprefix(_NEGATIVE).strip()
        prompts[into].append(line)
    parameters = {name: "\n".join(texts) for name, texts in prompts.items()}
    return parameters | {name: _unquoted(value.strip()) for name, value in pairs}


def _unquoted(value: str) -> str:
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:
        return value
