"""POST /v1/chat/completions and /v1/completions: OpenAI's endpoints for text, streaming and not.

Knows these shapes of request and answer; jobs are made and followed in service.py. What only the worker can tell, such
as how many tokens a prompt has, comes back as a job that failed, and is answered as the refusal that it is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from api import admission, body, schemas
from api.access import By, Caller, count_request
from api.errors import ApiError, refused, unsuccessful
from api.events import EventStream
from api.images import wait
from api.intake import make
from api.service import Given, Service
from api.text_answers import ChatAnswers, CompletionAnswers
from api.text_schemas import ChatFields, CompletionFields, TextFields
from api.text_stream import tell
from core.jobs.connection import StoreDown
from core.jobs.record import Draft, Job, JobState, new_id
from core.jobs.registry import ModelCard
from core.text import complaint

router = APIRouter(tags=["text"])

_CLOSED = 499  # nobody reads it
_PRIORITY = 5
_COMPLETION_TOKENS = 16  # OpenAI's default, of completions alone
_USUAL_TOKENS = 256  # of an answer without a limit, for the queue's estimate
_CHARACTERS = 4  # of a token, for the same
_MOST_CHARACTERS = 1_000_000


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    response_class=Response,
    responses={200: {"content": {"application/json": {}, "text/event-stream": {}}}},
    openapi_extra=schemas.document(ChatFields),
)
async def chat(request: Request, service: Given, caller: By) -> Response:
    """A client that leaves before the end aborts the answer."""
    caller.check("text")
    fields = _read(ChatFields, await body.read(request))
    messages = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.text}
        for message in fields.messages
    ]
    for message in messages:
        _check_text("messages", message["content"])
    parameters = {"messages": messages, **_common(fields, fields.limit)}
    if fields.logprobs:
        parameters["logprobs"] = fields.top_logprobs or 0
    if fields.schema_text is not None:
        parameters["json_schema"] = fields.schema_text
    characters = sum(len(message["content"]) for message in messages)
    ask = _Ask(fields, parameters, characters, fields.n or 1)
    return await _answer(request, service, caller, ask, ChatAnswers)


@router.post(
    "/v1/completions",
    summary="Continue texts",
    response_class=Response,
    responses={200: {"content": {"application/json": {}, "text/event-stream": {}}}},
    openapi_extra=schemas.document(CompletionFields),
)
async def complete(request: Request, service: Given, caller: By) -> Response:
    """A client that leaves before the end aborts the answer."""
    caller.check("text")
    fields = _read(CompletionFields, await body.read(request))
    prompts = fields.prompts
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_text("prompt", prompt)
    count = len(prompts) * (fields.n or 1)
    limit = _COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    parameters = {"prompts": prompts, **_common(fields, limit)}
    if fields.logprobs is not None:
        parameters["logprobs"] = fields.logprobs
    characters = sum(len(prompt) * (1 if isinstance(prompt, str) else _CHARACTERS) for prompt in prompts)
    ask = _Ask(fields, parameters, characters, count)
    return await _answer(request, service, caller, ask, CompletionAnswers)


@dataclass(frozen=True, slots=True)
class _Ask:
    """A request as a job: its parameters, and what its work is estimated by."""

    fields: TextFields
    parameters: dict[str, Any]
    characters: int
    count: int


async def _answer(
    request: Request, service: Service, caller: Caller, ask: _Ask, kind: type[ChatAnswers | CompletionAnswers]
) -> Response:
    await count_request(request, service, caller)
    card = await service.cards.find(ask.fields.model, "text")
    if card is None:
        if service.cards.now.model(None, "text") is not None:
            raise admission.unknown_model()
        raise admission.no_model() if service.cards.redis_answers else StoreDown("Redis has never answered")
    job = await make(service, _draft(ask, card, caller))
    answers = kind(job)
    if ask.fields.stream:
        # Only now it is known whether the worker takes it: what it refuses is a 400 and no stream.
        begun = await _begun(service, job)
        if begun is not None:
            raise unsuccessful(begun)
        return EventStream(tell(service, job, answers, usage=ask.fields.usage_wanted))
    ended = await wait(service, job.id, request, stays=False)
    if ended is None:
        raise ApiError(_CLOSED, "The client went away.", code="client_closed_request")
    if ended.state is not JobState.SUCCEEDED:
        raise unsuccessful(ended)
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


def _draft(ask: _Ask, card: ModelCard, caller: Caller) -> Draft:
    most = int(card.limits.get("max_choices", 16))
    if ask.count > most:
        raise refused("n", f"with all prompts at most {most} answers are given")
    limit = ask.parameters.get("max_tokens")
    context = int(card.limits.get("context", 0))
    if limit is not None and context and limit >= context:
        raise refused("max_tokens", f"must be less than the model's context of {context} tokens")
    tokens = ask.characters / _CHARACTERS + ask.count * min(limit or _USUAL_TOKENS, context or _USUAL_TOKENS)
    return Draft(
        id=new_id(),
        modality="text",
        model=card.name,
        parameters=ask.parameters,
        priority=_PRIORITY if ask.fields.priority is None else ask.fields.priority,
        deadline_s=ask.fields.deadline_s,
        work_ms=round(1000 * tokens * float(card.costs.get("token_s", 0.0))),
        owner=caller.id,
    )


def _common(fields: TextFields, limit: int | None) -> dict[str, Any]:
    for stop in fields.stops:
        if not stop:
            raise refused("stop", "must not be empty")
        _check_text("stop", stop, 256)
    names = (
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "seed",
    )  # fmt: skip
    given: dict[str, Any] = {name: value for name in names if (value := getattr(fields, name)) is not None}
    given["n"] = fields.n or 1
    if limit is not None:
        given["max_tokens"] = limit
    if fields.stops:
        given["stop"] = fields.stops
    return given


def _check_text(field: str, text: str, most: int = _MOST_CHARACTERS) -> None:
    wrong = complaint(text, most)
    if wrong is not None:
        raise refused(field, wrong)


_RULES = {
    "stream_options": ("stream_options", "is for streams alone; set stream to true"),
    "top_logprobs": ("top_logprobs", "needs logprobs to be true"),
    "max_completion_tokens": ("max_completion_tokens", "is another name of max_tokens; give one of them"),
    "response_format": ("response_format", "must have a json_schema where its type is json_schema, and only there"),
    "best_of": ("best_of", "must be equal to n"),
    "prompt": ("prompt", "must be a text, texts, token ids, or lists of token ids"),
    "too_long": (None, "has more entries than are allowed"),
    "too_short": (None, "must not be empty"),
    "string_pattern_mismatch": (None, "must be a name of letters, digits, - and _"),
    "union_tag_not_found": (None, "must be text or a list"),
}


def _read(kind: type[schemas.F], fields: dict[str, Any]) -> schemas.F:
    """As `schemas.read`, with words for what only these requests can be wrong in. Raises `ApiError` (400)."""
    return schemas.read(kind, fields, rules=_RULES)
