"""Log lines, plain or as JSON, that say which job they are about. Knows formats; knows nothing of what is logged."""

from __future__ import annotations

import contextvars
import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

_JOB = contextvars.ContextVar("job", default="")
_ID = re.compile(r"\bjob_[0-9a-f]{24}\b")


@contextmanager
def about(job: str) -> Iterator[None]:
    """Everything that is logged inside, in this thread or task, is about this job."""
    before = _JOB.set(job)
    try:
        yield
    finally:
        _JOB.reset(before)


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, and where there are such, job and error."""

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
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


def speak(form: str) -> None:
    """Have every handler of the root logger write in this form, "text" (as it is set up) or "json"."""
    if form == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())
