"""/v1/jobs/{id}/images/{k} and /v1/jobs/{id}/preview: serves a job's finished images, and previews of unfinished
ones.
"""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends, Request, Response

from api.access import BEARER, By, identify
from api.errors import ApiError, invalid_field, refused_picture
from api.http import stored_bytes
from api.jobs.presentation import results, shown
from api.jobs.routes import check_id, find
from api.pictures.links import signed
from api.routers import new_router
from api.service import Given
from core.artifacts import NoArtifact
from core.jobs.record import Job, JobState

router = new_router("jobs")

_LINKS = "(links)"  # no key's id: all readers of signed links, whose owner is not known yet, take turns as one tenant
_NUMBER = re.compile(r"[0-9]{1,2}")
_FOR_EVER = "private, max-age=31536000, immutable"
_RANGE = {
    "name": "Range",
    "in": "header",
    "required": False,
    "description": "one range of bytes, such as bytes=0-1023; with If-Range only where that is the ETag",
    "schema": {"type": "string"},
}
_ENDINGS = {"image/png": "png", "image/webp": "webp", "image/jpeg": "jpg"}


async def _seen(id: str, k: str, request: Request, service: Given) -> Job:
    """The job, for its owner's key or a link signed for this image of it. Raises `ApiError`."""
    signature = request.query_params.get("signature")
    if signature is None or not service.cards.now.guarded:
        return await find(service, id, await identify(request))
    check_id(id)
    expires, now = request.query_params.get("expires", ""), service.cards.now
    # The signature covers the content the link was made for, so it exposes nothing of a later job with this id.
    job = await service.call(_LINKS, service.store.lists.summary, id)
    pictures = [] if job is None else results(job)
    if job is not None and _NUMBER.fullmatch(k) and int(k) < len(pictures):
        content = job.incarnation and pictures[int(k)].get("key", "")
        if signed(now.secret, id, int(k), content, expires, signature, now.clock()):
            return job
    message = "This link is not signed by this service, or its time is over, or what it led to; ask for the job again."
    raise ApiError(403, message, param="signature", code="invalid_signature")


@router.get(
    "/v1/jobs/{id}/images/{k}",
    summary="Fetch a picture",
    dependencies=[Depends(BEARER)],  # for the documentation
    response_class=Response,
    responses={
        200: {"content": {media_type: {} for media_type in _ENDINGS}},
        206: {"content": {media_type: {} for media_type in _ENDINGS}, "description": "The range that was asked for."},
        304: {"description": "The client has it."},
    },
    openapi_extra={"parameters": [_RANGE]},
)
async def image(job: Annotated[Job, Depends(_seen)], k: str, request: Request, service: Given) -> Response:
    """The k-th picture, from 0, or one range of its bytes. 409 while the job is not done; 404 if it ended without
    pictures, or has fewer; 400 if the picture was refused.
    """
    if not job.state.final:
        raise ApiError(409, "The job is not done yet.", code="job_not_done", headers={"Retry-After": "1"})
    pictures = results(job) if job.state is JobState.SUCCEEDED else []
    if _NUMBER.fullmatch(k) is None or int(k) >= len(pictures):
        raise _no_image()
    picture = pictures[int(k)]
    if not shown(picture):
        raise refused_picture()
    ending = _ENDINGS.get(picture["media_type"], "png")
    headers = {
        "Cache-Control": _FOR_EVER,
        "ETag": f'"{picture["key"]}"',  # the key is a hash of the content
        "X-Content-Type-Options": "nosniff",
        "Content-Disposition": f'inline; filename="{request.path_params["id"]}-{int(k)}.{ending}"',
    }
    if _has(request, headers["ETag"]):
        return Response(status_code=304, headers={name: headers[name] for name in ("Cache-Control", "ETag")})
    try:
        return await stored_bytes.respond(
            service, job.owner, request, picture["key"], headers, picture.get("size_bytes")
        )
    except NoArtifact:
        raise _no_image() from None


@router.get(
    "/v1/jobs/{id}/preview",
    summary="Look at a picture in the making",
    response_class=Response,
    responses={200: {"content": {"image/png": {}}}, 204: {"description": "There is none, or no longer."}},
)
async def preview(id: str, request: Request, service: Given, caller: By) -> Response:
    """The newest preview of the job's picture `?image=` (0), a small PNG. 204 if there is none, or none any more."""
    job = await find(service, id, caller)
    k = request.query_params.get("image", "0")
    if _NUMBER.fullmatch(k) is None:
        raise invalid_field("image", "must be the number of an image")
    look = await service.call(caller.id, service.store.preview, job.id, int(k), job.incarnation)
    if look is None:
        return Response(status_code=204, headers={"Cache-Control": "no-store"})
    return Response(look, media_type="image/png", headers={"Cache-Control": "no-store"})


def _no_image() -> ApiError:
    return ApiError(404, "The job has no such image, or it has expired.", param="k", code="image_not_found")


def _has(request: Request, tag: str) -> bool:
    tags = [part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")]
    return tag in tags or "*" in tags
