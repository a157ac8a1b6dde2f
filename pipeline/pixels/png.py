"""Encodes PNG files in strips on several threads, without the GIL for most of the time.

Pillow holds it while it encodes a PNG, for a third of a second if one is 1024² and noisy. Here rows are filtered
by NumPy and deflated by zlib, both of which release it. Strips depend on the image's size alone, and so does the file.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.pixels.threads import encoding, pool

if TYPE_CHECKING:
    from PIL.PngImagePlugin import PngInfo

Pixels = NDArray[np.uint8]

_STRIP = 2**17  # pixels of a strip, at least
_WINDOW = 2**15  # bytes before a strip that deflate may refer to
_LEVEL = 6
_COLORS = {1: 0, 2: 4, 3: 2, 4: 6}  # PNG's color types by channels


@encoding()
def encoded(pixels: Pixels, chunks: PngInfo | None = None) -> bytes:
    """Return pixels [h, w, 1 to 4] as PNG, with these chunks of text."""
    height, width, channels = pixels.shape
    rows = max(1, -(-_STRIP // width))
    starts = range(0, height, rows)
    filtered = list(pool().map(lambda start: _filtered(pixels, start, min(start + rows, height)), starts))
    windows = [b"", *(strip[-_WINDOW:] for strip in filtered[:-1])]
    deflated = pool().map(_deflated, filtered, windows, [strip is filtered[-1] for strip in filtered])
    checksum = 1
    for strip in filtered:
        checksum = zlib.adler32(strip, checksum)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLORS[channels], 0, 0, 0)
    data = b"".join((b"\x78\x9c", *deflated, struct.pack(">I", checksum)))
    texts = [] if chunks is None else [(kind, text) for kind, text, *_ in chunks.chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, content) for kind, content in ((b"IHDR", header), *texts, (b"IDAT", data), (b"IEND", b""))
    )


def _filtered(pixels: Pixels, start: int, stop: int) -> bytes:
    """Rows, each behind its filter's number and filtered so that the sum of magnitudes is the least (the heuristic of
    the PNG specification, section 12.7).
    """
    count, (_, width, channels) = stop - start, pixels.shape
    rows = np.zeros((count + 1, width + 1, channels), np.uint8)  # with a pixel of zeros to the left
    first = max(0, start - 1)
    rows[count + 1 - (stop - first) :, 1:] = pixels[first:stop]
    x, left, up, corner = rows[1:, 1:], rows[1:, :-1], rows[:-1, 1:], rows[:-1, :-1]
    average = ((left.astype(np.uint16) + up) >> 1).astype(np.uint8)
    candidates = (x, x - left, x - up, x - average, x - _paeth(left, up, corner))
    best, lines = np.full(count, 2**62), np.empty((count, 1 + width * channels), np.uint8)
    for number, candidate in enumerate(candidates):
        flat = candidate.reshape(count, -1)
        sums = np.minimum(flat, -flat).sum(axis=1, dtype=np.int64)  # of magnitudes as signed bytes
        chosen = sums < best
        best = np.where(chosen, sums, best)
        lines[chosen, 0] = number
        lines[chosen, 1:] = flat[chosen]
    return lines.tobytes()


def _paeth(left: Pixels, up: Pixels, corner: Pixels) -> Pixels:
    """The one of three neighbours that is nearest to left + up - corner, in this order where two are as near."""
    a, b, c = (part.astype(np.int16) for part in (left, up, corner))
    to_left, to_up, to_corner = np.abs(b - c), np.abs(a - c), np.abs(a + b - 2 * c)
    return np.where((to_left <= to_up) & (to_left <= to_corner), left, np.where(to_up <= to_corner, up, corner))


def _deflated(strip: bytes, window: bytes, last: bool) -> bytes:
    """A strip's part of one deflate stream."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15, 8, zlib.Z_DEFAULT_STRATEGY, *([window] if window else []))
    return compressor.compress(strip) + compressor.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(content, zlib.crc32(kind)))
