"""Log lines as JSON: one object a line, with the job that they are about."""

from __future__ import annotations

import io
import json
import logging
import threading

from core.logs import JsonLines, job_context, one_line


def test_lines() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    log = logging.Logger("workers.tasks")
    log.addHandler(handler)
    log.warning("it is\nlate, %s", "ä")
    log.info("job_%s failed", "0" * 24)
    with job_context("mine"):
        log.error("here")
        other = threading.Thread(target=lambda: log.error("elsewhere"))
        other.start()
        other.join()
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("it broke")
    log.info("after")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line.get("job") for line in lines] == [None, "job_" + "0" * 24, "mine", None, "mine", None]
    assert lines[0]["message"] == "it is\nlate, ä" and lines[0]["level"] == "WARNING"
    assert lines[0]["logger"] == "workers.tasks" and lines[0]["time"].endswith("Z")
    assert lines[4]["error"].endswith("ValueError: why")


def test_text_from_outside_is_one_line_cut_and_escaped() -> None:
    text = one_line("a\x1b[31m\u202e" + "b" * 1000 + "\nsecond")
    assert text.startswith("a\\x1b[31m\\u202ebb") and text.endswith("…") and len(text) < 330
    assert text.isprintable() and "second" not in text
    assert one_line(" plain text ") == "plain text" and one_line("") == ""
