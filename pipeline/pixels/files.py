"""Encodes images as files without holding the GIL for long.

Pillow holds it while it encodes into memory: sixteen images that end at once would take turns with it, a few
milliseconds each, and the engine's thread would wait for all of them whenever it needs it. JPEG is written to a file
descriptor, for which Pillow releases it; PNG, for which it never does, by child processes if the image is large. WebP's
encoder releases it by itself.
"""

from __future__ import annotations

import io
import logging
import os
import tempfile
import threading
from typing import IO, TYPE_CHECKING, Any

from core.process_pool import CallError, ProcessPool
from core.threads import cores

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.PngImagePlugin import PngInfo

log = logging.getLogger(__name__)

LARGE = 2**18  # pixels, from which on a PNG takes longer than a child's pipes
_PROCESSES = ProcessPool(
    "pipeline.pixels.png_process", memory_bytes=4 * 2**30, cpu_s=120, timeout_s=240.0, calls=5000, idle_s=60.0,
    niceness=0,  # a job waits for it
)  # fmt: skip
_TURNS = threading.BoundedSemaphore(max(1, min(8, cores() // 2)))


def encoded(image: Image, media: str, **options: Any) -> bytes:
    """Return the file that `image.save` writes in this format of Pillow's, with these options."""
    with _memory_file() as file:
        image.save(file, format=media, **options)
        file.seek(0)
        return file.read()


def png(image: Image, chunks: PngInfo | None = None) -> bytes:
    """Return the image as PNG, with these chunks of text."""
    if image.width * image.height >= LARGE and image.mode == "RGB":
        texts = [] if chunks is None else [(kind.decode(), data) for kind, data, *_ in chunks.chunks]
        arguments = {"size": image.size, "chunks": [kind for kind, _ in texts]}
        try:
            with _TURNS:
                _, (data,) = _PROCESSES.call("png", arguments, [image.tobytes(), *(data for _, data in texts)])
            return data
        except (CallError, OSError, RuntimeError) as error:  # the last of a system without memory for a thread
            log.warning("a PNG is encoded on a thread, since no process did (%s)", type(error).__name__)
    stream = io.BytesIO()
    image.save(stream, format="PNG", pnginfo=chunks)
    return stream.getvalue()


def _memory_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("image"), "w+b")
    return tempfile.TemporaryFile()
