"""The response of OpenAI's endpoint for embeddings, of a job's result."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from functools import partial
from typing import Any

from api.http.json_parts import Deferred
from contract.text import TextJob
from core.jobs.record import Job

_FLOAT_CHARACTERS = 3  # of a number in JSON, for each of its characters in base64


def answer_size(result: Mapping[str, Any]) -> int:
    """The number of bytes in the response with this result, about."""
    return _FLOAT_CHARACTERS * sum(map(len, result["embeddings"]))


def answer(job: Job, result: Mapping[str, Any]) -> dict[str, Any]:
    """The response, of a job that succeeded. The numbers of its vectors, millions perhaps, are `Deferred`."""
    request = TextJob.read(job.parameters)
    encode = (lambda vector: Deferred(partial(_numbers, vector))) if request.embedding == "float" else str
    tokens = sum(result["prompt_tokens"])
    body = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector)}
            for index, vector in enumerate(result["embeddings"])
        ],
        "model": request.adapter or job.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return {**body, "warnings": request.warnings} if request.warnings else body


def _numbers(vector: str) -> list[float]:
    """The numbers of a vector in base64, each with the nine digits that tell its 32 bits."""
    data = base64.b64decode(vector)
    return [float(f"{value:.9g}") for value in struct.unpack(f"<{len(data) // 4}f", data)]
