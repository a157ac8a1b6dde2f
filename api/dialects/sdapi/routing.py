"""What all routes of AUTOMATIC1111's API share: errors in its form, and callers by Basic authentication too."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBasic
from fastapi.security.base import SecurityBase
from pydantic import BaseModel, Field

from api import routers
from api.access import Caller, authenticate
from api.dialects.foreign import error_route
from api.errors import ApiError

_BASIC = HTTPBasic(auto_error=False, description="An API key as the password, with any user; Bearer works too.")


class FieldError(BaseModel):
    """Why a field was refused."""

    loc: list[str] = Field(description="body, and the path of the field")
    msg: str
    type: str = Field(description="the error's code")


class SdapiError(BaseModel):
    """An error as AUTOMATIC1111 and FastAPI write it."""

    error: str | None = Field(default=None, description="the error's code; absent where `detail` is a list")
    detail: str | list[FieldError]
    body: str | None = None
    errors: str | None = None


def error_response(error: ApiError) -> JSONResponse:
    """The response for an error: 422 with a list, as FastAPI has it, for a field of the body; else one message."""
    content: dict[str, Any]
    if error.status == 400 and error.param is not None:
        location = ["body", *error.param.split(".")]
        content = {
            "detail": [{"loc": location, "msg": error.detail or str(error), "type": error.code or "value_error"}]
        }
        return JSONResponse(content, 422, dict(error.headers or {}))
    content = {"error": error.code or "error", "detail": str(error), "body": "", "errors": ""}
    return JSONResponse(content, error.status, dict(error.headers or {}))


class _Identified(SecurityBase):
    def __init__(self) -> None:
        self.model, self.scheme_name = _BASIC.model, _BASIC.scheme_name

    async def __call__(self, request: Request) -> Caller:
        return await authenticate(request, _token(request.headers.get("authorization", "")))


By = Annotated[Caller, Depends(_Identified())]


def _token(authorization: str) -> str | None:
    """The API key of a header: the token of Bearer; the password of Basic, or its user if there is no password.

    No answer asks for Basic by `WWW-Authenticate`: a browser that is asked sends the key with other pages' requests.
    """
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return None
    try:
        user, _, password = base64.b64decode(value.strip(), validate=True).decode("utf-8").partition(":")
    except (binascii.Error, ValueError):
        return None
    return password or user or None


def new_router() -> APIRouter:
    """A router of such routes."""
    return routers.new_router("sdapi", error=SdapiError, route_class=error_route(error_response))
