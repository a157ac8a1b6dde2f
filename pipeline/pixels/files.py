"""Encodes images as files without holding the GIL for long.

Pillow holds it while it encodes into memory: sixteen images that end at once would take turns with it, a few
milliseconds each, and the engine's thread would wait for all of them whenever it needs it. JPEG is written to a file
descriptor, for which Pillow releases it; PNG, for which it never does, by `pipeline.pixels.png` if the image is large.
WebP's encoder releases it by itself. A large JPEG is encoded in strips, too, while no other file is encoded
(`pipeline.pixels.jpeg`).
"""

from __future__ import annotations

import io
import os
import tempfile
from functools import partial
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.PngImagePlugin import PngInfo

LARGE = 2**18  # pixels, from which on Pillow holds the GIL for long
_MODES = ("L", "LA", "RGB", "RGBA")


def encoded(image: Image, media: str, **options: Any) -> bytes:
    """Return the file that `image.save` writes in this format of Pillow's, with these options; of a large JPEG without
    subsampling with restart markers, which change no pixel.
    """
    if media == "JPEG" and options.get("subsampling") == 0 and image.width * image.height >= LARGE:
        from pipeline.pixels import jpeg as strips

        if options.keys() <= strips.OPTIONS:  # others, such as `optimize`, may differ by strip
            return strips.encoded(image, partial(_saved, media="JPEG"), **options)
    return _saved(image, media, **options)


def _saved(image: Image, media: str, **options: Any) -> bytes:
    with _memory_file() as file:
        image.save(file, format=media, **options)
        file.seek(0)
        return file.read()


def png(image: Image, chunks: PngInfo | None = None) -> bytes:
    """Return the image as PNG, with these chunks of text."""
    if image.width * image.height >= LARGE and image.mode in _MODES:
        import numpy as np

        from pipeline.pixels import png as strips

        return strips.encoded(np.asarray(image).reshape(image.height, image.width, -1), chunks)
    stream = io.BytesIO()
    image.save(stream, format="PNG", pnginfo=chunks)
    return stream.getvalue()


def _memory_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("image"), "w+b")
    return tempfile.TemporaryFile()
