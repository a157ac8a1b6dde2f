"""POST /v1/images/edits: OpenAI's endpoint, like images.py from a source image and an optional mask.

decoder.py checks and decodes the pictures; of a form forms.py has them open until that is done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request, Response

from api import schemas
from api.access import By, Caller
from api.http import body
from api.jobs import submission
from api.pictures import forms as picture_forms
from api.pictures import images
from api.pictures.references import NONE_GIVEN, GivenPictures
from api.rate_limits import enforce_rate_limit
from api.routers import new_router
from api.service import Given, Service
from contract.image_request import EditRequest

router = new_router("images")


@router.post(
    "/v1/images/edits",
    summary="Draw pictures from one, and wait for them",
    response_model=schemas.Generated,
    responses={200: {"content": {"text/event-stream": {}}}},
    openapi_extra=schemas.document(
        EditRequest, schemas.EditBody, form=picture_forms.FILES[EditRequest], required=("image",)
    ) | {"parameters": [schemas.IDEMPOTENCY_KEY]},
)  # fmt: skip
async def edit(request: Request, service: Given, caller: By) -> Response:
    """Edit an image. Responses, streams and disconnects are as in /v1/images/generations."""
    caller.check("images")
    await enforce_rate_limit(request, service, caller)
    async with _read(request, service, caller) as (fields, form):
        id = submission.idempotency_id(request, caller)
        job, _ = await submission.submit(service, request, caller, fields, id, form, charged=True)
    return await images.answer(service, request, job, fields, stays=id is not None)


@asynccontextmanager
async def _read(request: Request, service: Service, caller: Caller) -> AsyncIterator[tuple[EditRequest, GivenPictures]]:
    """The request, as a form or as JSON, and its files, which are open as long as the context. Raises `ApiError`."""
    if request.headers.get("content-type", "").lower().startswith("application/json"):
        fields = await body.read(request, caller.id)
        yield schemas.read(schemas.EditBody, fields, ignore_unknown=service.ignore_unknown), NONE_GIVEN
        return
    async with picture_forms.read(request, service, caller, EditRequest) as parts:
        yield parts
