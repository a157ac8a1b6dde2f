"""POST /v1/chat/completions and /v1/completions: OpenAI's endpoints for text, streaming and not.

Knows how they answer; what they ask for is read in text_drafts.py, jobs are made and followed in service.py. What only
the worker refuses comes back as a job that failed, and is answered as the refusal that it is.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from api import body, schemas, text_drafts
from api.access import By, Caller, count_request
from api.errors import unsuccessful
from api.events import EventStream
from api.images import finished
from api.intake import make, not_served
from api.service import Given, Service
from api.text_schemas import ChatFields, CompletionFields
from api.text_stream import tell
from core.jobs.record import Job, JobState

router = APIRouter(tags=["text"])


@router.post(
    text_drafts.CHAT,
    summary="Answer a conversation",
    response_class=Response,
    responses={200: {"content": {"application/json": {}, "text/event-stream": {}}}},
    openapi_extra=schemas.document(ChatFields),
)
async def chat(request: Request, service: Given, caller: By) -> Response:
    """A client that leaves before the end aborts the answer."""
    return await _answer(request, service, caller, text_drafts.CHAT)


@router.post(
    text_drafts.COMPLETIONS,
    summary="Continue texts",
    response_class=Response,
    responses={200: {"content": {"application/json": {}, "text/event-stream": {}}}},
    openapi_extra=schemas.document(CompletionFields),
)
async def complete(request: Request, service: Given, caller: By) -> Response:
    """A client that leaves before the end aborts the answer."""
    return await _answer(request, service, caller, text_drafts.COMPLETIONS)


async def _answer(request: Request, service: Service, caller: Caller, endpoint: str) -> Response:
    caller.check("text")
    ask = text_drafts.READ[endpoint](await body.read(request))
    await count_request(request, service, caller)
    card = await service.cards.find(ask.fields.model, "text")
    if card is None:
        raise not_served(service, ask.fields.model, "text")
    job = await make(service, text_drafts.draft(ask, card, caller.id))
    answers = text_drafts.ANSWERS[endpoint](job)
    if ask.fields.stream:
        # Only now it is known whether the worker takes it: what it refuses is a 400 and no stream.
        begun = await _begun(service, job)
        if begun is not None:
            raise unsuccessful(begun)
        return EventStream(tell(service, job, answers, usage=ask.fields.usage_wanted))
    ended = await finished(service, request, job, stays=False)
    return JSONResponse(answers.whole(ended.result or {}))


async def _begun(service: Service, job: Job) -> Job | None:
    """Wait for the first token, or the end. The job if it ended without success before there was any."""
    follow = service.follow(job.id, "0", 15.0)
    try:
        async for event in follow:
            if event is not None and event.type == "progress":
                return None
            if event is None or event.final:
                ended = await service.record(job.id)
                if ended is None or ended.state.final:
                    return None if ended is None or ended.state is JobState.SUCCEEDED else ended
    except asyncio.CancelledError:
        await asyncio.shield(service.cancel(job.id))
        raise
    finally:
        await follow.aclose()
    return None
