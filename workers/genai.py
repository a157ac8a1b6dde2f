"""Attributes of a job's span by OpenTelemetry's semantic conventions for generative AI.

Prompts, answers and whatever else a client wrote are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.jobs.record import Claim
from core.traces import Attributes

PROVIDER = "diptych"
# The conventions define no operation for images alone.
_IMAGE, _CHAT, _COMPLETION = "generate_content", "chat", "text_completion"
_REQUESTED = ("seed", "max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")


def request_attributes(claim: Claim) -> Attributes:
    """What the job asks for. Values of another type than the conventions' are left out: it is not checked yet."""
    parameters, text = claim.parameters, claim.modality == "text"
    operation = (_CHAT if "messages" in parameters else _COMPLETION) if text else _IMAGE
    attributes: dict[str, str | int | float] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": claim.model,
        "gen_ai.output.type": ("json" if parameters.get("json_schema") else "text") if text else "image",
    }
    requested = {name: parameters.get(name) for name in (_REQUESTED if text else _REQUESTED[:1])}
    if parameters.get("n") != 1:
        requested["choice.count"] = parameters.get("n")
    for name, value in requested.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            attributes[f"gen_ai.request.{name}"] = value
    return attributes


def outcome_attributes(claim: Claim, outcome: Mapping[str, Any] | Exception) -> Attributes:
    """What came of the job: its result, as stored, or the error that ended it."""
    if isinstance(outcome, Exception):
        return {"error.type": type(outcome).__name__}
    attributes: dict[str, str | int | list[str]] = {"gen_ai.response.model": claim.model}
    choices, prompts = outcome.get("choices"), outcome.get("prompt_tokens")
    if choices and prompts:
        attributes["gen_ai.usage.input_tokens"] = sum(
            prompts[:: claim.parameters.get("n", 1)]
        )  # once for its n answers
        attributes["gen_ai.usage.output_tokens"] = sum(choice["tokens"] for choice in choices)
        attributes["gen_ai.response.finish_reasons"] = [choice["finish_reason"] for choice in choices]
    return attributes
