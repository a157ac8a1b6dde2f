"""Log lines as JSON: one object a line, with the job that they are about."""

from __future__ import annotations

import io
import json
import logging
import re
import threading

import pytest

from core.logs import JsonLines, TextLines, configure, informs, job_context


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


@pytest.mark.parametrize("formatter", [JsonLines(), TextLines(logging.Formatter("%(message)s"))], ids=["json", "text"])
def test_text_of_others_moves_no_cursor_and_has_an_end(formatter: logging.Formatter) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    log = logging.Logger("workers.tasks")
    log.addHandler(handler)
    bad = "\x1b[2J\x9b31m\u202e\u2028\x85ä\ud800"
    try:
        raise ValueError(bad)
    except ValueError:
        log.exception("a file says %s", bad)
    log.warning("%s", "x" * 1_000_000)
    lines = stream.getvalue().split("\n")
    assert all(line.isprintable() for line in lines) and max(map(len, lines)) < 50_000
    if isinstance(formatter, JsonLines):
        assert json.loads(lines[0])["message"] == f"a file says {bad}"
    else:
        assert lines[0] == r"a file says \x1b[2J\x9b31m\u202e\u2028\x85ä\ud800"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_services_lines_have_time_and_level(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In UTC, to the millisecond, in either format; who shows them knows which only inform."""
    stream = io.StringIO()
    handler, root = logging.StreamHandler(stream), logging.Logger("root", logging.INFO)
    root.addHandler(handler)
    monkeypatch.setattr(logging, "getLogger", lambda *_: root)
    configure(form)
    root.info("all is well")
    root.warning("INFO is in it")
    (first, second) = stream.getvalue().splitlines()
    found = [json.loads(line)["time"] if form == "json" else line.split(" ")[0] for line in (first, second)]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", when) for when in found)
    assert informs(first) and not informs(second)
    if form == "text":
        assert first.endswith("Z INFO all is well") and second.endswith("Z WARNING INFO is in it")
