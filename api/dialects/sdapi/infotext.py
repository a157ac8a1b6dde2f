"""Reads the text chunks of a PNG and EXIF's comment, and AUTOMATIC1111's infotext, which one of them holds."""

from __future__ import annotations

import json
import re
import zlib
from itertools import islice
from typing import Any

from api.pictures.walk import png_chunks

PARAMETERS = "parameters"
"""The chunk with the infotext."""
COMMENT = "exif comment"
"""What the web UI calls the infotext of JPEG and WebP."""
_KINDS = (b"tEXt", b"zTXt", b"iTXt")
_MOST_CHUNKS = 64  # with text, that are looked at
_MOST_BYTES = 2**20  # of all texts, decompressed; also of those that are left out
_MOST_INFLATED = 1032  # bytes of one byte, in deflate
_PAIR = re.compile(r'(\w[\w \-/]{0,99}):\s*+("(?:\\.|[^\\"])*+"|[^,]*+)(?:,|$)')
_MOST_CHARACTERS = 8192  # of the line of pairs
_NEGATIVE = "Negative prompt:"


def info_of(items: dict[str, str]) -> dict[str, Any]:
    """The infotext among a file's texts by keyword, these texts, and the infotext's parameters by name."""
    info = items.get(PARAMETERS) or items.get(COMMENT, "")
    return {"info": info, "items": items, "parameters": parse(info) if info else {}}


def comment(data: bytes) -> dict[str, str]:
    """The text of EXIF's UserComment, by the web UI's keyword; {} for none that can be read.

    Its first eight bytes name the encoding; of UTF-16 programs write either order, which Latin letters tell.
    """
    kind, rest = data[:8], data[8 : 8 + _MOST_BYTES]
    if kind == b"UNICODE\0":
        encoding = "utf-16-le" if rest[1::2].count(0) > rest[::2].count(0) else "utf-16-be"
    else:
        encoding, rest = "utf-8", rest if kind == b"ASCII\0\0\0" else data[:_MOST_BYTES]
    text = rest.decode(encoding, "ignore").strip("\0 ")
    return {COMMENT: text} if text else {}


def texts(data: bytes) -> dict[str, str]:
    """The texts of a PNG by keyword, in order; {} for another file. Damaged and excessive chunks are left out, and all
    chunks behind the first ones, or behind those that inflate to more than all texts may.
    """
    entries: dict[str, str] = {}
    left = _MOST_BYTES
    chunks = (chunk for chunk in png_chunks(data) if chunk[0] in _KINDS and chunk[1] + 8 + chunk[2] <= len(data))
    for kind, at, length in islice(chunks, _MOST_CHUNKS):
        size, text = _text(kind, data[at + 8 : at + 8 + length], left)
        left -= size
        if text is not None:
            entries.setdefault(*text)
        if left < 0:
            break
    return entries


def _text(kind: bytes, content: bytes, limit: int) -> tuple[int, tuple[str, str] | None]:
    """The bytes that reading a chunk takes of `limit`, or one more than that; and keyword and text, None if it is
    malformed, or longer.
    """
    keyword, separator, rest = content.partition(b"\0")
    if not separator or not 0 < len(keyword) < 80:
        return 0, None
    encoding, compressed = "latin-1", kind == b"zTXt"
    if kind == b"zTXt":
        rest = rest[1:]
    elif kind == b"iTXt":
        encoding, compressed = "utf-8", rest[:1] == b"\1"
        parts = rest[2:].split(b"\0", 2)  # language and translated keyword before it
        if len(parts) < 3:
            return 0, None
        rest = parts[2]
    if compressed:
        try:
            rest = zlib.decompressobj().decompress(rest, limit + 1)
        except zlib.error:
            return min(limit, _MOST_INFLATED * len(rest)), None
    if len(rest) > limit:
        return limit + 1 if compressed else 0, None
    try:
        return len(rest), (keyword.decode("latin-1"), rest.decode(encoding))
    except UnicodeDecodeError:
        return len(rest), None


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
