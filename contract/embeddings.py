"""OpenAI's embeddings: their body."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from contract.errors import Invalid
from contract.text import MAX_INPUTS, Prompts, TextBody, TextJob, check_prompts, prompts_of

_EXAMPLES: Any = [{"input": ["a cat", "a dog"], "encoding_format": "float"}]


class EmbeddingFields(TextBody):
    """`POST /v1/embeddings`."""

    model_config = ConfigDict(title="EmbeddingRequest", json_schema_extra={"examples": _EXAMPLES})

    input: Prompts = Field(description=f"a text, a list of token ids, or up to {MAX_INPUTS} of either kind")
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="base64: numbers of 32 bits, little-endian; default: float"
    )
    dimensions: int | None = Field(default=None, ge=1, description="so many first ones; default: all that there are")
    stream: Literal[False] | None = Field(default=None, description="not offered: only false is accepted")

    def job(self) -> TextJob:
        """The job of this request. Raises `Invalid`."""
        inputs = prompts_of(self.input)
        if len(inputs) > MAX_INPUTS:
            raise Invalid("input", f"must be at most {MAX_INPUTS} inputs")
        if not all(inputs):
            raise Invalid("input", "must not be empty")
        check_prompts("input", inputs)
        return self._job(
            prompts=inputs, max_tokens=0, embedding=self.encoding_format or "float", dimensions=self.dimensions
        )
