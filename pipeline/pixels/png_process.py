"""Encodes PNG files in a child process; imports Pillow and nothing else that is large."""

from __future__ import annotations

import io
from typing import Any

from core.process_pool import Answer, serve


def png(arguments: Any, blobs: list[bytes]) -> Answer:
    """Encode RGB pixels, the first of `blobs`; the others are the data of text chunks."""
    from PIL.Image import frombytes
    from PIL.PngImagePlugin import PngInfo

    pixels, *texts = blobs
    info, stream = PngInfo(), io.BytesIO()
    for kind, data in zip(arguments["chunks"], texts, strict=True):
        info.add(kind.encode(), data)
    frombytes("RGB", tuple(arguments["size"]), pixels).save(stream, format="PNG", pnginfo=info)
    return None, [stream.getvalue()]


if __name__ == "__main__":
    serve(png)
