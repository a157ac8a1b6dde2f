"""Error responses in OpenAI's format: {"error": {"message", "type", "param", "code"}}.

No response echoes input, except names of fields that are plain words.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.methods import allowed
from contract.content import REFUSED
from contract.errors import INVALID_REQUEST, INVALID_VALUE, Invalid
from core.artifacts import ArtifactError, ArtifactUnwritable, StorageDown, StorageFull
from core.jobs import rights
from core.jobs.connection import StoreDenied, StoreDown, StoreError, StoreFull
from core.jobs.record import Job, JobState
from core.jobs.unreadable import TALLY, UnreadableRecord

log = logging.getLogger(__name__)

# OpenAI endpoints that this service does not have, and their replacements.
_NOT_OFFERED = {
    "/v1/images/variations": "Variations are not offered; use POST /v1/images/edits.",
}

# OpenAI's client retries 408, 409, 429 and 5xx by itself, unless told not to.
NO_RETRY = {"x-should-retry": "false"}

_REFUSED = "What was drawn was refused by this service's checker of contents."
_DOWN_S, _FULL_S = 2, 30  # Retry-After: while Redis restarts, while it is full
_UNSTORED_S = 5  # Retry-After while the artifact store does not reply


class ApiError(Exception):
    """An error response. `param` names the invalid request field, `code` is for programs.

    `detail` is the message without the field's name, where it begins with that.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers
        self.detail = detail

    @property
    def content(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": _type(self.status), "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status, dict(self.headers or {}))


def invalid_field(field: str | None, message: str, code: str = INVALID_VALUE) -> ApiError:
    """A 400 about one field of the request."""
    return ApiError(400, f"{field}: {message}" if field else message, param=field, code=code, detail=message)


@contextlib.contextmanager
def invalid_as_api_error() -> Iterator[None]:
    """Context manager that turns `Invalid` of the contract into a 400."""
    try:
        yield
    except Invalid as error:
        raise invalid_field(error.field, error.message, error.code) from error


def job_error(job: Job) -> ApiError:
    """The response for a client that waited for a job that failed. None of these is worth a retry."""
    error = job.error or {}
    if job.state is JobState.CANCELLED:
        return ApiError(409, "The job was cancelled.", code="cancelled", headers=NO_RETRY)
    if job.state is JobState.EXPIRED:
        return ApiError(504, "The deadline passed before the job was done.", code="expired", headers=NO_RETRY)
    if error.get("code") == INVALID_REQUEST:  # only a worker can check it, and the client can fix it
        if "detail" not in error:  # a worker of an older version
            return invalid_field(None, str(error.get("message") or "The request cannot be served."))
        return invalid_field(error["field"], error["detail"], error["reason"])
    if error.get("code") in (REFUSED, "content_filter"):  # a retry is refused again; the latter by an older worker
        return refused_picture()
    message = str(error.get("message") or "The job failed.")
    return ApiError(500, message, code=str(error.get("code") or "failed"), headers=NO_RETRY)


def refused_picture() -> ApiError:
    """The response in place of pictures that the service's checker refused."""
    return ApiError(400, _REFUSED, code=REFUSED)


KNOWN: tuple[type[Exception], ...] = (
    ApiError, HTTPException, RequestValidationError, StoreError, ArtifactError, UnreadableRecord,
)  # fmt: skip
"""The errors that `api_error` converts."""


def install(app: FastAPI) -> None:
    """Give every error of the app, including the framework's, this format."""
    for kind in KNOWN:
        app.add_exception_handler(kind, _respond)
    app.add_middleware(InternalErrorMiddleware)


async def api_error(request: Request, error: Exception) -> ApiError:
    """The response for an error of `KNOWN` that this request ended with."""
    if isinstance(error, HTTPException):
        return _from_framework(request, error)
    if isinstance(error, RequestValidationError):
        return _from_validation(error)
    if isinstance(error, StoreError):
        service = request.app.state.service
        return store_error(error, await service.lacking() if isinstance(error, StoreDenied) else service.cards.trouble)
    if isinstance(error, ArtifactError):
        return store_error(error, safe=request.method in ("GET", "HEAD"))
    if isinstance(error, UnreadableRecord):
        return _from_record(error)
    assert isinstance(error, ApiError)
    return error


async def _respond(request: Request, error: Exception) -> JSONResponse:
    return (await api_error(request, error)).response


