"""Benchmarks: the commands that published results name measure what these results say."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import parser
from tests.cli.shell import Shell
from tests.cli.test_command import check_help
from tests.cli.test_interruption import Moment, moments

RESULTS = Path(__file__).resolve().parents[3] / "lab" / "bench" / "results"


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


@pytest.mark.parametrize("words", ["bench", "bench ladder", "bench arrivals", "bench serve", "bench simulate"])
def test_help_says_something_of_every_option(shell: Shell, words: str) -> None:
    check_help(shell, words)


def test_what_cannot_be_measured_is_refused(shell: Shell) -> None:
    for name, words, error in (
        ("ladder", "--steps 0", "--steps: must be between 1 and 1000, not 0"),
        ("serve", "--steps 0", "--steps: must be between 1 and 1000, not 0"),
        ("arrivals", "--model /nowhere", "model: /nowhere"),
    ):
        assert f"diptych: {error}" in shell.refusal("bench", name, *words.split())
    assert not [path for path in shell.folder.iterdir() if path.suffix != ".lock"]


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads a process's handlers from /proc")
def test_a_benchmark_stops_at_any_moment(tmp_path: Path) -> None:
    for count, (number, cpu_s) in enumerate(moments("bench", 6)):
        Moment("bench", tmp_path / f"{count}", "").stop(number, cpu_s)
