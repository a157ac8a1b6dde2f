"""Encodes JPEG files in strips on several threads, while no other large file is encoded.

Pillow takes a fortieth of a second for a noisy one of 1024², in which a client who is alone waits. The strips are what
a JPEG has between restart markers: the file has the bytes that Pillow writes with a marker after every strip, and its
pixels are those without markers. Where others are being encoded Pillow encodes it whole, to these same bytes: the
threads would wait for one another, and hold the lock of Python more often, which the engine's thread needs too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.pixels.threads import encoding, pool

if TYPE_CHECKING:
    from PIL.Image import Image

_STRIP = 2**17  # pixels of a strip, at least
_BLOCK = 8  # pixels along a side of what is coded together, where colors are not subsampled
_MARKERS = 8  # restart markers, which take turns
_LONGEST = 2**16 - 1  # blocks between markers
_FRAME, _SCAN, _INTERVAL = 0xC0, 0xDA, 0xDD  # segments: SOF0, SOS, DRI
OPTIONS = frozenset(("quality", "subsampling", "exif", "xmp"))  # of Pillow's, that files in strips may have


def strip_rows(width: int) -> int:
    """Rows of pixels of a strip, a multiple of a block's."""
    blocks = -(-width // _BLOCK)
    rows = max(1, -(-_STRIP // (width * _BLOCK)))
    return _BLOCK * max(1, min(rows, _LONGEST // blocks))


def encoded(image: Image, encode: Callable[..., bytes], **options: Any) -> bytes:
    """Return the image as JPEG. `encode` encodes an image by Pillow with these options, which are among
    `OPTIONS`; it must write baseline JPEG without subsampling.
    """
    width, height = image.size
    rows = strip_rows(width)
    if rows >= height:
        return encode(image, **options)
    with encoding() as alone:
        if alone:
            return _in_strips(image, rows, encode, options)
        return encode(image, restart_marker_rows=rows // _BLOCK, **options)


def _in_strips(image: Image, rows: int, encode: Callable[..., bytes], options: Mapping[str, Any]) -> bytes:
    width, height = image.size
    plain = {name: value for name, value in options.items() if name in ("quality", "subsampling")}  # of each strip

    def strip(top: int) -> bytes:
        part = image.crop((0, top, width, min(top + rows, height)))
        return encode(part, **(plain if top else options))

    first, *others = pool().map(strip, range(0, height, rows))
    frame, scan, data = _places(first)
    interval = struct.pack(">BBHH", 0xFF, _INTERVAL, 4, rows // _BLOCK * -(-width // _BLOCK))
    size = frame + 5  # behind the segment's marker and length, and the precision
    header = first[:size] + struct.pack(">H", height) + first[size + 2 : scan] + interval + first[scan:data]
    parts = [header, first[data:-2]]
    for number, other in enumerate(others):
        parts += [bytes((0xFF, 0xD0 + number % _MARKERS)), other[_places(other)[2] : -2]]
    return b"".join((*parts, first[-2:]))


def _places(file: bytes) -> tuple[int, int, int]:
    """Where a file's frame and its scan begin, and the scan's data. Raises ValueError for a file of several scans."""
    at, frame = 2, 0
    while file[at] == 0xFF and at < len(file) - 4:
        kind, (length,) = file[at + 1], struct.unpack_from(">H", file, at + 2)
        if kind == _FRAME:
            frame = at
        elif kind == _SCAN:
            if not frame:
                break
            return frame, at, at + 2 + length
        at += 2 + length
    raise ValueError("no baseline JPEG")
