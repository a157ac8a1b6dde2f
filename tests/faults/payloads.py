"""Builds the forms and pictures of known attacks: each costs a careless server far more than its size suggests."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from functools import cache

from tests.api.world import CARD

CARD_OF_NINE = dataclasses.replace(CARD, controls=("edges",), image_prompts=("base",))


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, chunks: bytes = b"", *, claims: int = 0) -> bytes:
    """A PNG of 8-bit grey, with these chunks behind its header, which may claim another height than there are rows."""
    header = struct.pack(">IIBBBBB", width, claims or height, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes((width + 1) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunks + chunk(b"IDAT", data) + chunk(b"IEND")


def small_png(chunks: bytes = b"", side: int = 64) -> bytes:
    return png(side, side, chunks)


@cache
def png_of_empty_chunks(count: int) -> bytes:
    """Twelve bytes each."""
    return small_png(chunk(b"IDAT") * count)


def form_body(fields: dict[str, bytes], files: dict[str, bytes], boundary: str = "edge") -> bytes:
    """A multipart form."""
    parts = []
    for names, more in ((fields, ""), (files, '; filename="x"')):
        for name, data in names.items():
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
            parts.append(head.encode() + data + b"\r\n")
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


def punycode_form(size_bytes: int) -> bytes:
    """A form of an edit in punycode, in which each letter of the last third is inserted into the rest."""
    prompt = b"x" * (size_bytes * 2 // 3) + b"-" + b"b" * (size_bytes // 3)
    return form_body({"prompt-": prompt}, {"image-": small_png(), "file-": small_png()})


def nine_times(file_id: str, image_prompt: str = "base") -> dict[str, object]:
    """An edit that names one file nine times, for a model with the control network `edges` and this IP-Adapter."""
    image = {"file_id": file_id}
    return {
        "prompt": "x", "steps": 1, "images": [image], "control": [{"model": "edges", "image": image}] * 4,
        "image_prompts": [{"model": image_prompt, "image": image}] * 4,
    }  # fmt: skip
