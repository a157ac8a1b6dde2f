"""POST /v1/chat/completions, /v1/completions, /v1/responses and /v1/embeddings: OpenAI's endpoints for text.

A body becomes a `TextJob` (`drafts.py`); the worker's reports and result become events (`answers.py`), and
these the endpoint's answer, whole or streamed (`writers.py`). A request that only the worker can reject returns as
a failed job, and gets the same 400.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import anyio
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.background import BackgroundTask

from api import schemas
from api.access import By, Caller
from api.dialects.foreign import errors_at
from api.errors import ApiError, job_error
from api.http import body
from api.http.json_parts import LargeJSONResponse
from api.jobs.events import EventStream
from api.jobs.follower import job_lost, not_followed
from api.jobs.submission import create, served
from api.pictures.images import finished, left, wait
from api.rate_limits import enforce_rate_limit
from api.routers import new_router
from api.service import Given, Service
from api.text import drafts as text_drafts
from api.text.answers import TextAnswers, response_size
from api.text.events import Failure
from api.text.writers import TextWriter
from contract.card import TextCard
from contract.chat import ChatFields
from contract.embeddings import EmbeddingFields
from contract.responses import ResponseFields
from contract.text import CompletionFields
from core.artifacts import LAID, ArtifactError, fetch_result
from core.jobs.connection import StoreError
from core.jobs.events import PROGRESS
from core.jobs.record import Job, JobState

log = logging.getLogger(__name__)

router = new_router("text")
_KINDS: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
_post = partial(router.post, response_class=Response, responses={200: {"content": _KINDS}})


@_post(text_drafts.CHAT, summary="Answer a conversation", openapi_extra=schemas.document(ChatFields))
async def chat(request: Request, service: Given, caller: By) -> Response:
    """Answer a chat. A client that disconnects before the end cancels the answer."""
    return await _answer(request, service, caller, text_drafts.CHAT)


@router.post("/v1/models/{name:path}" + text_drafts.CHAT, include_in_schema=False)
async def chat_with(name: str, request: Request, service: Given, caller: By) -> Response:
    """Answer a chat with this model, as huggingface_hub's `InferenceClient` asks that has the model's address."""
    return await _answer(request, service, caller, text_drafts.CHAT, name)


@_post(text_drafts.COMPLETIONS, summary="Continue texts", openapi_extra=schemas.document(CompletionFields))
async def complete(request: Request, service: Given, caller: By) -> Response:
    """Complete a text. A client that disconnects before the end cancels the answer."""
    return await _answer(request, service, caller, text_drafts.COMPLETIONS)


@_post(
    text_drafts.RESPONSES,
    summary="Answer a conversation, as the Responses API",
    openapi_extra=schemas.document(ResponseFields),
)
async def respond(request: Request, service: Given, caller: By) -> Response:
    """Answer a conversation that the request brings whole: nothing is stored. A client that disconnects cancels it."""
    return await _answer(request, service, caller, text_drafts.RESPONSES)


@router.post(
    text_drafts.EMBEDDINGS,
    summary="Embed texts",
    response_class=JSONResponse,
    openapi_extra=schemas.document(EmbeddingFields),
)
async def embed(request: Request, service: Given, caller: By) -> Response:
    """Embed texts. A client that disconnects before the end cancels the request."""
    return await _answer(request, service, caller, text_drafts.EMBEDDINGS)


async def _answer(
    request: Request, service: Service, caller: Caller, endpoint: str, model: str | None = None
) -> Response:
    caller.check("text")
    await enforce_rate_limit(request, service, caller)
    read = partial(text_drafts.read, endpoint, ignore_unknown=service.ignore_unknown)
    text_request = await body.read_as(request, caller.id, read)
    name = model or text_request.fields.model
    card = await served(service, name, TextCard, caller.id)
    adapter = service.cards.seen_by(caller.id).adapter(card, name)
    with errors_at(text_request.fields.FIELD_NAMES):
        draft = text_drafts.draft(text_request, card, caller.id, adapter)
        costs = caller.limits.job_costs(card.name, tokens=draft.tokens)
        job, _ = await create(service, draft, request, costs, keyless=not caller.id)
        if text_request.fields.stream:
            writer = text_drafts.WRITERS[endpoint](job, usage=text_request.fields.usage_wanted)
            # Only now is it known whether the worker accepts it: a rejection is a 400 and no stream.
            begun = await wait(service, job, request, _begun(service, job), stays=False)
            if begun is None:
                raise left()
            if begun.state.final and begun.state is not JobState.SUCCEEDED:
                raise job_error(begun)
            return EventStream(_stream(service, job, writer), lambda: service.follower.cancel(job))
        ended = await finished(service, request, job, stays=False)
        result = await _result(service, ended)
        size = text_drafts.answer_size(job, result)
        answer = await body.run_parser(
            caller.id, size, lambda: LargeJSONResponse(text_drafts.answer(endpoint, job, result))
        )
        if endpoint == text_drafts.EMBEDDINGS:
            answer.background = BackgroundTask(_forget, service, ended)
        return answer


async def _result(service: Service, job: Job) -> Mapping[str, Any]:
    """The result of a job that succeeded. Raises `ArtifactError`."""
    if LAID not in (job.result or {}):
        return job.result or {}
    return await service.stored(job.owner, lambda: fetch_result(job.result, service.artifacts.get))


async def _forget(service: Service, job: Job) -> None:
    """Erase a job whose result was delivered: embeddings are megabytes, and nobody asks for them again."""
    with suppress(StoreError):  # then it is kept as long as any job
        await service.call(job.owner, service.store.erase, job.id, job.incarnation)


async def _stream(service: Service, job: Job, writer: TextWriter) -> AsyncGenerator[bytes]:
    """Stream the answers while they are generated, without ids to resume by. If closed early the job is cancelled."""
    ended: Job | None = None
    answers = TextAnswers(job)
    try:
        async with aclosing(service.follower.until_end(job)) as reports:
            async for report in reports:
                for event in answers.progress(report.data):
                    for chunk in writer.stream(event):
                        yield chunk
        ended = await service.follower.final_record(job)
        chunks: Iterable[bytes]
        if ended is not None and ended.state is JobState.SUCCEEDED:
            try:
                result = await _result(service, ended)
            except ArtifactError as failure:
                log.error("the result of job %s cannot be read: %s", job.id, failure)
                unread = ApiError(500, "What was made cannot be read now.", code="artifact_unreadable")
                chunks = writer.stream(Failure(unread.content))
            else:
                rest = lambda: [chunk for event in answers.result(result) for chunk in writer.stream(event)]  # noqa: E731
                chunks = await body.run_parser(job.owner, response_size(job, result), rest)
        else:
            error = not_followed(service.closing.is_set()) if ended is None else job_error(ended)
            chunks = writer.stream(Failure(error.content))
        for chunk in chunks:
            yield chunk
    finally:
        if ended is None:
            with anyio.CancelScope(shield=True):
                await service.follower.cancel(job)


async def _begun(service: Service, job: Job) -> Job | None:
    """Wait for the first token, or the end; returns the job as of then. None: the service closes.

    Raises `ApiError`.
    """
    async with aclosing(service.follower.until_end(job)) as events:
        async for event in events:
            if event.type == PROGRESS:
                return job
    ended = await service.follower.final_record(job)
    if ended is not None:
        return ended
    if service.closing.is_set():
        return None
    raise job_lost()
