"""Walks over the chunks of a PNG, JPEG or WebP file and refuses what costs a decoder more than its size suggests.

Reads the structure only: the number, kinds and sizes of chunks, and the size that the header declares. Runs before any
decoder is called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_PIXELS = 4096 * 4096
MAX_SIDE = 8192  # resizing an image of one row costs more than its area suggests
MAX_SCANS = 100  # of a JPEG, each of which decodes all of it again; encoders make about ten
MAX_CHUNKS = 1024  # besides those that hold pixels; a camera or an editor writes some dozens
MAX_ANCILLARY = 8 * 2**20  # bytes of all chunks that hold no pixels: profiles, text, thumbnails
# Bytes of a PNG or WebP for each chunk of pixels; encoders write 8 KiB and more, the smallest devices some hundred.
_DENSITY = 256

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_START, _PNG_END = 33, b"\0\0\0\0IEND\xaeB`\x82"  # of the chunks behind the header; the last one
_PNG_PIXELS = (b"IDAT", b"fdAT")
_JPEG = b"\xff\xd8"
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")  # the end, or followed by a segment: none of a scan's bytes
_EOI, _SOS = 0xD9, 0xDA
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # the header of a frame
_ONCE = frozenset((b"IHDR", b"PLTE", b"tRNS", b"iCCP", b"acTL"))


class InvalidPicture(ValueError):
    """The file is refused. The message says why, without the field's name."""


def walk(data: bytes) -> tuple[int, int]:
    """Check the file's structure; return the width and height that its header declares. Raises `InvalidPicture`."""
    if data.startswith(_PNG):
        size = _walk_png(data)
    elif data.startswith(_JPEG):
        size = _walk_jpeg(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        size = _walk_webp(data)
    else:
        raise InvalidPicture("must be a PNG, JPEG or WebP image")
    check_size(size)
    return size


def check_size(size: tuple[int, int]) -> None:
    """Raise `InvalidPicture` for too many pixels, or none."""
    if min(size) < 1:
        raise InvalidPicture("must be a PNG, JPEG or WebP image")
    if max(size) > MAX_SIDE:
        raise InvalidPicture(f"is wider or higher than {MAX_SIDE} pixels")
    if size[0] * size[1] > MAX_PIXELS:
        raise InvalidPicture(f"has more than {MAX_PIXELS} pixels")


class _Tally:
    """Counts the chunks of a file of so many bytes: those of its pixels, and what it holds besides them."""

    def __init__(self, size: int) -> None:
        self._chunks, self._bytes = 0, 0
        self._parts_left = MAX_CHUNKS + size // _DENSITY

    def add_pixels(self) -> None:
        """Count one chunk of pixels. Raises `InvalidPicture` at a limit."""
        self._parts_left -= 1
        if self._parts_left < 0:
            raise InvalidPicture("has its pixels in too many small chunks")

    def add(self, length: int) -> None:
        """Count one other chunk. Raises `InvalidPicture` at a limit."""
        self._chunks, self._bytes = self._chunks + 1, self._bytes + length
        if self._chunks > MAX_CHUNKS:
            raise InvalidPicture(f"has more than {MAX_CHUNKS} chunks besides its pixels")
        if self._bytes > MAX_ANCILLARY:
            raise InvalidPicture(f"has more than {MAX_ANCILLARY} bytes besides its pixels")


def _walk_png(data: bytes) -> tuple[int, int]:
    """Walk up to IEND, or to the last whole chunk: the decoder refuses a file that is cut off."""
    if data[12:16] != b"IHDR" or len(data) < 33 or int.from_bytes(data[8:12], "big") != 13:
        raise InvalidPicture("must be a PNG, JPEG or WebP image")
    size = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    check_size(size)
    tally, seen = _Tally(len(data)), {b"IHDR"}
    for kind, _, length in png_chunks(data, _PNG_START):
        if kind in _PNG_PIXELS:
            tally.add_pixels()
        else:
            if kind in _ONCE and kind in seen:
                raise InvalidPicture(f"has two chunks {kind.decode()}")
            seen.add(kind)
            tally.add(length)
    return size


def png_chunks(data: bytes, at: int = len(_PNG)) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind, place and length of each chunk from a place on, before the last one; none of another file."""
    at = at if data.startswith(_PNG) else len(data)
    while at + 8 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind == b"IEND":
            break
        yield kind, at, length
        at += 12 + length


def header_of(data: bytes) -> bytes:
    """Return what a decoder needs to read all but the pixels: of a PNG the chunks that may lie behind them too."""
    if not data.startswith(_PNG):
        return data
    kept = (
        data[at : at + 12 + length]
        for kind, at, length in png_chunks(data, _PNG_START)
        if kind not in (*_PNG_PIXELS, b"acTL", b"fcTL")
    )
    return b"".join((data[:_PNG_START], *kept, _PNG_END))


def _walk_jpeg(data: bytes) -> tuple[int, int]:
    """Walk to the end of the image behind its first scan, where libjpeg ends; Pillow reads on behind an earlier one."""
    tally, scans, at = _Tally(len(data)), 0, 2
    size: tuple[int, int] | None = None
    while (marker := _MARKER.search(data, at)) is not None:
        kind, at = marker[0][1], marker.end()
        if kind == _EOI:
            if scans:
                break
            tally.add(0)
            continue
        length = int.from_bytes(data[at : at + 2], "big")
        if kind == _SOS:
            scans += 1
            if scans > MAX_SCANS:
                raise InvalidPicture(f"is a JPEG of more than {MAX_SCANS} scans")
        elif kind in _SOF:
            tally.add(length)
            if not scans:
                if size is not None:
                    raise InvalidPicture("has two headers")
                size = int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 3 : at + 5], "big")
                check_size(size)
        else:
            tally.add(length)
        at += length
    if size is None:
        raise InvalidPicture("must be a PNG, JPEG or WebP image")
    return size


def _walk_webp(data: bytes) -> tuple[int, int]:
    """Walk by RFC 9649 up to the end of the RIFF, where libwebp ends. Frames of an animation are walked too: their size
    is bounded as the canvas is.
    """
    at, end = 12, min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    tally = _Tally(end)
    while at + 8 <= end:
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] in (b"VP8 ", b"VP8L", b"ANMF", b"ALPH"):
            tally.add_pixels()
        else:
            tally.add(length)
        at += 8 + length + length % 2
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
