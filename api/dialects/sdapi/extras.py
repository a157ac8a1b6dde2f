"""/sdapi/v1/png-info and extra-single-image: what a picture's file says, and a picture in another size."""

from __future__ import annotations

import base64
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from api import schemas
from api.dialects.sdapi import requests
from api.dialects.sdapi.requests import ExtraSingleImage, PngInfoBody
from api.dialects.sdapi.routing import By, new_router
from api.errors import ApiError, invalid_field
from api.pictures import body as picture_body
from api.pictures.uploads import Upload
from api.pictures.walk import MAX_PIXELS, MAX_SIDE
from api.rate_limits import enforce_rate_limit
from api.service import Given
from contract.card import Size

router: APIRouter = new_router()

_PLAIN = ("", "none", "lanczos")
_PART = 3 * 2**16  # bytes of a picture that are sent at once; a multiple of 3, so that their base64 can be joined
_HEAD, _TAIL = b'{"html_info":"","image":"', b'"}'


class PngInfo(BaseModel):
    """What a file's text chunks, or EXIF's comment, say."""

    info: str
    items: dict[str, str]
    parameters: dict[str, str]


class ExtraImage(BaseModel):
    """A picture in another size."""

    html_info: str
    image: str


@router.post(
    "/sdapi/v1/png-info",
    summary="The text of a picture's file",
    response_model=PngInfo,
    openapi_extra=schemas.document(PngInfoBody),
)
async def png_info(request: Request, service: Given, caller: By) -> Response:
    """The infotext that a PNG, a JPEG or a WebP holds, its other texts, and the infotext's parameters by name."""
    caller.check("images")
    await enforce_rate_limit(request, service, caller)
    async with picture_body.read(request, caller.id) as (fields, pictures):
        source = pictures.source("image", requests.parse(PngInfoBody, fields).image)
        return JSONResponse(await service.pictures.png_info(caller.id, source))


@router.post(
    "/sdapi/v1/extra-single-image",
    summary="A picture in another size",
    response_model=ExtraImage,
    openapi_extra=schemas.document(ExtraSingleImage),
)
async def extra_single_image(request: Request, service: Given, caller: By) -> Response:
    """The picture, resized with the Lanczos filter. Networks enlarge pictures that are drawn here: see `enable_hr`."""
    caller.check("images")
    await enforce_rate_limit(request, service, caller)
    async with picture_body.read(request, caller.id) as (fields, pictures):
        extra = requests.parse(ExtraSingleImage, fields)
        for name in ("upscaler_1", "upscaler_2"):
            if (getattr(extra, name) or "").lower() not in _PLAIN:
                raise invalid_field(name, "must be None or Lanczos: networks enlarge only what is drawn, by enable_hr")
        source = pictures.source("image", extra.image)
        source = replace(source, size=(await service.pictures.measure(caller.id, source)).size)
        picture = await service.pictures.fit_picture(caller.id, Upload(source), _target(extra, source.size or (1, 1)))
    if not service.inline_bytes.claim(len(picture)):
        message = "Too many pictures are being sent at the moment; try again later."
        raise ApiError(503, message, code="memory_full", headers={"Retry-After": "2"})
    answer = _Enlarged(picture)
    weakref.finalize(answer, service.inline_bytes.give, len(picture))
    length = len(_HEAD) + 4 * ((len(picture) + 2) // 3) + len(_TAIL)
    return StreamingResponse(answer.stream(), media_type="application/json", headers={"Content-Length": str(length)})


class _Enlarged:
    """An answer whose picture is in memory until its client has read all but the last part."""

    def __init__(self, picture: bytes) -> None:
        self._picture = picture

    async def stream(self) -> AsyncIterator[bytes]:
        yield _HEAD
        for at in range(0, len(self._picture), _PART):
            yield base64.b64encode(self._picture[at : at + _PART])
        yield _TAIL


def _target(extra: ExtraSingleImage, size: Size) -> Size:
    """The width and height of the enlarged picture. Raises `ApiError` (400)."""
    factor, wide = extra.upscaling_resize or 2.0, (extra.upscaling_resize_w or 512, extra.upscaling_resize_h or 512)
    if extra.resize_mode == 1:
        factor = max(wide[0] / size[0], wide[1] / size[1])
    width, height = (max(1, round(side * factor)) for side in size)
    if extra.resize_mode == 1 and extra.upscaling_crop is not False and (width, height) != wide:
        raise invalid_field("upscaling_resize_w", "must have the picture's shape, or upscaling_crop be false")
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise invalid_field("upscaling_resize", f"makes more than {MAX_SIDE} pixels a side, or {MAX_PIXELS} in all")
    return width, height
