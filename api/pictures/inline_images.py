"""Sends stored images in base64 inside of JSON.

Images are checked against their keys before the first byte is sent. What was read for that is sent, as far as the
service's memory for it reaches; of other images never more than a part is in memory: they are read again as fast as the
client reads.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from fastapi.responses import StreamingResponse

from api.service import Service
from core.artifacts import ArtifactError, digest_of

_PART = 3 * 2**17  # bytes of an image in memory; a multiple of 3, so that the base64 of its parts can be joined
_HELD = 8 * 2**20  # bytes that an answer may hold, as base64 has them: enough for a few images of 1024²


class Inline:
    """A value of a JSON document that stands for an image in base64."""

    def __init__(self, key: str, size_bytes: int | None = None, prefix: str = "") -> None:
        """`size_bytes` of the image, as its record says; `prefix` is plain text before the base64, as of a data URL."""
        self.key, self.size_bytes, self.prefix = key, size_bytes, prefix
        self.mark = secrets.token_hex(16)


def verified_size(service: Service, key: str) -> int:
    """The size in bytes of an image that is whole. Blocks. Raises `ArtifactError`."""
    size, digest = service.artifacts.size(key), hashlib.sha256()
    for at in range(0, size, _PART):
        digest.update(service.artifacts.read_part(key, at, min(_PART, size - at)))
    if digest.hexdigest() != digest_of(key):
        raise ArtifactError("an artifact is damaged: its content does not match its key")
    return size


def _whole(service: Service, key: str) -> bytes:
    """An image that is whole. Blocks. Raises `ArtifactError`."""
    return service.artifacts.get(key)


def _length(size: int) -> int:
    """The length of so many bytes in base64."""
    return 4 * ((size + 2) // 3)


def _part(service: Service, key: str, at: int, length: int) -> bytes:
    return service.artifacts.read_part(key, at, length)


class InlineDocument:
    """A JSON document, some of whose values are `Inline`."""

    def __init__(self, service: Service, tenant: str, document: Any) -> None:
        """Images are read in the tenant's turn."""
        self._service, self._tenant = service, tenant
        self._images: dict[str, Inline] = {}
        text = json.dumps(document, default=self._marked, separators=(",", ":"), allow_nan=False)
        self._pieces = list(self._split(text))
        self._sizes: dict[str, int] = {}
        self._held: dict[str, bytes] = {}  # images, by key
        self._held_bytes = 0

    def _marked(self, value: Any) -> str:
        assert isinstance(value, Inline)
        self._images[value.mark] = value
        return value.prefix + value.mark

    def _split(self, text: str) -> Iterator[bytes | Inline]:
        for image in self._images.values():  # in the document's order
            before, text = text.split(image.mark, 1)
            yield before.encode("ascii")
            yield image
        yield text.encode("ascii")

    async def verify(self) -> int:
        """Check all images; return the document's length in bytes. Raises `ArtifactError`."""
        for image in self._images.values():
            if image.key in self._sizes:
                continue
            if image.size_bytes is None or not self._hold(_length(image.size_bytes)):
                self._sizes[image.key] = await self._service.stored(
                    self._tenant, verified_size, self._service, image.key
                )
                continue
            self._held[image.key] = data = await self._service.stored(self._tenant, _whole, self._service, image.key)
            self._sizes[image.key] = len(data)
        return self._whole_length()

    def _hold(self, count: int) -> bool:
        """Return whether so many bytes may be held until this document is gone, also where its client has left."""
        memory = self._service.inline_bytes
        if self._held_bytes + count > _HELD or not memory.claim(count):
            return False
        self._held_bytes += count
        weakref.finalize(self, memory.give, count)
        return True

    def _parts(self, image: Inline) -> Iterator[tuple[int, int]]:
        """Yield where each part of an image begins, and its length."""
        size = self._sizes[image.key]
        return ((at, min(_PART, size - at)) for at in range(0, size, _PART))

    def _whole_length(self) -> int:
        return sum(
            _length(self._sizes[piece.key]) if isinstance(piece, Inline) else len(piece) for piece in self._pieces
        )

    def write(self, write: Callable[[bytes], None]) -> None:
        """Check all images and write the document's bytes, on a thread that may block. Raises `ArtifactError`."""
        for image in self._images.values():
            self._sizes[image.key] = verified_size(self._service, image.key)
        for piece in self._pieces:
            if isinstance(piece, Inline):
                for at, length in self._parts(piece):
                    write(base64.b64encode(_part(self._service, piece.key, at, length)))
            else:
                write(piece)

    async def stream(self) -> AsyncIterator[bytes]:
        """The document's bytes, after `verify`. Raises `ArtifactError`."""
        for piece in self._pieces:
            if not isinstance(piece, Inline):
                yield piece
            elif (data := self._held.get(piece.key)) is not None:
                for at, length in self._parts(piece):  # its client reads a part while the next is encoded
                    yield base64.b64encode(memoryview(data)[at : at + length])
            else:
                for at, length in self._parts(piece):
                    part = await self._service.stored(self._tenant, _part, self._service, piece.key, at, length)
                    yield base64.b64encode(part)


async def respond(service: Service, tenant: str, document: Any) -> StreamingResponse:
    """The response with this JSON document, some of whose values are `Inline`. Raises `ArtifactError`."""
    inline = InlineDocument(service, tenant, document)
    headers = {"Content-Length": str(await inline.verify())}
    return StreamingResponse(inline.stream(), media_type="application/json", headers=headers)
