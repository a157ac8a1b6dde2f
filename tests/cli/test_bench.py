"""Benchmarks: the commands that published results name measure what these results say."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import parser

RESULTS = Path(__file__).resolve().parents[2] / "lab" / "bench" / "results"


def published() -> Iterator[Any]:
    """The results of `diptych bench`."""
    for path in sorted(RESULTS.rglob("*.json")):
        record = json.loads(path.read_text())
        if record["provenance"]["command"].startswith("diptych bench"):
            yield pytest.param(record, id=str(path.relative_to(RESULTS)))


@pytest.mark.parametrize("record", [*published()])
def test_a_published_command_measures_as_its_results_say(record: dict[str, Any]) -> None:
    """Also where it leaves that to a default."""
    options = vars(parser(["bench"]).parse_args(shlex.split(record["provenance"]["command"])[1:]))
    given = {name: value for name, value in options.items() if type(value) in (int, float) and name in record}
    assert given and {name: record[name] for name in given} == given
