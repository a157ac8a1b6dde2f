"""From a text's fields to a job: OpenAI's two endpoints for text, read, checked against a model's card, estimated.

Knows these requests and model cards; knows nothing of HTTP and of Redis. What only the worker can tell, such as how
many tokens a prompt has, comes back as a job that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from api import schemas
from api.errors import refused
from api.text_answers import Answers, ChatAnswers, CompletionAnswers
from api.text_schemas import ChatFields, CompletionFields, TextFields
from core.jobs.cards import ModelCard
from core.jobs.record import Draft, new_id
from core.text import complaint

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_PRIORITY = 5
_COMPLETION_TOKENS = 16  # OpenAI's default, of completions alone
_USUAL_TOKENS = 256  # of an answer without a limit, for the queue's estimate
_CHARACTERS = 4  # of a token, for the same
_MOST_CHARACTERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as a job: its parameters, and what its work is estimated by."""

    fields: TextFields
    parameters: dict[str, Any]
    characters: int
    count: int


def chat(given: dict[str, Any]) -> Ask:
    """What a body of `CHAT` asks for. Raises `ApiError` (400) naming the field."""
    fields = _read(ChatFields, given)
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
    return Ask(fields, parameters, characters, fields.n or 1)


def completion(given: dict[str, Any]) -> Ask:
    """What a body of `COMPLETIONS` asks for. Raises `ApiError` (400) naming the field."""
    fields = _read(CompletionFields, given)
    prompts = fields.prompts
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_text("prompt", prompt)
    count = len(prompts) * (fields.n or 1)
    limit = _COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    parameters = {"prompts": prompts, **_common(fields, limit)}
    if fields.logprobs is not None:
        parameters["logprobs"] = fields.logprobs
    if fields.echo:
        parameters["echo"] = True
    characters = sum(len(prompt) * (1 if isinstance(prompt, str) else _CHARACTERS) for prompt in prompts)
    return Ask(fields, parameters, characters, count)


# By endpoint: how it reads a body, and what its answers look like.
READ: dict[str, Callable[[dict[str, Any]], Ask]] = {CHAT: chat, COMPLETIONS: completion}
ANSWERS: dict[str, type[Answers]] = {CHAT: ChatAnswers, COMPLETIONS: CompletionAnswers}


def draft(ask: Ask, card: ModelCard, owner: str) -> Draft:
    """The job of this model. Raises `ApiError` (400) naming the field that the model does not offer."""
    most = int(card.limits.get("max_choices", 16))
    if ask.count > most:
        raise refused("n", f"with all prompts at most {most} answers are given")
    limit = ask.parameters.get("max_tokens")
    context = int(card.limits.get("context", 0))
    if limit is not None and context and limit >= context:
        raise refused("max_tokens", f"must be less than the model's context of {context} tokens")
    if len(ask.parameters.get("logit_bias", ())) > card.limits.get("max_logit_bias", 0):
        raise refused("logit_bias", "is not known to the worker of this model, which is of an older version")
    tokens = ask.characters / _CHARACTERS + ask.count * min(limit or _USUAL_TOKENS, context or _USUAL_TOKENS)
    return Draft(
        id=new_id(),
        modality="text",
        model=card.name,
        parameters=ask.parameters,
        priority=_PRIORITY if ask.fields.priority is None else ask.fields.priority,
        deadline_s=ask.fields.deadline_s,
        work_ms=round(1000 * tokens * float(card.costs.get("token_s", 0.0))),
        owner=owner,
        followed=bool(ask.fields.stream),
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
    if fields.logit_bias:
        given["logit_bias"] = fields.logit_bias
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
    "echo": ("echo", "cannot be given together with logprobs: a prompt's are not computed"),
    "echo_tokens": ("echo", "needs prompts that are texts, not token ids"),
    "logit_bias": ("logit_bias", 'must be an object of token ids, such as "70", and numbers from -100 to 100'),
    "prompt": ("prompt", "must be a text, texts, token ids, or lists of token ids"),
    "too_long": (None, "has more entries than are allowed"),
    "too_short": (None, "must not be empty"),
    "string_pattern_mismatch": (None, "must be a name of letters, digits, - and _"),
    "union_tag_not_found": (None, "must be text or a list"),
}


def _read(kind: type[schemas.F], fields: dict[str, Any]) -> schemas.F:
    """As `schemas.read`, with words for what only these requests can be wrong in. Raises `ApiError` (400)."""
    return schemas.read(kind, fields, rules=_RULES)
