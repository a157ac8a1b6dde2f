"""Reads the headers of safetensors files, which may be anybody's: within limits, and without holding the GIL for long.

Python's parser reads a whole JSON text in one call, during which no other thread runs, and takes hundreds of times the
text's size where it is all brackets. Here one call reads one name, one entry or one text of the metadata.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

MAX_BYTES = 8 * 2**20
MAX_TENSORS = 16_384  # a checkpoint of SDXL has 2,500, a LoRA of all its layers 3,300, in LyCORIS's layouts 6,000
MAX_METADATA = 1_024  # entries; training scripts write about a hundred
MAX_NAME = 512  # characters of a tensor's or a metadata entry's name
_MAX_ENTRY = 1_024  # characters of a tensor's type, shape and place
_MAX_TEXT = 2**19  # characters of the metadata's texts that are decoded
_MAX_DIMS = 8
_LARGEST = 2**53
_KEPT = 4
_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(rf'"((?:[^"\\\x00-\x1f]|\\.){{0,{MAX_NAME}}})"')
_PIECE = re.compile(r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})){0,4096}+')  # of a text
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


class TensorEntry(NamedTuple):
    """A tensor's type and shape, and where it lies: bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorTable(NamedTuple):
    """A header's tensors in the order in which they lie, without gaps, and its metadata's texts as JSON."""

    tensors: Mapping[str, TensorEntry]
    texts: Mapping[str, str]

    def text(self, name: str) -> str | None:
        """Return a text of the metadata, or None. Raises ValueError for one that is damaged or too long."""
        text = self.texts.get(name)
        if text is not None and len(text) > _MAX_TEXT:
            raise ValueError(f"its metadata's {name} has {len(text)} characters, and at most {_MAX_TEXT} are read")
        return None if text is None else str(json.loads(text))

    @property
    def metadata(self) -> dict[str, str]:
        """Return the texts that are not too long."""
        return {name: str(json.loads(text)) for name, text in self.texts.items() if len(text) <= _MAX_TEXT}

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return max((entry.end for entry in self.tensors.values()), default=0)


def header_end(start: bytes) -> int:
    """Return where the header ends, by a file's first eight bytes. Raises ValueError if it is too large or missing.

    The number of bytes that are read of a file is never taken from elsewhere.
    """
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not length or length >= 2**40:  # text, or another format
        raise ValueError("it has no header")
    if length > MAX_BYTES:
        raise ValueError(f"its header has {length} bytes, and at most {MAX_BYTES} are read")
    return 8 + length


def read(file: Path, size_bytes: int | None = None) -> TensorTable:
    """Read the header of a file that is whole, or that will be once it has `size_bytes`.

    Raises OSError, and ValueError for what is damaged, cut short or beyond the limits.
    """
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size if size_bytes is None else size_bytes
        end = header_end(stream.read(8))
        text = stream.read(end - 8)
    if len(text) < end - 8:
        raise ValueError("it is cut short within its header")
    table = parse(text)
    if end + table.size_bytes != size:
        raise ValueError(f"it has {size} bytes of {end + table.size_bytes}")
    return table


@lru_cache(_KEPT)
def parse(text: bytes) -> TensorTable:
    """Parse the header in these bytes. Raises ValueError for what is damaged or beyond the limits.

    The last ones are kept: a header is checked before a file's tensors are read, and then read with them.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"its header has {len(text)} bytes, and at most {MAX_BYTES} are read")
    try:
        return _Parser(text.decode()).table()
    except UnicodeDecodeError as error:
        raise ValueError("its header is not UTF-8") from error


class _Parser:
    """Reads one header from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def table(self) -> TensorTable:
        tensors: dict[str, TensorEntry] = {}
        metadata: Mapping[str, str] | None = None
        if not self._next("{"):
            raise ValueError("its header is no object")
        while (name := self._name(first=not tensors and metadata is None)) is not None:
            if name == "__metadata__":
                if metadata is not None:
                    raise ValueError("its header has two of __metadata__")
                metadata = self._metadata()
                continue
            if name in tensors:
                raise ValueError(f"its header names {name[:100]!a} twice")
            if len(tensors) == MAX_TENSORS:
                raise ValueError(f"it has more than {MAX_TENSORS} tensors")
            tensors[name] = self._entry(name)
        self._skip()
        if self._at != len(self._text):
            raise ValueError("its header goes on after its end")
        return TensorTable(_in_order(tensors), metadata or {})

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _next(self, character: str) -> bool:
        """Return whether this is the next character; then it is passed."""
        self._skip()
        if not self._text.startswith(character, self._at):
            return False
        self._at += len(character)
        return True

    def _name(self, *, first: bool) -> str | None:
        """Return the next name of the object and its colon; None at the object's end."""
        if self._next("}"):
            return None
        if not first and not self._next(","):
            raise ValueError(f"its header is damaged at character {self._at}")
        self._skip()
        match = _NAME.match(self._text, self._at)
        if match is None:
            raise ValueError(f"at character {self._at} of its header is no name of at most {MAX_NAME} characters")
        self._at = match.end()
        if not self._next(":"):
            raise ValueError(f"its header is damaged at character {self._at}")
        return str(json.loads(match[0])) if "\\" in match[1] else match[1]

    def _entry(self, name: str) -> TensorEntry:
        self._skip()
        end = self._text.find("}", self._at, self._at + _MAX_ENTRY)
        entry: Any = None
        try:
            entry = json.loads(self._text[self._at : end + 1]) if end >= 0 else None
        except (ValueError, RecursionError):
            entry = None
        self._at = end + 1
        try:
            dtype, shape, (begin, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = (*shape, begin, last)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"its header has no type, shape and place of {name[:100]!a}") from error
        if type(dtype) is not str or type(shape) is not list or len(shape) > _MAX_DIMS:
            raise ValueError(f"the type or shape of {name[:100]!a} is none")
        if not all(type(number) is int and 0 <= number < _LARGEST for number in numbers):
            raise ValueError(f"the shape or place of {name[:100]!a} is no whole numbers")
        size = ITEM_BYTES.get(dtype)
        if begin > last or (size is not None and last - begin != size * math.prod(shape)):
            raise ValueError(f"{name[:100]!a} lies at {begin} to {last}")
        return TensorEntry(dtype, tuple(shape), begin, last)

    def _metadata(self) -> dict[str, str]:
        if self._next("null"):
            return {}
        if not self._next("{"):
            raise ValueError("its metadata are no object")
        entries: dict[str, str] = {}
        while (name := self._name(first=not entries)) is not None:
            if len(entries) == MAX_METADATA:
                raise ValueError(f"its metadata have more than {MAX_METADATA} entries")
            entries[name] = self._quoted(name)
        return entries

    def _quoted(self, name: str) -> str:
        """Return the text that comes next, with its quotes."""
        self._skip()
        start = self._at
        end = start + 1 if self._text.startswith('"', start) else start
        while end > start and (match := _PIECE.match(self._text, end)) is not None and match.end() > end:
            end = match.end()
        if end == start or not self._text.startswith('"', end):
            raise ValueError(f"its metadata's {name[:100]!a} is no text")
        self._at = end + 1
        return self._text[start : self._at]


def _in_order(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors in the order of their offsets. Raises ValueError where they overlap or leave a gap."""
    at, ordered = 0, sorted(tensors.items(), key=lambda item: item[1][2:])
    for name, entry in ordered:
        if entry.begin != at:
            raise ValueError(f"{name[:100]!a} lies at {entry.begin} to {entry.end}")
        at = entry.end
    return dict(ordered)
