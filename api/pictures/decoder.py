"""Loads and decodes pictures of clients, in the tenant's turn and in child processes.

The one place through which pictures go. Every picture is a turn of its own: a request that waits for it holds no
bytes, and the bytes of those whose turn it is, with what decoding them takes, are within one budget.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from api.concurrency.fair_limiter import FairLimiter
from api.concurrency.process_pool import CallCrashed, CallFailed, CallRefused, CallTimeout, ProcessPool
from api.errors import ApiError, invalid_field
from api.pictures.uploads import PictureSource, PictureUploads, Upload
from contract.card import Size
from contract.image_request import Margins

T = TypeVar("T")

_PROCESSES = 2  # at once, and one per tenant
_BUDGET = 208 * 2**20  # bytes of all turns: one picture of the most pixels, or several small ones
_PIXEL_BYTES = 12  # that decoding takes for each pixel: the picture, a copy in RGB, one being resized
_MEMORY = 2**30  # of a child's address space, shared libraries included
_CPU_S = 10  # of one call; the largest picture takes two
_WAIT_S = 60.0  # for one call on an overloaded machine
_CALLS = 50  # until a child is replaced
_IDLE_S = 15.0


class Loader(Protocol):
    """`Service.stored`: runs a blocking read on a thread for the artifact store."""

    async def __call__(self, tenant: str, function: Callable[[], T], /) -> T: ...


@dataclass(frozen=True, slots=True)
class PictureInfo:
    """The content of a picture's header: its size after orientation, its media type, whether it may be transparent."""

    size: Size
    media_type: str
    alpha: bool


class PictureDecoder:
    """A decoder for one event loop. All methods raise `ApiError`: 400 naming the source's field, 503 on an overloaded
    machine.
    """

    def __init__(self, load: Loader) -> None:
        self._load = load
        self._turns = FairLimiter(_PROCESSES, _BUDGET)
        self._processes = ProcessPool(
            "api.pictures.codec", memory_bytes=_MEMORY, cpu_s=_CPU_S, timeout_s=_WAIT_S, calls=_CALLS, idle_s=_IDLE_S
        )

    def close(self) -> None:
        self._processes.close()

    async def run(self, tenant: str, cost: int, function: Callable[[], T]) -> T:
        """Run a function that holds about `cost` bytes on a thread, in the tenant's turn."""

        def call() -> T | ApiError:
            try:
                return function()
            except ApiError as error:
                # Idle threads keep their last exception, and so what its traceback and its cause hold.
                error.__context__ = None
                return error.with_traceback(None)

        async with self._turns.turn(tenant, cost):
            answer = await self._turns.on_thread(call)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def digested(self, tenant: str, source: PictureSource) -> PictureSource:
        """The source with its digest."""
        if source.digest is not None:
            return source

        def digest() -> str:
            return hashlib.sha256(source.read()).hexdigest()

        async with self._turns.turn(tenant, source.size_bytes):
            return replace(source, digest=await self._load(tenant, digest))

    async def measure(self, tenant: str, source: PictureSource) -> PictureInfo:
        """Check the picture's structure and header. Nothing is decoded."""
        source.check_bytes()
        info, _ = await self._call(tenant, source.size_bytes, "measure", None, source)
        return PictureInfo((info["width"], info["height"]), info["media_type"], info["alpha"])

    async def measured(self, tenant: str, uploads: PictureUploads) -> PictureUploads:
        """The pictures with what was unknown of them, checked. Equal sources are measured once."""
        infos: dict[str | int, PictureInfo] = {}
        for source in uploads.unmeasured:
            if source.identity not in infos:
                infos[source.identity] = await self.measure(tenant, source)

        def with_info(source: PictureSource) -> PictureSource:
            info = infos.get(source.identity)
            if info is None:
                return source
            return replace(source, size=info.size, alpha=info.alpha if source.alpha is None else source.alpha)

        return uploads.map(with_info).check() if infos else uploads

    async def decided(self, tenant: str, uploads: PictureUploads, *, soft: bool) -> PictureUploads:
        """The pictures, of which an edit's source is its own mask if it has transparent pixels and there is none."""
        upload = uploads.source
        if upload is None or not upload.undecided:
            return uploads
        cost = _cost(upload.image, upload.image.size or (1, 1))
        hole, _ = await self._call(tenant, cost, "find_hole", {"soft": soft}, upload.image)
        image = replace(upload.image, alpha=hole)
        return uploads._replace(source=replace(upload, image=image, mask=image if hole else None))

    async def fit_picture(self, tenant: str, upload: Upload, size: Size) -> bytes:
        """The picture in RGB as PNG, its transparent parts white, with its margins, brought to `size` by its `fit` with
        the Lanczos filter.
        """
        arguments = {"margins": _sides(upload.margins), "size": size, "fit": upload.fit}
        cost = _cost(upload.image, upload.size or size, size)
        return (await self._call(tenant, cost, "fit_picture", arguments, upload.image))[1][0]

    async def fit_mask(self, tenant: str, upload: Upload, size: Size, *, soft: bool) -> bytes:
        """The mask in L as PNG, 255 where it is repainted: where the mask's convention says, and in the margins.

        Of a `soft` mask the values between 0 and 255 are kept: its transparency. So are those of a blurred edge.
        """
        arguments = {
            "margins": _sides(upload.margins), "size": size, "fit": upload.fit, "soft": soft,
            "mask_convention": upload.mask_convention, "blur": upload.mask_blur, "own_size": upload.image.size,
        }  # fmt: skip
        cost = _cost(upload.mask, (upload.mask and upload.mask.size) or size, upload.size or size, size)
        return (await self._call(tenant, cost, "fit_mask", arguments, upload.mask))[1][0]

    async def png_info(self, tenant: str, source: PictureSource) -> dict[str, Any]:
        """What a file's texts say, as `codec.png_info` reads them."""
        source.check_bytes()
        info: dict[str, Any] = (await self._call(tenant, 2 * source.size_bytes, "png_info", None, source))[0]
        return info

    async def _call(
        self, tenant: str, cost: int, function: str, arguments: Any, source: PictureSource | None
    ) -> tuple[Any, list[bytes]]:
        async with self._turns.turn(tenant, cost):
            blobs = [] if source is None else [await self._load(tenant, source.read)]
            try:
                return await self._turns.on_thread(self._processes.call, function, arguments, blobs)
            except (CallRefused, CallCrashed) as error:
                raise invalid_field(None if source is None else source.field, str(error)) from None
            except (CallTimeout, CallFailed, OSError):
                message = "Pictures cannot be decoded in time at the moment; try again later."
                raise ApiError(503, message, code="decoder_overloaded", headers={"Retry-After": "10"}) from None
            finally:
                blobs.clear()  # an error's traceback would hold them until the next full collection of garbage


def _cost(source: PictureSource | None, *sizes: Size) -> int:
    """The bytes that decoding a picture takes that has these sizes one after the other: that of the largest."""
    return (0 if source is None else source.size_bytes) + _PIXEL_BYTES * max(width * height for width, height in sizes)


def _sides(margins: Margins | None) -> tuple[int, int, int, int] | None:
    return None if margins is None else (margins.left, margins.top, margins.right, margins.bottom)
