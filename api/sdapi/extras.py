"""/sdapi/v1/png-info and extra-single-image: what a picture's file says, and a picture in another size."""

from __future__ import annotations

import base64
import weakref
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from api import schemas
from api.errors import ApiError, invalid_field
from api.picture_walk import MAX_PIXELS, MAX_SIDE
from api.rate_limits import enforce_rate_limit
from api.sdapi import infotext, picture_body, requests
from api.sdapi.requests import ExtraSingleImage, PngInfoBody
from api.sdapi.routing import By, new_router
from api.service import Given
from api.uploads import Upload
from contract.card import Size

router: APIRouter = new_router()

_PLAIN = ("", "none", "lanczos")
_PIXEL_BYTES = 7  # that a pixel in RGB takes at most: in the PNG, and in base64


class PngInfo(BaseModel):
    """What a PNG's text chunks say."""

    info: str
    items: dict[str, str]
    parameters: dict[str, str]


class ExtraImage(BaseModel):
    """A picture in another size."""

    html_info: str
    image: str


@router.post(
    "/sdapi/v1/png-info",
    summary="The text of a PNG",
    response_model=PngInfo,
    openapi_extra=schemas.document(PngInfoBody),
)
async def png_info(request: Request, service: Given, caller: By) -> Response:
    """The infotext that a PNG holds, its other texts, and the infotext's parameters by name. Empty for other files."""
    await enforce_rate_limit(request, service, caller)
    async with picture_body.read(request, caller.id) as (fields, pictures):
        source = pictures.source("image", requests.parse(PngInfoBody, fields).image)
        source.check_bytes()
        content = await service.pictures.run(caller.id, 2 * source.size_bytes, lambda: _texts(source.read()))
    return JSONResponse(content)


def _texts(data: bytes) -> dict[str, Any]:
    items = infotext.texts(data)
    info = items.get(infotext.PARAMETERS, "")
    return {"info": info, "items": items, "parameters": infotext.parse(info) if info else {}}


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
        size = _target(extra, (await service.pictures.measure(caller.id, source)).size)
        held = _PIXEL_BYTES * size[0] * size[1]
        if not service.inline_bytes.claim(held):
            message = "Too many pictures are being sent at the moment; try again later."
            raise ApiError(503, message, code="memory_full", headers={"Retry-After": "2"})
        try:
            picture = await service.pictures.fit_picture(caller.id, Upload(source), size)
            content = b'{"html_info":"","image":"%s"}' % await service.stored(base64.b64encode, picture)
            response = Response(content, media_type="application/json")
        except BaseException:
            service.inline_bytes.give(held)
            raise
    weakref.finalize(response, service.inline_bytes.give, held)
    return response


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
