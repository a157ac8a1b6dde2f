"""The benchmark of marks: all files are validated, and the figures are of every format and kind."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from benchmarks import marks
from benchmarks.harness import record

pytest.importorskip("c2pa", exc_type=ImportError)


def test_every_format_and_kind_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "alone", contextlib.nullcontext)  # no figure of this is kept
    assert marks.main(["--pictures", "1", "--side", "272", "--results", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "marks.json").read_text("utf-8"))
    assert result["valid"] == 6
    for kinds in result["formats"].values():
        assert kinds["off"]["bytes"] + 1000 < kinds["c2pa"]["bytes"]
        assert all(figures["ms"] > 0 for figures in kinds.values())
