"""The error for invalid requests: the field, a code for programs, and a sentence for people."""

from __future__ import annotations

from typing import Any

INVALID_VALUE = "invalid_value"
INVALID_REQUEST = "invalid_request"  # code of a job that failed because its request was invalid
UNSUPPORTED = "unsupported_parameter"  # OpenAI's code for a field, or a use of it, that is not offered
CONTEXT_LENGTH = "context_length_exceeded"  # OpenAI's code for prompts and answers beyond the model's context


class Invalid(ValueError):
    """A request that can never be served as it is.

    `field` is the request's, with dots for nested ones; None: the request as a whole. `message` describes the error
    without the field's name, and never echoes text of the request. str() includes both.
    """

    def __init__(self, field: str | None, message: str, code: str = INVALID_VALUE) -> None:
        super().__init__(field, message, code)
        self.field = field
        self.message = message
        self.code = code

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    def to_dict(self) -> dict[str, Any]:
        """The form stored in a job's record. Older versions store only code and message."""
        body = {"field": self.field, "reason": self.code, "detail": self.message}
        return {"code": INVALID_REQUEST, "message": str(self), **body}

    def of(self, field: str) -> Invalid:
        """Return the same error for another field name."""
        return Invalid(field, self.message, self.code)
