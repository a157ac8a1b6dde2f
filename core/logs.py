"""Log lines, plain or as JSON, that name the job and the request that they are about."""

from __future__ import annotations

import contextvars
import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

_JOB = contextvars.ContextVar("job", default="")
_REQUEST = contextvars.ContextVar("request", default="")
_ID = re.compile(r"\bjob_[0-9a-f]{24}\b")


@contextmanager
def about(job: str) -> Iterator[None]:
    """Everything that is logged inside, in this thread or task, is about this job."""
    before = _JOB.set(job)
    try:
        yield
    finally:
        _JOB.reset(before)


@contextmanager
def request(id: str) -> Iterator[None]:
    """Everything that is logged inside, in this thread or task, belongs to the request of this id; "": to none."""
    before = _REQUEST.set(id)
    try:
        yield
    finally:
        _REQUEST.reset(before)


def request_id() -> str:
    """The id of the request that is being answered, or whose job is being done, here; empty where there is none."""
    return _REQUEST.get()


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, and where there are such, job, request_id and error."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        told = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": message,
        }
        found = _ID.search(message)
        job = _JOB.get() or (found[0] if found else "")
        if job:
            told["job"] = job
        if _REQUEST.get():
            told["request_id"] = _REQUEST.get()
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


class TextLines(logging.Formatter):
    """The lines of another formatter, each with the request's id at its end where there is one."""

    def __init__(self, inner: logging.Formatter | None) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        text = self._inner.format(record)
        if not _REQUEST.get():
            return text
        first, newline, rest = text.partition("\n")  # of a message with a traceback behind it
        return f"{first} [{_REQUEST.get()}]{newline}{rest}"


def speak(form: str) -> None:
    """Have every handler of the root logger write in this form: "text", as it is set up, or "json"."""
    for handler in logging.getLogger().handlers:
        if form == "json":
            handler.setFormatter(JsonLines())
        elif not isinstance(handler.formatter, TextLines):
            handler.setFormatter(TextLines(handler.formatter))
