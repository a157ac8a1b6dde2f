"""Log formats, plain or JSON, with the job and the request that a line belongs to."""

from __future__ import annotations

import contextvars
import copy
import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from contract.printable import printable, printable_lines

_JOB = contextvars.ContextVar("job", default="")
_REQUEST = contextvars.ContextVar("request", default="")
_MOST_CHARACTERS = 20_000  # of a message
_ID = re.compile(r"\bjob_[0-9a-f]{24}\b")


@contextmanager
def job_context(job: str) -> Iterator[None]:
    """Context: log lines inside, in this thread or task, carry this job id."""
    before = _JOB.set(job)
    try:
        yield
    finally:
        _JOB.reset(before)


@contextmanager
def request_context(id: str) -> Iterator[None]:
    """Context: log lines inside, in this thread or task, carry this request id; "": none."""
    before = _REQUEST.set(id)
    try:
        yield
    finally:
        _REQUEST.reset(before)


def current_request_id() -> str:
    """The current request's id, also while its job runs; empty outside of one."""
    return _REQUEST.get()


def _time(record: logging.LogRecord) -> str:
    """When it was logged, in UTC by ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and where known job, request_id and error."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()[:_MOST_CHARACTERS]
        entry = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
        }
        match = _ID.search(message)
        job = _JOB.get() or (match[0] if match else "")
        if job:
            entry["job"] = job
        if _REQUEST.get():
            entry["request_id"] = _REQUEST.get()
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        text = json.dumps(entry, ensure_ascii=False)
        # A line is read as it was meant, and shown by any terminal: what is not printable is escaped as JSON has it.
        return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


class TextLines(logging.Formatter):
    """The lines of another formatter, with the request's id appended where known."""

    def __init__(self, inner: logging.Formatter | None) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        safe = copy.copy(record)
        safe.msg, safe.args = printable_lines(record.getMessage(), _MOST_CHARACTERS), None
        text = self._inner.format(safe)
        text = text if text.isprintable() else "".join(c if c in "\n\t" else printable(c) for c in text)
        if not _REQUEST.get():
            return text
        first, newline, rest = text.partition("\n")  # a message may be followed by a traceback
        return f"{first} [{_REQUEST.get()}]{newline}{rest}"


class _Timed(logging.Formatter):
    """Time, level and message."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _time(record)


def configure(form: str) -> None:
    """Set the format of every handler of the root logger: "text", lines of time, level and message, or "json"."""
    for handler in logging.getLogger().handlers:
        text = _Timed("%(asctime)s %(levelname)s %(message)s")
        handler.setFormatter(JsonLines() if form == "json" else TextLines(text))


def informs(line: str) -> bool:
    """Return whether a line of either format has the level INFO."""
    return '"level": "INFO"' in line or line.split(" ", 2)[1:2] == ["INFO"]
