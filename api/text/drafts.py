"""Turns requests to OpenAI's text endpoints into jobs: parses, checks against the model card, estimates the work.

Checks that need a tokenizer, such as the prompt's token count, run on the worker, which fails the job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from api import schemas
from api.errors import invalid_as_api_error
from api.text import embeddings
from api.text.answers import TextAnswers, response_size
from api.text.writers import ChatWriter, CompletionWriter, ResponseWriter, TextWriter
from contract.bounds import PRIORITY
from contract.card import TextCard
from contract.chat import ChatFields
from contract.embeddings import EmbeddingFields
from contract.responses import ResponseFields
from contract.text import CompletionFields, TextBody, TextJob
from core.jobs.record import Job, JobDraft, new_id

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"

_USUAL_TOKENS = 256  # estimated length of an answer without a limit


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A parsed request and its job."""

    fields: TextBody
    job: TextJob


# The body of each endpoint, and the writer of those that generate.
_BODIES: dict[str, type[TextBody]] = {
    CHAT: ChatFields, COMPLETIONS: CompletionFields, RESPONSES: ResponseFields, EMBEDDINGS: EmbeddingFields,
}  # fmt: skip
WRITERS: dict[str, type[TextWriter]] = {
    CHAT: ChatWriter, COMPLETIONS: CompletionWriter, RESPONSES: ResponseWriter,
}  # fmt: skip


def answer(endpoint: str, job: Job, result: Mapping[str, Any]) -> dict[str, Any]:
    """The endpoint's whole response, of a job that succeeded."""
    if endpoint == EMBEDDINGS:
        return embeddings.answer(job, result)
    return WRITERS[endpoint](job).whole(TextAnswers(job).result(result))


def answer_size(job: Job, result: Mapping[str, Any]) -> int:
    """The number of bytes in that response, about."""
    return embeddings.answer_size(result) if "embeddings" in result else response_size(job, result)


def read(endpoint: str, body: dict[str, Any], *, ignore_unknown: bool = False) -> TextRequest:
    """Parse a body of an endpoint. Raises `ApiError` (400) naming the field."""
    fields = schemas.read(_BODIES[endpoint], body, _RULES, ignore_unknown=ignore_unknown)
    with invalid_as_api_error():
        return TextRequest(fields, fields.job())


def draft(request: TextRequest, card: TextCard, owner: str, adapter: str | None = None) -> JobDraft[TextJob]:
    """Build the job for this model, with an adapter. Raises `ApiError` (400) naming the field that the model does not
    offer.
    """
    offer, job = card.limits, replace(request.job, adapter=adapter)
    with invalid_as_api_error():
        job.check(offer)
    job = job.complete(offer)
    tokens = estimated_tokens(job, card)
    return JobDraft(
        id=new_id(),
        modality="text",
        model=card.name,
        request=job,
        priority=PRIORITY if request.fields.priority is None else request.fields.priority,
        deadline_s=request.fields.deadline_s,
        work_ms=round(1000 * tokens * card.costs.token_s),
        owner=owner,
        followed=bool(request.fields.stream),
        tokens=math.ceil(tokens),
    )


def estimated_tokens(job: TextJob, card: TextCard) -> float:
    """The tokens of prompts and answers: of an answer as many as it may have, where the request says it."""
    most = _USUAL_TOKENS if job.max_tokens is None else job.max_tokens
    return job.tokens + job.count * min(most, card.limits.context or _USUAL_TOKENS)


_RULES = {
    "too_short": "must not be empty",
    "string_pattern_mismatch": "must be a name of letters, digits, - and _",
    "union_tag_invalid": "is of no type that is known here",
}
