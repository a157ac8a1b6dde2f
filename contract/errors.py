"""Why a request cannot be served: the field, a code for programs, and a sentence for people."""

from __future__ import annotations

INVALID_VALUE = "invalid_value"
INVALID_REQUEST = "invalid_request"  # of a job that failed because its request was invalid
CONTEXT_LENGTH = "context_length_exceeded"  # OpenAI's, of prompts and answers that the model has no room for


class Invalid(ValueError):
    """A request that can never be served as it is.

    `field` is the request's, with dots where it lies deeper; None: the request as a whole. `message` is what is wrong
    with it, without the field's name, and never repeats a text of the request. Printed, it names both.
    """

    def __init__(self, field: str | None, message: str, code: str = INVALID_VALUE) -> None:
        super().__init__(field, message, code)
        self.field = field
        self.message = message
        self.code = code

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    def told(self) -> dict[str, str | None]:
        """As a job's record keeps it. Older versions tell the code and the message alone."""
        about = {"field": self.field, "reason": self.code, "detail": self.message}
        return {"code": INVALID_REQUEST, "message": str(self), **about}

    def of(self, field: str) -> Invalid:
        """The same, of a field by another name."""
        return Invalid(field, self.message, self.code)