class InternalErrorMiddleware:
    """Answers 500 to unexpected errors, and logs the traceback without sending it.

    Requests that the server ends because it stops, once their time to end has passed, are answered 503.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            if started or scope["type"] != "http":
                raise
            await _stopping(scope).response(scope, receive, send)
        except Exception:
            if started or scope["type"] != "http":
                raise  # part of the response is sent; the server closes the connection, which signals the failure
            log.exception("unexpected error")
            answer = ApiError(
                500, "Something unexpected went wrong; the server's log says what.", code="internal_error"
            )
            await answer.response(scope, receive, send)


def _stopping(scope: Scope) -> ApiError:
    """The response to a request that was cut off: nobody knows what came of it."""
    again = {"Retry-After": str(_DOWN_S)} if scope["method"] in ("GET", "HEAD") else NO_RETRY
    message = "The server is stopping, and did not end this request in time; it may have had its effect."
    return ApiError(503, message, code="stopping", headers=again)


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _from_framework(request: Request, error: HTTPException) -> ApiError:
    """404, 405 and the like of Starlette and FastAPI. Their messages are dropped: they may echo the request."""
    status = error.status_code
    if status == 404 and (instead := _NOT_OFFERED.get(request.url.path.rstrip("/"))):
        return ApiError(404, instead, code="not_offered", headers=NO_RETRY)
    messages = {404: "This endpoint does not exist.", 405: "This endpoint does not support this method."}
    codes = {404: "not_found", 405: "method_not_allowed"}
    headers = {"Allow": allowed(request)} if status == 405 else {}
    message = messages.get(status) or f"{HTTPStatus(status).phrase}."
    return ApiError(status, message, code=codes.get(status), headers=headers)


def _from_validation(error: RequestValidationError) -> ApiError:
    """A parameter of path, query or header that FastAPI rejected."""
    named = next((str(e["loc"][1]) for e in error.errors() if len(e["loc"]) > 1 and e["loc"][0] != "body"), None)
    return invalid_field(named, "is not valid" if named else "The request is not valid.")


def _from_record(error: UnreadableRecord) -> ApiError:
    """A record that this version cannot read: an API of the version that wrote it can."""
    TALLY.note(error)
    message = "This job's record cannot be read by this version of the service; DELETE erases it."
    return ApiError(503, message, code="record_unreadable", headers={"Retry-After": str(_FULL_S)})


def store_error(error: Exception, trouble: str = "", *, safe: bool = False) -> ApiError:
    """The response for a `StoreError` or an `ArtifactError`, which is logged here.

    `trouble`: a known cause of Redis's failure. `safe`: a retry does not generate anything twice.
    """
    if isinstance(error, StorageFull):  # nothing is drawn yet: workers' writes end with their jobs
        log.error("answered 503: %s", error)
        message = "The store of pictures and files is full, and nothing was stored; try again later."
        return ApiError(503, message, code="storage_full", headers={"Retry-After": str(_FULL_S)})
    if isinstance(error, StorageDown):
        log.warning("answered 503: %s", error)
        message = "The store of pictures and files does not answer; ask again later for what was made."
        headers = {"Retry-After": str(_UNSTORED_S), **({} if safe else NO_RETRY)}
        return ApiError(503, message, code="storage_down", headers=headers)
    if isinstance(error, ArtifactUnwritable):
        log.error("a file cannot be stored: %s", error)
        message = "The store of pictures and files refuses to write; the server's log says why."
        return ApiError(500, message, code="artifact_unwritable", headers=NO_RETRY)
    if isinstance(error, ArtifactError):
        log.error("a finished image cannot be read: %s", error)
        message = "What was made cannot be read now; the server's log says why."
        return ApiError(500, message, code="artifact_unreadable", headers=NO_RETRY)
    if isinstance(error, StoreFull):
        message = f"The store of jobs is full ({error}); try again later."
        code, after_s = "store_full", _FULL_S
    elif isinstance(error, StoreDenied):
        message = trouble or f"{error}; {rights.WHERE}"
        code, after_s = "store_rights", _FULL_S
    elif isinstance(error, StoreDown):
        message = f"The store of jobs does not serve ({trouble or error}); try again soon."
        code, after_s = "store_down", _DOWN_S
    else:
        log.error("Redis rejected a command: %s", error)
        return ApiError(500, "The store of jobs went wrong; the server's log says how.", code="store_error")
    log.warning("answered 503: %s", trouble or error)
    return ApiError(503, message, code=code, headers={"Retry-After": str(after_s)})
